"""Keeps the sequences that could compute tokens of their prompt now, in the order in which a step tries them:

    priority      the lowest number comes first, as in vLLM
    readiness     sequences that have all their media come before those that can only compute up to a missing medium
    fairness      tenants take turns, by how much they were served (`fairness`)
    age           the oldest sequence of one tenant comes first

Events keep the order up to date: a step pays for the sequences that it looks at, not for those that wait behind them.
This module knows nothing of blocks and features; the caller says whether a sequence is ready.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from heapq import heappop, heappush

from llm_workers.scheduling.fairness import FairShare
from llm_workers.scheduling.ranked import RankedHeap
from llm_workers.scheduling.sequence import AgeKey, Sequence

_GroupKey = tuple[int, bool]
"""Holds the priority, and whether media are missing."""


class PrefillQueue:
    def __init__(self, max_step_tokens: int) -> None:
        self._max_step_tokens = max_step_tokens
        self._shares = FairShare()
        self._groups: dict[_GroupKey, _Group] = {}
        self._keys: list[_GroupKey] = []
        """Holds the keys of the groups, in order."""
        self._places: dict[Sequence, _GroupKey] = {}
        self._by_rank: RankedHeap[Sequence] = RankedHeap()
        self._num_ready: Counter[str] = Counter()
        """Counts, per tenant, the sequences that have all their media."""
        self._satisfied: list[str] = []
        """Holds the tenants that got all that they asked for in the last step."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._places

    def put(self, sequence: Sequence, is_ready: bool) -> None:
        """Adds the sequence, or moves it to the place where it now belongs."""
        key, place = (sequence.priority, not is_ready), self._places.get(sequence)
        if key == place:
            return
        if place is not None:
            self._groups[place].discard(sequence)
        else:
            self._by_rank.put(sequence, sequence.rank)
        if key not in self._groups:
            insort(self._keys, key)
            self._groups[key] = _Group(self._shares)
        self._groups[key].put(sequence)
        self._places[sequence] = key
        self._count(sequence.tenant, is_ready - (place is not None and not place[1]))
        self._drop_empty(place)

    def discard(self, sequence: Sequence) -> None:
        """Removes the sequence if it is here."""
        place = self._places.pop(sequence, None)
        if place is not None:
            self._by_rank.discard(sequence)
            self._groups[place].discard(sequence)
            self._count(sequence.tenant, -(not place[1]))
            self._drop_empty(place)

    # ------------------------------------------------------------ a step

    def begin_step(self) -> None:
        for tenant in self._satisfied:
            if self._num_ready[tenant]:
                self._shares.begin_waiting(tenant)
        self._satisfied.clear()
        self._shares.begin_step()

    def in_turn(self) -> Generator[Sequence, None, None]:
        """Yields all sequences in the order in which the step tries them; none may be added or removed meanwhile. Close
        the iterator when it is not read to its end."""
        for key in self._keys:
            yield from self._groups[key].in_turn(self._max_step_tokens)

    def first_by_rank(self, count: int) -> list[Sequence]:
        """Returns the first `count` sequences by priority and age alone."""
        first = [self._by_rank.pop()[1] for _ in range(min(count, len(self._by_rank)))]
        for sequence in first:
            self._by_rank.put(sequence, sequence.rank)
        return first

    def end_step(self, chunks: Iterable[tuple[Sequence, int]], tenant_to_decodes: Mapping[str, int]) -> None:
        """Notes that these sequences compute up to these ends in this step, and that these numbers of sequences of each
        tenant decode in the same step. The tenants are charged; a tenant whose ready prompts are all computed to their
        ends got all that it asked for."""
        charges: Counter[str] = Counter(tenant_to_decodes)
        num_ended: Counter[str] = Counter()
        for sequence, end in chunks:
            charges[sequence.tenant] += end - sequence.num_computed
            place = self._places.get(sequence)
            if place is not None and not place[1] and end == sequence.num_tokens:
                num_ended[sequence.tenant] += 1
        for tenant, num_tokens in charges.items():
            self._shares.charge(tenant, num_tokens)
        for tenant, count in num_ended.items():
            if count == self._num_ready[tenant]:
                self._shares.end_waiting(tenant)
                self._satisfied.append(tenant)

    # ------------------------------------------------------------ checks

    def check_invariants(self) -> None:
        """Asserts that the queue is consistent; for tests."""
        ready = Counter(one.tenant for one, (_, is_waiting) in self._places.items() if not is_waiting)
        assert ready == +self._num_ready, "ready sequences are counted wrongly"
        assert self._keys == sorted(self._groups), "the groups are out of order"
        members = [sequence for group in self._groups.values() for sequence in group.members()]
        assert len(members) == len(self._places) == len(self._by_rank)
        assert set(members) == self._places.keys(), "a sequence is in no group, or in a wrong one"

    def _count(self, tenant: str, change: int) -> None:
        if not change:
            return
        self._num_ready[tenant] += change
        if not self._num_ready[tenant]:
            del self._num_ready[tenant]
            self._shares.end_waiting(tenant)
        elif change > 0 and self._num_ready[tenant] == 1:
            self._shares.begin_waiting(tenant)

    def _drop_empty(self, key: _GroupKey | None) -> None:
        if key is not None and not self._groups[key]:
            del self._groups[key]
            del self._keys[bisect_left(self._keys, key)]


class _Group:
    """Holds the sequences of one priority that are equally ready."""

    def __init__(self, shares: FairShare) -> None:
        self._shares = shares
        self._tenant_to_queue: dict[str, RankedHeap[Sequence]] = {}
        """Holds the sequences of each tenant, ordered by age."""
        self._tenants: RankedHeap[str] = RankedHeap()
        """Holds the tenants, ordered by count and then by the age of the tenant's first sequence. Counts grow: a tenant
        whose count grew since it was put here is put here again when it comes first."""

    def __bool__(self) -> bool:
        return bool(self._tenant_to_queue)

    def members(self) -> list[Sequence]:
        return [one for queue in self._tenant_to_queue.values() for one in queue]

    def put(self, sequence: Sequence) -> None:
        queue = self._tenant_to_queue.setdefault(sequence.tenant, RankedHeap())
        queue.put(sequence, sequence.age)
        self._note(sequence.tenant, queue)

    def discard(self, sequence: Sequence) -> None:
        queue = self._tenant_to_queue[sequence.tenant]
        queue.discard(sequence)
        self._note(sequence.tenant, queue)

    def in_turn(self, max_step_tokens: int) -> Generator[Sequence, None, None]:
        """Yields sequences as `PrefillQueue.in_turn` does. In this order, a tenant whose sequence was yielded counts
        as served with as many tokens of that sequence as a step could compute."""
        shown: list[Sequence] = []
        turned: list[tuple[int, AgeKey, str]] = []
        """Holds the tenants that had a turn in this pass and have more: count, age of the next sequence, name."""
        try:
            while True:
                first = self._least_served()
                if turned and (first is None or turned[0][:2] <= first[0]):
                    count, _, tenant = heappop(turned)
                elif first is not None:
                    (count, _), tenant = self._tenants.pop()
                else:
                    return
                queue = self._tenant_to_queue[tenant]
                _, sequence = queue.pop()
                shown.append(sequence)
                num_tokens = min(sequence.num_tokens - sequence.claims_from, max_step_tokens)
                following = queue.peek()
                if following is not None:
                    heappush(turned, (count + num_tokens, following[0], tenant))
                yield sequence
        finally:
            for sequence in shown:
                self.put(sequence)

    def _least_served(self) -> tuple[tuple[int, AgeKey], str] | None:
        while (first := self._tenants.peek()) is not None:
            (count, age), tenant = first
            served = self._shares.served(tenant)
            if served <= count:
                return first
            self._tenants.put(tenant, (served, age))
        return None

    def _note(self, tenant: str, queue: RankedHeap[Sequence]) -> None:
        first = queue.peek()
        if first is None:
            del self._tenant_to_queue[tenant]
            self._tenants.discard(tenant)
        else:
            self._tenants.put(tenant, (self._shares.raised(tenant), first[0]))

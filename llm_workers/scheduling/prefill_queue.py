"""Keeps the sequences that could compute tokens of their prompt now, in the order in which a step tries them:

    priority      the lowest number comes first, as in vLLM
    kind          prompts without media come first (`PromptKind`); a step keeps a part of its budget for the next kind,
                  those that have all their media; those that can only compute up to a missing medium come last
    fairness      tenants take turns, by how much they were served (`FairShare`)
    age           the oldest sequence of one tenant comes first

`PrefillQueue` keeps one `_Group` of sequences for each priority and kind; in a group, `FairShare` says which
tenant comes next. Events keep the order up to date: a step pays for the sequences that it looks at, not for those that
wait behind them.

This module knows nothing of blocks and features; the caller says whether a sequence is ready.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from enum import IntEnum
from heapq import heappop, heappush
from typing import NamedTuple

from fabric.ranked_heap import RankedHeap
from llm_workers.scheduling.sequence import AgeKey, Rank, Sequence


class PromptKind(IntEnum):
    """A `PromptKind` says which media a prompt contains and has, in the order in which a step tries the kinds."""

    TEXT = 0
    """The prompt contains no media."""
    READY = 1
    """The worker has all media that the prompt still needs."""
    WAITING = 2
    """Media are missing, so the sequence can only compute up to the first of them."""


class GroupKey(NamedTuple):
    """A `GroupKey` names the sequences of one priority and kind."""

    priority: int
    kind: PromptKind


class PrefillQueue:
    """Holds the sequences that could compute tokens of their prompt, and yields them `in_turn`."""

    def __init__(self, max_step_tokens: int) -> None:
        self._max_step_tokens = max_step_tokens
        self._shares = FairShare()
        self._groups: dict[GroupKey, _Group] = {}
        self._keys: list[GroupKey] = []
        """Holds the keys of the groups, in order."""
        self._places: dict[Sequence, GroupKey] = {}
        self._by_rank: RankedHeap[Sequence, Rank] = RankedHeap()
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
        kind = (PromptKind.READY if sequence.has_media else PromptKind.TEXT) if is_ready else PromptKind.WAITING
        key, place = GroupKey(sequence.priority, kind), self._places.get(sequence)
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
        self._count(sequence.tenant, is_ready - (place is not None and place.kind != PromptKind.WAITING))
        self._drop_empty(place)

    def discard(self, sequence: Sequence) -> None:
        """Removes the sequence if it is here."""
        place = self._places.pop(sequence, None)
        if place is not None:
            self._by_rank.discard(sequence)
            self._groups[place].discard(sequence)
            self._count(sequence.tenant, -(place.kind != PromptKind.WAITING))
            self._drop_empty(place)

    # ------------------------------------------------------------ a step

    def begin_step(self) -> None:
        for tenant in self._satisfied:
            if self._num_ready[tenant]:
                self._shares.begin_waiting(tenant)
        self._satisfied.clear()
        self._shares.begin_step()

    @property
    def groups(self) -> SequenceOf[GroupKey]:
        """Returns the groups that have sequences, in the order in which the step tries them."""
        return self._keys

    def in_turn(self, key: GroupKey) -> Generator[Sequence, None, None]:
        """Yields the sequences of a group in the order in which the step tries them; none may be added or removed
        meanwhile. Close the iterator when it is not read to its end."""
        return self._groups[key].in_turn(self._max_step_tokens)

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
            if place is not None and place.kind != PromptKind.WAITING and end == sequence.num_tokens:
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
        ready = Counter(one.tenant for one, key in self._places.items() if key.kind != PromptKind.WAITING)
        assert ready == +self._num_ready, "ready sequences are counted wrongly"
        assert self._keys == sorted(self._groups), "the groups are out of order"
        members = [sequence for group in self._groups.values() for sequence in group.members()]
        assert len(members) == len(self._places) == len(self._by_rank)
        assert set(members) == self._places.keys(), "a sequence is in no group or in a wrong one"

    def _count(self, tenant: str, change: int) -> None:
        if not change:
            return
        self._num_ready[tenant] += change
        if not self._num_ready[tenant]:
            del self._num_ready[tenant]
            self._shares.end_waiting(tenant)
        elif change > 0 and self._num_ready[tenant] == 1:
            self._shares.begin_waiting(tenant)

    def _drop_empty(self, key: GroupKey | None) -> None:
        if key is not None and not self._groups[key]:
            del self._groups[key]
            del self._keys[bisect_left(self._keys, key)]


class _Group:
    """Holds the sequences of one priority and kind."""

    def __init__(self, shares: FairShare) -> None:
        self._shares = shares
        self._tenant_to_queue: dict[str, RankedHeap[Sequence, AgeKey]] = {}
        """Holds the sequences of each tenant, ordered by age."""
        self._tenants: RankedHeap[str, tuple[int, AgeKey]] = RankedHeap()
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

    def _note(self, tenant: str, queue: RankedHeap[Sequence, AgeKey]) -> None:
        first = queue.peek()
        if first is None:
            del self._tenant_to_queue[tenant]
            self._tenants.discard(tenant)
        else:
            self._tenants.put(tenant, (self._shares.raised(tenant), first[0]))


# ---------------------------------------------------------------- fair shares of tenants

_FEW_TENANTS = 64
"""Counts without meaning are not removed before there are more tenants than this."""


class FairShare:
    """Counts how much each tenant was served, so that many requests of one tenant do not starve the few of another.

    These are virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): every
    computed token is counted for its tenant, and among prompts of equal rank the tenant with the smallest count goes
    first. A tenant that does not wait accumulates no credit: when it comes back, its count is raised to the floor,
    which is the least count of the tenants that wait. The count of a tenant that gets all that it asks for is raised in
    the same way, step by step. While two tenants both have more to compute of one kind of prompt than they get, the
    amounts that they got differ by little more than a step's tokens, and every tenant that waits is served again and
    again.

    Counts and floor only grow, and each call costs the logarithm of the number of tenants."""

    def __init__(self) -> None:
        self._tenant_to_served: dict[str, int] = {}
        self._waiting: RankedHeap[str, int] = RankedHeap()
        """Holds the waiting tenants, ordered by count. No count of a waiting tenant is below the floor."""
        self._floor = 0
        self._most = 0
        """This is an upper bound of all counts."""
        self._num_kept = 0
        """Holds the number of counts that were left after the last removal of counts without meaning."""

    def served(self, tenant: str) -> int:
        """Returns the tenant's count. A count below the floor means the same as the floor."""
        return self._tenant_to_served.get(tenant, 0)

    def begin_waiting(self, tenant: str) -> None:
        """Notes that the tenant has prompts that could be computed, from now on."""
        if tenant not in self._waiting:
            self._raise_floor()
            self._set(tenant, self.raised(tenant))
            self._waiting.put(tenant, self._tenant_to_served[tenant])

    def end_waiting(self, tenant: str) -> None:
        """Notes that the tenant has no such prompts any more, or gets all that it asks for. When no tenant waits, all
        counts are forgotten, and all tenants are equal again."""
        self._waiting.discard(tenant)
        if not self._waiting:
            self._forget()

    def raised(self, tenant: str) -> int:
        """Returns the tenant's count, raised to the floor; with this count the tenant would begin to wait."""
        return max(self._floor, self.served(tenant))

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Counts this many tokens as computed for the tenant, for any purpose."""
        self._set(tenant, self.raised(tenant) + num_tokens)
        if tenant in self._waiting:
            self._waiting.put(tenant, self._tenant_to_served[tenant])

    def begin_step(self) -> None:
        """Raises the floor, and removes the counts that have no meaning any more once there are many of them."""
        self._raise_floor()
        if len(self._tenant_to_served) > 2 * self._num_kept + _FEW_TENANTS:
            self._tenant_to_served = {
                tenant: served
                for tenant, served in self._tenant_to_served.items()
                if served > self._floor or tenant in self._waiting
            }
            self._num_kept = len(self._tenant_to_served)

    def _raise_floor(self) -> None:
        least = self._waiting.peek()
        if least is None:
            self._forget()
        else:
            self._floor = max(self._floor, least[0])

    def _forget(self) -> None:
        self._floor = self._most
        self._tenant_to_served.clear()
        self._num_kept = 0

    def _set(self, tenant: str, served: int) -> None:
        self._tenant_to_served[tenant] = served
        self._most = max(self._most, served)

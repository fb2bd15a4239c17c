"""Tracks by events which sequences are alive and which state each of them is in, so that a step, a report and an
arrival cost nothing for the other sequences.

    held           waits for a sibling (another choice of its request) that computes their prompt
    at doorstep    the unit of its next token is not here, so it can compute nothing
    prefilling     could compute tokens now: in `prefills`, in the order in which they are tried
    decoding       only its last token is not computed: in `decodes`

In addition, a sequence that has begun is in `holders`: only such sequences may hold blocks. A sequence that decodes
plainly (see `decode_batch`) has a row in `batch`. The `Roster` says which sequences are alive and which are held;
`Standings` keeps the other states, and the backlog of open tokens that follows from them. A `RankedList` keeps
sequences in the order of their ranks.

This module knows nothing of steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Container, Hashable, Iterator
from collections.abc import Sequence as SequenceOf
from math import inf
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

from fabric.contracts import AttemptId, SequenceId
from llm_workers.scheduling.decode_batch import DecodeBatch
from llm_workers.scheduling.prefill_queue import PrefillQueue
from llm_workers.scheduling.sequence import Sequence
from llm_workers.scheduling.sequence_resources import SequenceResources

_rank: Callable[[Sequence], object] = attrgetter("rank")


class Standings:
    """Keeps the states of all live sequences. `refresh` must be called after a change of a sequence's tokens, blocks or
    units that may change its state."""

    def __init__(
        self,
        roster: Roster,
        resources: SequenceResources,
        batch: DecodeBatch,
        max_step_tokens: int,
        context_scale_tokens: float,
    ) -> None:
        self._roster, self._resources = roster, resources
        self.batch = batch
        self._context_scale_tokens = context_scale_tokens
        self.prefills = PrefillQueue(max_step_tokens)
        self.decodes: RankedList[Sequence] = RankedList(_rank)
        self.holders: RankedList[Sequence] = RankedList(_rank)
        self._open: dict[Sequence, _Open] = {}
        """Holds the sequences that could compute something and do not decode."""
        self._num_tokens = self._num_token_contexts = 0
        """Holds the sums over `_open`."""
        self._behind: dict[Sequence, _Open] = {}
        """Holds, for the sequences that lack a unit, the tokens from their doorstep on."""
        self._num_behind = self._num_behind_contexts = 0
        """Holds the sums over `_behind`."""
        self.num_media_tokens = 0
        """Counts those of these tokens that belong to prompts with media."""
        self._priority_to_ready_tokens: Counter[int] = Counter()
        """Counts, by priority, those that belong to prompts with media of which all are here."""
        self._stirred: dict[Sequence, None] = {}
        """Holds the sequences that were refreshed since doorsteps were last noted."""
        self.num_at_doorstep = 0

    @property
    def text_priority(self) -> float:
        """Returns the most urgent priority of a sequence without media, and infinity if there is none."""
        return min(self._roster.priority_to_texts, default=inf)

    def num_ready_tokens(self, priority: int) -> int:
        """Counts the open tokens of prompts of this priority with media, of which all are here."""
        return self._priority_to_ready_tokens[priority]

    def weight_at(self, context: int) -> float:
        """Returns what a token after this context costs, in tokens without a context."""
        return 1.0 + context / self._context_scale_tokens

    @property
    def backlog(self) -> Backlog:
        twice_scale = 2.0 * self._context_scale_tokens
        weighted = self._num_tokens + self._num_token_contexts / twice_scale
        return Backlog(
            self._num_tokens, weighted, self._num_behind, self._num_behind + self._num_behind_contexts / twice_scale
        )

    @property
    def is_stirred(self) -> bool:
        """Returns whether a sequence was refreshed since doorsteps were last noted."""
        return bool(self._stirred)

    def refresh(self, sequence: Sequence) -> None:
        """Updates the state of a live sequence after a change of its tokens, its blocks or its units, or of whether it
        is held."""
        self._stirred[sequence] = None
        if sequence.is_started:
            self.holders.add(sequence)
        else:
            self.holders.discard(sequence)
        if sequence.is_decoding:
            self.decodes.add(sequence)
        else:
            self.decodes.discard(sequence)
        self.batch.refresh(sequence)
        opened, behind = self._parts_of(sequence)
        if opened is None:
            self.prefills.discard(sequence)
        else:
            self.prefills.put(sequence, self._resources.references.is_complete(sequence.sequence_id))
        self._count(sequence, opened, behind)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that has left."""
        self.holders.discard(sequence)
        self.decodes.discard(sequence)
        self.batch.discard(sequence)
        self.prefills.discard(sequence)
        self._count(sequence, None, None)
        self._stirred.pop(sequence, None)
        self.num_at_doorstep -= sequence.is_at_doorstep

    def note_doorsteps(self, in_flight: Container[SequenceId], now_s: float) -> list[SequenceId]:
        """Starts and stops the stopwatches of those sequences that came to their doorsteps or left them since the last
        call, and returns those that came. A sequence that is in flight is at no doorstep."""
        arrived = []
        for sequence in self._stirred:
            is_at_doorstep = (
                not self._resources.references.is_complete(sequence.sequence_id)
                and sequence not in self._open
                and not self._roster.is_held(sequence)
                and sequence.sequence_id not in in_flight
            )
            if is_at_doorstep != sequence.is_at_doorstep:
                sequence.is_at_doorstep = is_at_doorstep
                self.num_at_doorstep += 1 if is_at_doorstep else -1
                sequence.stopwatch.hold(is_at_doorstep, now_s)
                if is_at_doorstep:
                    arrived.append(sequence.sequence_id)
        self._stirred.clear()
        return arrived

    def check_invariants(self) -> None:
        """Asserts, between calls, that the state is consistent; for tests."""
        live = list(self._roster.sequences)
        texts = Counter(one.priority for one in live if not one.has_media)
        assert texts == self._roster.priority_to_texts, "sequences without media are counted wrongly"
        self.prefills.check_invariants()
        self.batch.check_invariants(live)
        for ranked, members in (
            (self.holders, [one for one in live if one.is_started]),
            (self.decodes, [one for one in live if one.is_decoding]),
        ):
            assert list(ranked) == sorted(members, key=lambda one: one.rank), "the order by rank is broken"
        for sequence in live:
            opened, behind = self._parts_of(sequence)
            assert self._open.get(sequence) == opened, f"{sequence.sequence_id}: its open tokens were not refreshed"
            assert self._behind.get(sequence) == behind, f"{sequence.sequence_id}: its tokens behind were not refreshed"
            assert (sequence in self.prefills) == (opened is not None)
            assert sequence.is_started or not len(sequence.table), f"{sequence.sequence_id} waits but holds blocks"
        assert self._open.keys() | self._behind.keys() <= set(live), "a sequence that has left is counted"
        sums = [sum(column) for column in zip(*self._open.values(), strict=True)] or [0, 0]
        assert sums == [self._num_tokens, self._num_token_contexts]
        sums = [sum(column) for column in zip(*self._behind.values(), strict=True)] or [0, 0]
        assert sums == [self._num_behind, self._num_behind_contexts]
        media = [(one, each.num_tokens) for one, each in self._open.items() if one.has_media]
        assert self.num_media_tokens == sum(num_tokens for _, num_tokens in media)
        ready: Counter[int] = Counter()
        for one, num_tokens in media:
            ready[one.priority] += num_tokens * self._resources.references.is_complete(one.sequence_id)
        assert +ready == self._priority_to_ready_tokens, "tokens of prompts with all their media are counted wrongly"
        assert self.num_at_doorstep == sum(one.is_at_doorstep for one in live)

    def _parts_of(self, sequence: Sequence) -> tuple[_Open | None, _Open | None]:
        """Returns the sequence's open tokens, or None if it is at its doorstep, and the tokens from its next doorstep
        on, or None if it lacks no unit. Both are None if it decodes or waits for a sibling."""
        if sequence.is_decoding or self._roster.is_held(sequence):
            return None, None
        start, end = sequence.claims_from, sequence.num_tokens
        doorstep = self._resources.doorstep(sequence, start, end)
        return _Open.of(start, doorstep), _Open.of(doorstep, end)

    def _count(self, sequence: Sequence, opened: _Open | None, behind: _Open | None) -> None:
        opened_before, behind_before = self._open.pop(sequence, None), self._behind.pop(sequence, None)
        if opened_before is not None:
            self._num_tokens -= opened_before.num_tokens
            self._num_token_contexts -= opened_before.num_token_contexts
            self._count_media(sequence, -opened_before.num_tokens, is_ready=behind_before is None)
        if opened is not None:
            self._open[sequence] = opened
            self._num_tokens += opened.num_tokens
            self._num_token_contexts += opened.num_token_contexts
            self._count_media(sequence, opened.num_tokens, is_ready=behind is None)
        if behind_before is not None:
            self._num_behind -= behind_before.num_tokens
            self._num_behind_contexts -= behind_before.num_token_contexts
        if behind is not None:
            self._behind[sequence] = behind
            self._num_behind += behind.num_tokens
            self._num_behind_contexts += behind.num_token_contexts

    def _count_media(self, sequence: Sequence, num_tokens: int, *, is_ready: bool) -> None:
        if sequence.has_media:
            self.num_media_tokens += num_tokens
            if is_ready:
                self._priority_to_ready_tokens[sequence.priority] += num_tokens
                if not self._priority_to_ready_tokens[sequence.priority]:
                    del self._priority_to_ready_tokens[sequence.priority]


class Backlog(NamedTuple):
    """Counts the prompt tokens that are not computed yet, which are the work ahead of a request that arrives now."""

    num_tokens: int
    """Counts the tokens that could be computed now."""
    weighted_tokens: float
    """Counts the same tokens, weighted by their contexts (`fabric.contracts.learned_cost`)."""
    num_behind: int
    """Counts the tokens behind a missing feature. They become work ahead as soon as the feature arrives, which may be
    before the next step begins."""
    weighted_behind: float
    """Counts the tokens of `num_behind`, weighted by their contexts."""


class _Open(NamedTuple):
    """Holds what one sequence adds to the backlog, in whole numbers, so that sums stay exact."""

    num_tokens: int
    num_token_contexts: int
    """Holds twice the sum, over these tokens, of the number of tokens before each, plus half a token for itself:
    `n * (2 * context + n)`."""

    @classmethod
    def of(cls, start: int, end: int) -> _Open | None:
        """Returns the numbers of the tokens from `start` to `end`, or None if there are none."""
        count = end - start
        return cls(count, count * (start + end)) if count else None


# ---------------------------------------------------------------- which sequences are alive


class Roster:
    """Records which sequences are alive, by id and by attempt, and which of them wait for a sibling.

    Choices of one request share their prompt: one of them, the leader, computes it, and the others wait until then and
    take over its blocks. A roster knows nothing of blocks or units."""

    def __init__(self) -> None:
        self._sequences: dict[SequenceId, Sequence] = {}
        self.priority_to_texts: Counter[int] = Counter()
        """Counts, by priority, the sequences whose prompts contain no media; a priority without any has no entry."""
        self._attempts: dict[AttemptId, list[Sequence]] = {}
        self._led: dict[AttemptId, list[Sequence]] = {}
        """Holds the attempts of several choices whose prompt no choice has computed yet; the first sequence is the
        leader."""
        self._held: set[SequenceId] = set()
        self._released: list[Sequence] = []
        """Holds the sequences that waited and lead now."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, attempt_id: AttemptId) -> bool:
        return attempt_id in self._attempts

    @property
    def has_released(self) -> bool:
        """Returns whether `take_released` has something to return."""
        return bool(self._released)

    @property
    def sequences(self) -> Collection[Sequence]:
        """Returns all live sequences, in no particular order."""
        return self._sequences.values()

    def get(self, sequence_id: SequenceId) -> Sequence | None:
        return self._sequences.get(sequence_id)

    def of_attempt(self, attempt_id: AttemptId) -> list[Sequence]:
        """Returns the attempt's live sequences, by choice; the list is empty for an unknown attempt."""
        return list(self._attempts.get(attempt_id, ()))

    def is_held(self, sequence: Sequence) -> bool:
        """Returns whether the sequence waits for a sibling to compute the prompt and has claimed no unit. The answer
        stays True after its leader has left until `take_released` is called."""
        return sequence.sequence_id in self._held

    def add(self, attempt_id: AttemptId, sequences: SequenceOf[Sequence]) -> None:
        """Adds all choices of an attempt. Only the first one begins before the prompt is computed."""
        if not sequences:
            return
        self._attempts[attempt_id] = list(sequences)
        if len(sequences) > 1:
            self._led[attempt_id] = list(sequences)
            self._held.update(one.sequence_id for one in sequences[1:])
        for sequence in sequences:
            self._sequences[sequence.sequence_id] = sequence
            if not sequence.has_media:
                self.priority_to_texts[sequence.priority] += 1

    def take_released(self) -> list[Sequence]:
        """Returns, each once, the siblings that lead now because the former leader has left: they have to claim what
        they need."""
        released, self._released = self._released, []
        live = [one for one in released if self._sequences.get(one.sequence_id) is one]
        self._held.difference_update(one.sequence_id for one in live)
        return live

    def prompt_computed(self, attempt_id: AttemptId) -> list[Sequence]:
        """Returns the siblings that may begin and that have to take over their leader's blocks; later calls return
        none."""
        siblings = self._led.pop(attempt_id, [])[1:]
        self._held.difference_update(one.sequence_id for one in siblings)
        return siblings

    def remove(self, sequence: Sequence) -> None:
        """Removes the sequence. If it led its siblings, the next one becomes the leader."""
        attempt_id = sequence.sequence_id.attempt_id
        del self._sequences[sequence.sequence_id]
        if not sequence.has_media:
            self.priority_to_texts[sequence.priority] -= 1
            if not self.priority_to_texts[sequence.priority]:
                del self.priority_to_texts[sequence.priority]
        self._held.discard(sequence.sequence_id)
        was_leading = attempt_id in self._led and self._led[attempt_id][0] is sequence
        for groups in (self._attempts, self._led):
            if attempt_id in groups:
                groups[attempt_id].remove(sequence)
                if not groups[attempt_id]:
                    del groups[attempt_id]
        if was_leading and attempt_id in self._led:
            self._released.append(self._led[attempt_id][0])


# ---------------------------------------------------------------- running sequences by rank

Item = TypeVar("Item", bound=Hashable)


class RankedList(Generic[Item]):
    """Holds items in the order of a rank that no two of them share and that never changes. It is meant for
    running items, which are few, because adding one moves the items after it in memory."""

    def __init__(self, rank: Callable[[Item], Any]) -> None:
        self._rank = rank
        self._items: list[Item] = []
        self._members: set[Item] = set()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: Item) -> bool:
        return item in self._members

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def add(self, item: Item) -> None:
        """Adds the item; nothing happens if it is here already."""
        if item not in self._members:
            self._members.add(item)
            self._items.insert(self._place(item), item)

    def discard(self, item: Item) -> None:
        """Removes the item if it is here."""
        if item in self._members:
            self._members.remove(item)
            del self._items[self._place(item)]

    def has_below(self, item: Item) -> bool:
        """Returns whether an item ranks behind `item`, which need not be here."""
        return bool(self._items) and self._rank(self._items[-1]) > self._rank(item)

    def below(self, item: Item) -> list[Item]:
        """Returns the items that rank behind `item`, which need not be here; the lowest-ranked one is last."""
        at = self._place(item)
        return self._items[at + (item in self._members) :]

    def _place(self, item: Item) -> int:
        return bisect_left(self._items, self._rank(item), key=self._rank)

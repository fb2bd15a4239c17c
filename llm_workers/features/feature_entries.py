"""Describes one unit (one separately encoded part of a media item) as the worker knows it: the state of its feature,
the facts that belong to each state, and the attempts that read it.

    GONE -> EXPECTED -> ANNOUNCED -> PULLING -> LANDED <-> READ        (`ALLOWED` lists every transition)
                                                 |  ^
                                                 v  |
                                                 KEPT

An attempt contains an EXPECTED unit, or the engine still reports a reader of it. An ANNOUNCED unit can be pulled from
an encoder. A LANDED feature lies in memory, and the engine holds no reference to it; to a READ feature it holds at
least one. A KEPT feature is a copy in host memory that no attempt uses. A unit that is GONE has no entry.

A `UnitEntry` holds all of this for one unit. Its `UnitReaders` sort the attempts by the turns in which they read the
unit: by the rank of the attempts, and by the place of each read in its attempt. The store has queues of units in the
same order, which decides what is pulled next and what is evicted first.

This module makes no decisions: `FeatureStore` moves the entries from state to state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from fabric.contracts import AttemptId, UnitKey, UnitReady
from fabric.ranked_heap import RankedHeap
from fabric.transport import LandedFeature
from llm_workers.scheduling import FeatureReference, NextRead

# ---------------------------------------------------------------- the states of a unit


class UnitState(Enum):
    """Names the states that the module describes."""

    GONE = "gone"
    EXPECTED = "expected"
    ANNOUNCED = "announced"
    PULLING = "pulling"
    LANDED = "landed"
    READ = "read"
    KEPT = "kept"


# These are tuples because the hash of an enum's member is computed in Python, and events compare states often.
WITHOUT_BYTES = (UnitState.GONE, UnitState.EXPECTED, UnitState.ANNOUNCED)
IN_MEMORY = (UnitState.LANDED, UnitState.READ)
HELD = (UnitState.PULLING, UnitState.LANDED, UnitState.READ)
"""Lists the states in which a unit takes memory for an attempt."""
ALLOWED: Mapping[UnitState, tuple[UnitState, ...]] = {
    UnitState.GONE: (UnitState.EXPECTED, UnitState.ANNOUNCED),
    UnitState.EXPECTED: (UnitState.ANNOUNCED, UnitState.GONE),
    UnitState.ANNOUNCED: (UnitState.PULLING, UnitState.EXPECTED, UnitState.GONE),
    UnitState.PULLING: (UnitState.LANDED, *WITHOUT_BYTES),
    UnitState.LANDED: (UnitState.READ, UnitState.KEPT, *WITHOUT_BYTES),
    UnitState.READ: (UnitState.LANDED,),
    UnitState.KEPT: (UnitState.LANDED, *WITHOUT_BYTES),
}


# ---------------------------------------------------------------- the order of reads

Rank = tuple[int, float, str]
"""Holds priority (the lowest number first), wall time of admission, and request id, so that requests have the same
order everywhere."""


class ReadTurn(NamedTuple):
    """A `ReadTurn` is the place of one attempt's read of a unit in the order of all reads."""

    is_silent: bool
    """Says that the attempt is admitted but the engine does not report it as a reader: the attempt requested the unit
    and has found its positions in the prefix cache since. No unit with a reported reader is evicted for such a read."""
    rank: Rank
    read: NextRead


class Backwards(NamedTuple):
    """Reverses the order of a turn: in a queue of `Backwards` entries, the last turn comes first."""

    turn: ReadTurn

    def __lt__(self, other: tuple[ReadTurn, ...]) -> bool:
        return other[0] < self.turn

    def __gt__(self, other: tuple[ReadTurn, ...]) -> bool:
        return other[0] > self.turn


# ---------------------------------------------------------------- attempts and units

Shape = tuple[int, int, int]
"""Is (num_levels, num_tokens, hidden) of a feature."""


@dataclass(slots=True)
class AttemptNeeds:
    """An `AttemptNeeds` is an open attempt with its units and what the worker knows of each."""

    rank: Rank
    order: Mapping[UnitKey, int]
    """Maps each unit of the request to its place in the prompt."""
    shapes: Mapping[UnitKey, Shape]
    """Maps each unit of the request to the shape that the request planned for its feature."""
    dispatched: frozenset[UnitKey]
    awaited: dict[UnitKey, float] = field(default_factory=dict)
    """Maps each unit whose announcement for this attempt is still expected to the time at which the waiting began."""
    failures: dict[UnitKey, str] = field(default_factory=dict)
    """Maps a unit to the reason why it did not land, if the worker learned it before the attempt was admitted."""
    missing: dict[UnitKey, str] = field(default_factory=dict)
    """Maps each unit that the attempt needs and that has not landed to the reason. It is meaningful once the attempt is
    admitted."""
    is_admitted: bool = False

    def reason(self, unit: UnitKey) -> str:
        """Returns the reason why a unit is missing at admission. A unit that was dispatched may have landed and been
        evicted before; the reason is then "preempted", so that the router does not expect it to arrive still."""
        return self.failures.get(unit, "preempted" if unit in self.dispatched else "not_covered")

    def wants(self, unit: UnitKey) -> bool:
        return unit in self.missing if self.is_admitted else unit in self.order


@dataclass(slots=True)
class UnitReaders:
    """Holds the attempts that contain one unit, in queues that sort them by turn."""

    attempts: dict[AttemptId, AttemptNeeds] = field(default_factory=dict)
    num_expecting: int = 0
    """Counts those of the attempts that the engine has not admitted yet."""
    named: dict[AttemptId, NextRead] = field(default_factory=dict)
    """Holds the latest report of the engine: the attempts that have to read the unit, and where each reads it next. It
    may contain attempts that have already ended here."""
    wanting: RankedHeap[AttemptId, ReadTurn] = field(default_factory=RankedHeap)
    """Holds the attempts that want the unit to be pulled."""
    reading: RankedHeap[AttemptId, ReadTurn] = field(default_factory=RankedHeap)
    """Holds the attempts that are in `named` or that are not admitted yet."""
    silent: RankedHeap[AttemptId, ReadTurn] = field(default_factory=RankedHeap)
    """Holds the admitted attempts that are not in `named`."""

    def place(self, attempt: AttemptId, unit: UnitKey) -> None:
        """Moves the attempt into the queues in which it belongs now."""
        needs, named = self.attempts[attempt], self.named.get(attempt)
        is_reading = named is not None or not needs.is_admitted
        read = named if named is not None and needs.is_admitted else NextRead(0, needs.order[unit])
        turn = ReadTurn(not is_reading, needs.rank, read)
        for queue, is_in in (
            (self.wanting, needs.wants(unit)),
            (self.reading, is_reading),
            (self.silent, not is_reading),
        ):
            if is_in:
                queue.put(attempt, turn)
            else:
                queue.discard(attempt)

    def remove(self, attempt: AttemptId) -> None:
        if self.attempts.pop(attempt, None) is not None:
            for queue in (self.wanting, self.reading, self.silent):
                queue.discard(attempt)

    def first_pull(self) -> ReadTurn | None:
        """Returns the earliest turn among the attempts that want the unit, or None if no attempt wants it."""
        first = self.wanting.peek()
        return first and first[0]

    def first_use(self) -> ReadTurn | None:
        """Returns the earliest turn among the attempts that still have to read the unit, or None if there is none. If
        the engine has not reported any reader of the unit, all attempts that contain it count as readers."""
        queues = (self.reading,) if self.named else (self.reading, self.silent)
        return min((first[0] for queue in queues if (first := queue.peek()) is not None), default=None)


@dataclass(slots=True, eq=False)
class Announced:
    """An `Announced` is an announcement with its attempt and the time of its arrival."""

    attempt: AttemptId
    ready: UnitReady
    at_s: float
    is_taken: bool = False


@dataclass(slots=True, eq=False)
class UnitEntry:
    """A `UnitEntry` holds everything that the worker knows of one unit."""

    unit: UnitKey
    state: UnitState = UnitState.GONE
    num_units: int = 0
    """Counts the units of the item; it is 0 until a request with the unit has arrived."""
    announced: dict[Announced, None] = field(default_factory=dict)
    """Holds the announcements that were neither pulled nor given back, in the order of their arrival."""
    readers: UnitReaders = field(default_factory=UnitReaders)
    feature: LandedFeature | None = None
    """Holds the feature while the unit is LANDED or READ."""
    references: set[FeatureReference] = field(default_factory=set)
    """Holds the references that the engine was handed and has not given back."""
    is_lent: bool = False
    """Says that the feature takes no room in the inbox, because the host cache has lent it."""
    is_evicting: bool = False
    """Says that the feature is freed as soon as every reference has come back, even if attempts need it."""
    is_distrusted: bool = False
    """Says that the bytes may be wrong, so that they are not kept."""

    @property
    def state_without_bytes(self) -> UnitState:
        """Returns the state of the unit if no pull is running and no feature is in memory or kept."""
        if self.announced:
            return UnitState.ANNOUNCED
        is_used = self.readers.attempts or self.readers.named
        return UnitState.EXPECTED if is_used else UnitState.GONE

    def check(self) -> None:
        """Asserts that the state agrees with the facts."""
        unit, state, readers = self.unit, self.state, self.readers
        assert state is not UnitState.GONE, f"{unit} is GONE but has an entry"
        assert (self.feature is not None) == (state in IN_MEMORY), f"{unit} is {state.name}, unlike its feature"
        assert bool(self.references) == (state is UnitState.READ), f"{unit} is {state.name}, unlike its references"
        assert all(one.unit == unit and one.feature is self.feature for one in self.references)
        expected = self.state_without_bytes
        assert state not in WITHOUT_BYTES or state is expected, f"{unit} is {state.name}, not {expected.name}"
        assert state in IN_MEMORY or not (self.is_lent or self.is_evicting or self.is_distrusted)
        assert self.is_evicting or not self.is_distrusted, f"{unit} is distrusted but is not evicted"
        assert readers.num_expecting == sum(not needs.is_admitted for needs in readers.attempts.values())
        for needs in readers.attempts.values():
            is_missed = needs.is_admitted and unit in needs.missing
            assert not is_missed or state not in IN_MEMORY or self.is_evicting, (
                f"{unit} is in memory, but an attempt misses it"
            )

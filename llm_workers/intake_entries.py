"""Defines the records of the intake: an attempt with the units that it wants, a unit with the attempts that contain it,
and the announcements that were neither pulled nor given back. A unit is one separately encoded part of a media item.

This module makes no decisions and knows nothing of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from fabric.ids import AttemptId, UnitKey
from fabric.messages import UnitReady
from llm_workers.scheduling.events import NextRead
from llm_workers.turns import Rank, ReadTurn, TurnQueue

LOST = "lost"
MEMORY = 4096
"""Limits how many ended attempts, and how many spent announcements, are remembered."""

Key = TypeVar("Key", bound=Hashable)


class MissingUnit(NamedTuple):
    """A `MissingUnit` is a unit that the worker must request from the router."""

    attempt: AttemptId
    unit: UnitKey
    reason: str


@dataclass(slots=True)
class WantingAttempt:
    """A `WantingAttempt` is an open attempt with its units and what the worker knows of each."""

    rank: Rank
    order: Mapping[UnitKey, int]
    """Maps each unit of the request to its place in the prompt."""
    dispatched: frozenset[UnitKey]
    awaited: dict[UnitKey, float]
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
class UnitUsers:
    """Holds the attempts that contain one unit. Its queues sort the attempts by turn, which is the place of a read in
    the order of all reads."""

    attempts: dict[AttemptId, WantingAttempt] = field(default_factory=dict)
    num_expecting: int = 0
    """Counts those of the attempts that the engine has not admitted yet."""
    named: dict[AttemptId, NextRead] = field(default_factory=dict)
    """Holds the latest report of the engine: the attempts that have to read the unit, and where each reads it next. It
    may contain attempts that have already ended here."""
    wanting: TurnQueue[AttemptId, ReadTurn] = field(default_factory=TurnQueue)
    """Holds the attempts that want the unit to be pulled."""
    reading: TurnQueue[AttemptId, ReadTurn] = field(default_factory=TurnQueue)
    """Holds the attempts that are in `named` or that are not admitted yet."""
    silent: TurnQueue[AttemptId, ReadTurn] = field(default_factory=TurnQueue)
    """Holds the admitted attempts that are not in `named`."""

    def place(self, attempt: AttemptId, unit: UnitKey) -> None:
        """Moves the attempt into the queues in which it belongs now."""
        known, named = self.attempts[attempt], self.named.get(attempt)
        is_reading = named is not None or not known.is_admitted
        read = named if named is not None and known.is_admitted else NextRead(0, known.order[unit])
        turn = ReadTurn(not is_reading, known.rank, read)
        for queue, is_in in (
            (self.wanting, known.wants(unit)),
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
        first = self.wanting.first()
        return first and first[0]

    def first_use(self) -> ReadTurn | None:
        """Returns the earliest turn among the attempts that still have to read the unit, or None if there is none. If
        the engine has not reported any reader of the unit, all attempts that contain it count as readers."""
        queues = (self.reading,) if self.named else (self.reading, self.silent)
        return min((first[0] for queue in queues if (first := queue.first()) is not None), default=None)


@dataclass(slots=True, eq=False)
class Announced:
    """An `Announced` is an announcement with its attempt and the time of its arrival."""

    attempt: AttemptId
    ready: UnitReady
    at_s: float
    is_taken: bool = False

    @property
    def unit(self) -> UnitKey:
        return self.ready.unit


class Announcements:
    """Holds announcements by unit and by attempt, each in the order of their arrival."""

    def __init__(self) -> None:
        self._by_unit: dict[UnitKey, dict[int, Announced]] = {}
        self._by_attempt: dict[AttemptId, dict[int, Announced]] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __contains__(self, unit: UnitKey) -> bool:
        return unit in self._by_unit

    def add(self, announced: Announced) -> None:
        self._by_unit.setdefault(announced.unit, {})[id(announced)] = announced
        self._by_attempt.setdefault(announced.attempt, {})[id(announced)] = announced
        self._num += 1

    def take(self, announced: Announced) -> None:
        """Removes the announcement, which must be present."""
        announced.is_taken = True
        _take(self._by_unit, announced.unit, announced)
        _take(self._by_attempt, announced.attempt, announced)
        self._num -= 1

    def newest(self, unit: UnitKey) -> Announced:
        """Returns the newest announcement of the unit; the unit must have one."""
        return next(reversed(self._by_unit[unit].values()))

    def of_unit(self, unit: UnitKey) -> list[Announced]:
        return list(self._by_unit.get(unit, {}).values())

    def of_attempt(self, attempt: AttemptId) -> list[Announced]:
        return list(self._by_attempt.get(attempt, {}).values())

    def of_source(self, source: str) -> list[Announced]:
        """Returns the announcements of one transfer agent. It examines all announcements."""
        return [one for units in self._by_unit.values() for one in units.values() if one.ready.ticket.source == source]


def _take(index: dict[Key, dict[int, Announced]], key: Key, announced: Announced) -> None:
    del index[key][id(announced)]
    if not index[key]:
        del index[key]


def remember(memory: OrderedDict[Key, None], key: Key) -> None:
    """Adds the key to the memory, which keeps only the last MEMORY keys."""
    memory[key] = None
    if len(memory) > MEMORY:
        memory.popitem(last=False)

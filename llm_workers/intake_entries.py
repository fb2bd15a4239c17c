"""What the intake remembers: an attempt and the units it wants, a unit and the attempts of which it is a part, the
announcements that were neither pulled nor given back.

Knows no decisions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from fabric.ids import AttemptId, UnitKey
from fabric.messages import UnitReady
from llm_workers.scheduling.events import NextRead
from llm_workers.turns import Rank, Turn, TurnQueue

LOST = "lost"
MEMORY = 4096
"""Ended attempts and spent announcements that are remembered."""

Key = TypeVar("Key", bound=Hashable)


class Need(NamedTuple):
    """A unit to ask the router for."""

    attempt: AttemptId
    unit: UnitKey
    reason: str


@dataclass(slots=True)
class WantingAttempt:
    rank: Rank
    order: Mapping[UnitKey, int]
    """All units of the request -> place in the prompt."""
    dispatched: frozenset[UnitKey]
    awaited: dict[UnitKey, float]
    """Units whose announcement for this attempt is still to come -> since when."""
    failures: dict[UnitKey, str] = field(default_factory=dict)
    """Why a unit did not land, when that was learned before the attempt was admitted."""
    missing: dict[UnitKey, str] = field(default_factory=dict)
    """Of its units, those that it needs and that have not landed -> why; meaningful once admitted."""
    is_admitted: bool = False

    def reason(self, unit: UnitKey) -> str:
        """Why it is missing at admission. What was dispatched may have been here and gone: the router must not take
        it for something that is still to come."""
        return self.failures.get(unit, "preempted" if unit in self.dispatched else "not_covered")

    def wants(self, unit: UnitKey) -> bool:
        return unit in self.missing if self.is_admitted else unit in self.order


@dataclass(slots=True)
class UnitUsers:
    """The attempts of which one unit is a part, by the turns of their reads."""

    attempts: dict[AttemptId, WantingAttempt] = field(default_factory=dict)
    num_expecting: int = 0
    """Of them, those that the engine has not admitted yet."""
    named: dict[AttemptId, NextRead] = field(default_factory=dict)
    """The engine's last word: who has to read the unit, and where next. May name attempts that have ended here."""
    wanting: TurnQueue[AttemptId, Turn] = field(default_factory=TurnQueue)
    """Attempts that want it pulled."""
    reading: TurnQueue[AttemptId, Turn] = field(default_factory=TurnQueue)
    """Attempts that are named, or not admitted yet."""
    silent: TurnQueue[AttemptId, Turn] = field(default_factory=TurnQueue)
    """Admitted attempts that are not named."""

    def place(self, attempt: AttemptId, unit: UnitKey) -> None:
        """Puts one of its attempts where it belongs now."""
        known, named = self.attempts[attempt], self.named.get(attempt)
        is_reading = named is not None or not known.is_admitted
        read = named if named is not None and known.is_admitted else NextRead(0, known.order[unit])
        turn = Turn(not is_reading, known.rank, read)
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

    def first_pull(self) -> Turn | None:
        """Turn of the first attempt that wants it."""
        first = self.wanting.first()
        return first and first[0]

    def first_use(self) -> Turn | None:
        """Turn of the first attempt that still has to read it. A unit that the engine has not spoken of is read by
        all attempts of which it is a part."""
        queues = (self.reading,) if self.named else (self.reading, self.silent)
        return min((first[0] for queue in queues if (first := queue.first()) is not None), default=None)


@dataclass(slots=True, eq=False)
class Announced:
    attempt: AttemptId
    ready: UnitReady
    at_s: float
    is_taken: bool = False

    @property
    def unit(self) -> UnitKey:
        return self.ready.unit


class Announcements:
    """By unit and by attempt, each in the order in which they came."""

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
        """It must be there."""
        announced.is_taken = True
        _take(self._by_unit, announced.unit, announced)
        _take(self._by_attempt, announced.attempt, announced)
        self._num -= 1

    def newest(self, unit: UnitKey) -> Announced:
        """There must be one."""
        return next(reversed(self._by_unit[unit].values()))

    def of_unit(self, unit: UnitKey) -> list[Announced]:
        return list(self._by_unit.get(unit, {}).values())

    def of_attempt(self, attempt: AttemptId) -> list[Announced]:
        return list(self._by_attempt.get(attempt, {}).values())

    def of_source(self, source: str) -> list[Announced]:
        """Looks at all of them."""
        return [one for units in self._by_unit.values() for one in units.values() if one.ready.ticket.source == source]


def _take(index: dict[Key, dict[int, Announced]], key: Key, announced: Announced) -> None:
    del index[key][id(announced)]
    if not index[key]:
        del index[key]


def remember(memory: OrderedDict[Key, None], key: Key) -> None:
    """Of the last MEMORY ones."""
    memory[key] = None
    if len(memory) > MEMORY:
        memory.popitem(last=False)

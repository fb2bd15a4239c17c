"""What the intake remembers: an attempt and the units it wants, an announcement, whose read comes first.

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

Age = tuple[float, str]
Turn = tuple[Age, NextRead]
"""Whose read comes first, over all attempts."""
UNREAD_CHOICE = 1 << 31
"""Behind every choice: stands for an admitted attempt that the engine does not name as a reader."""
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
    age: Age
    order: Mapping[UnitKey, int]
    """All units of the request -> place in the prompt."""
    dispatched: frozenset[UnitKey]
    awaited: dict[UnitKey, float]
    """Units whose announcement for this attempt is still to come -> since when."""
    failures: dict[UnitKey, str] = field(default_factory=dict)
    """Why a unit did not land, when that was learned before the attempt was admitted."""
    missing: dict[UnitKey, str] = field(default_factory=dict)
    """Units that it needs and that have not landed -> why; meaningful once admitted."""
    is_admitted: bool = False

    def reason(self, unit: UnitKey) -> str:
        """Why it is missing at admission. What was dispatched may have been here and gone: the router must not take
        it for something that is still to come."""
        return self.failures.get(unit, "preempted" if unit in self.dispatched else "not_covered")

    def wants(self, unit: UnitKey) -> bool:
        return unit in self.missing if self.is_admitted else unit in self.order


@dataclass(slots=True)
class Announced:
    attempt: AttemptId
    ready: UnitReady
    at_s: float


def remember(memory: OrderedDict[Key, None], key: Key) -> None:
    """Of the last MEMORY ones."""
    memory[key] = None
    if len(memory) > MEMORY:
        memory.popitem(last=False)

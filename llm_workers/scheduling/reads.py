"""Reports where units of features will be read next, as changes: for each unit, where an attempt still has to read it.

The cost depends on what changed, not on what waits: the code that moves a sequence notes the units whose next read
may have moved, and `drain` looks at those alone. This module knows nothing of how a next read is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from fabric.ids import AttemptId, SequenceId, UnitKey
from llm_workers.scheduling.events import NextRead

Reads = Mapping[UnitKey, Mapping[AttemptId, NextRead | None]]
"""Maps each unit to its attempts, and each attempt to the place where its first choice that needs the unit needs it
next. None means that the attempt does not need the unit any more."""


class ReadLog:
    """Collects what was noted since the last `drain`."""

    def __init__(self) -> None:
        self._noted: dict[tuple[UnitKey, AttemptId], None] = {}

    def note(self, sequence_id: SequenceId, units: Iterable[UnitKey]) -> None:
        """Notes that this sequence's next reads of these units may have changed."""
        for unit in units:
            self._noted[unit, sequence_id.attempt_id] = None

    def drain(self, next_read: Callable[[UnitKey, AttemptId], NextRead | None]) -> Reads:
        """Returns the reads that were noted, with the values that `next_read` gives now."""
        noted, self._noted = self._noted, {}
        reads: dict[UnitKey, dict[AttemptId, NextRead | None]] = {}
        for unit, attempt_id in noted:
            reads.setdefault(unit, {})[attempt_id] = next_read(unit, attempt_id)
        return reads

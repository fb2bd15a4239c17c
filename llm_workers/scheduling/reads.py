"""Where units will be read next, told as changes: what an attempt still has to read of a unit, and where.

Cost goes by what changed, not by what waits: whoever moves a sequence notes the units whose next read may have moved,
and `drain` looks at those alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from fabric.ids import AttemptId, SequenceId, UnitKey
from llm_workers.scheduling.events import NextRead

Reads = Mapping[UnitKey, Mapping[AttemptId, NextRead | None]]
"""Units -> for each attempt, where its first choice that needs the unit needs it next; None: it does not any more."""


class ReadLog:
    """What was noted since the last `drain`."""

    def __init__(self) -> None:
        self._noted: dict[tuple[UnitKey, AttemptId], None] = {}

    def note(self, sequence_id: SequenceId, units: Iterable[UnitKey]) -> None:
        """The next reads of these units by this sequence may not be as they were."""
        for unit in units:
            self._noted[unit, sequence_id.attempt_id] = None

    def drain(self, next_read: Callable[[UnitKey, AttemptId], NextRead | None]) -> Reads:
        """The reads that were noted, as `next_read` says they are now."""
        noted, self._noted = self._noted, {}
        reads: dict[UnitKey, dict[AttemptId, NextRead | None]] = {}
        for unit, attempt_id in noted:
            reads.setdefault(unit, {})[attempt_id] = next_read(unit, attempt_id)
        return reads

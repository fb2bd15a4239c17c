"""Defines what one turn of the engine reports to the owner of its updates. This module contains values only and knows
nothing of their use; the engine does not change them after it has handed them over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fabric.contracts import AttemptId, BlocksStored, KvEvent, SequenceId, UnitKey, WeftError
from llm_workers.scheduling import (
    AdmittedSequences,
    NeededUnit,
    Reads,
    ReleasedFeature,
    SchedulerStats,
    SequenceTimes,
    StepEvents,
    StepWork,
)


class Admitted(NamedTuple):
    attempt: AttemptId
    admission: AdmittedSequences


class FailedAttempt(NamedTuple):
    attempt: AttemptId
    error: WeftError


class AbortedSequence(NamedTuple):
    sequence_id: SequenceId
    times: SequenceTimes


class BlockSnapshot(NamedTuple):
    address: str
    last_seq: int
    chains: Sequence[BlocksStored]


@dataclass(slots=True)
class Update:
    """Holds what one turn of the engine did. The service applies `distrusted` first and the other lists in the order in
    which they stand here. The engine does not change an update after it has handed it over."""

    released: list[ReleasedFeature] = field(default_factory=list)
    """Holds the features whose references the engine gives back."""
    reads: Reads = field(default_factory=dict)
    """Holds the changes in which attempt still has to read which unit, and where the next read is."""
    admitted: list[Admitted] = field(default_factory=list)
    needed: list[NeededUnit] = field(default_factory=list)
    step_work: StepWork | None = None
    """Holds the work of the step that was committed."""
    step_s: float = 0.0
    """Measures the seconds from the planning of the step to its commit."""
    events: StepEvents | None = None
    aborted: list[AbortedSequence] = field(default_factory=list)
    failed: list[FailedAttempt] = field(default_factory=list)
    distrusted: list[UnitKey] = field(default_factory=list)
    """Holds the units that a failed sequence has read and that may be the cause of the failure. The engine releases
    them, and no sequence may use them again."""
    kv_first_seq: int = 0
    kv_events: list[KvEvent] = field(default_factory=list)
    snapshots: list[BlockSnapshot] = field(default_factory=list)
    stats: SchedulerStats | None = None
    at_s: float = 0.0
    death: WeftError | None = None

    @property
    def is_empty(self) -> bool:
        happened = (self.released, self.reads, self.admitted, self.needed, self.aborted, self.failed)
        return self.events is None and not any((*happened, self.kv_events, self.snapshots))

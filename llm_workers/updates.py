"""What one turn of the engine tells the owner of its updates. Values only; not touched once handed over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fabric.errors import WeftError
from fabric.ids import AttemptId, SequenceId, UnitKey
from fabric.messages import BlocksStored, KvEvent
from llm_workers.scheduling.events import Admission, NeededUnit, SchedulerStats, SequenceTimes, StepEvents
from llm_workers.scheduling.reads import Reads
from llm_workers.step_costs import StepWork


class Admitted(NamedTuple):
    attempt: AttemptId
    admission: Admission


class Failed(NamedTuple):
    attempt: AttemptId
    error: WeftError


class AbortedSequence(NamedTuple):
    sequence_id: SequenceId
    times: SequenceTimes


class LetGo(NamedTuple):
    """The engine does not read this unit any more; it answers `num_told` calls of `unit_landed`. `missed_by`:
    attempts that need it again (it was evicted)."""

    unit: UnitKey
    num_told: int
    missed_by: tuple[AttemptId, ...] = ()


class Snapshot(NamedTuple):
    address: str
    last_seq: int
    chains: Sequence[BlocksStored]


@dataclass(slots=True)
class Update:
    """What one turn of the engine did, in the order in which it is to be read. Not touched once handed over."""

    let_go: list[LetGo] = field(default_factory=list)
    reads: Reads = field(default_factory=dict)
    """What changed in who still has to read which unit, and where next."""
    admitted: list[Admitted] = field(default_factory=list)
    needed: list[NeededUnit] = field(default_factory=list)
    step_work: StepWork | None = None
    """Of the step that was committed."""
    step_s: float = 0.0
    """From its planning to its commit."""
    events: StepEvents | None = None
    aborted: list[AbortedSequence] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    distrusted: list[UnitKey] = field(default_factory=list)
    """Units that a failed sequence read and that may be why: they are let go of, and must not be used again."""
    kv_first_seq: int = 0
    kv_events: list[KvEvent] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    stats: SchedulerStats | None = None
    at_s: float = 0.0
    death: WeftError | None = None

    @property
    def is_empty(self) -> bool:
        happened = (self.let_go, self.reads, self.admitted, self.needed, self.aborted, self.failed)
        return self.events is None and not any((*happened, self.kv_events, self.snapshots))

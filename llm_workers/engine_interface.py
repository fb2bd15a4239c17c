"""Defines what the worker's service knows of an engine: the calls that the service makes (`WorkerEngine`) and what one
turn of the engine reports (`Update`).

Weft's own engine (`llm_workers.own_engine`) is one implementation. Another engine can take its place, because the
service, the open calls and the reports depend on this module and on no engine. This module contains a Protocol and
values only; it knows nothing of how an engine computes, or of what the updates are used for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fabric.contracts import (
    AttemptId,
    BlocksStored,
    EngineStats,
    GenerateRequest,
    KvEvent,
    SequenceId,
    UnitKey,
    WeftError,
)
from llm_workers.features import FeatureEngine
from llm_workers.scheduling import (
    AdmittedSequences,
    Guide,
    NeededUnit,
    Reads,
    ReleasedFeature,
    SequenceTimes,
    StepCosts,
    StepEvents,
    StepWork,
)
from modalities.family import Positions


class WorkerEngine(FeatureEngine, Protocol):
    """A `WorkerEngine` computes the requests of one worker and reports each turn in an `Update`.

    The service calls `prepare` once, then `start` once, then the other methods, and `stop` at the end. Except for
    `prepare` and `stop`, the methods never block and are thread-safe. The engine calls the receiver of its updates in a
    thread of its own, and never before `start`.
    """

    async def prepare(self, costs: StepCosts) -> None:
        """Makes the engine ready for its first step and fits `costs` to the time that steps take on this machine.
        Raises ConfigError if the engine can't compute with this model and config on this machine."""
        ...

    def start(self) -> None:
        """Begins to compute. Requests that were added before are computed now."""
        ...

    def stop(self) -> None:
        """Ends the engine after its current step, and blocks until then. No update follows. The call is idempotent."""
        ...

    def check_health(self) -> None:
        """Raises WorkerLost if the engine has died, and EngineFailed if it was stopped."""
        ...

    def add(self, request: GenerateRequest, positions: Positions, guide: Guide | None = None) -> None:
        """Adds a request. `guide` stands at the beginning of the request's grammar, if it has one, and belongs to the
        engine from this call on. An update answers: with an `Admitted`, or with a `FailedAttempt` if the request can't
        be computed. If this call itself raises, no update answers. What the request wants of its prompt
        (`PromptOutputs`) comes once, with the events of a step (`StepEvents.prompt_outputs`), and not after the end of
        its last choice."""
        ...

    def abort(self, attempt: AttemptId, choices: Sequence[int] = ()) -> None:
        """Ends the named choices of an attempt, or all of them if none is named. An update answers with the sequences
        that ended. An attempt that the engine does not know is ignored."""
        ...

    def request_snapshot(self, address: str) -> None:
        """Asks for the blocks in the prefix cache, on behalf of the router at `address`. Updates answer with the pages
        of a snapshot, in order (`BlockSnapshot`); the first one delivers all earlier events of the cache. A second
        request of the same router replaces one whose pages have not all been delivered."""
        ...

    def stats(self) -> EngineStats:
        """Returns the engine's numbers before its first turn; call it before `start` only. Later numbers come with the
        updates."""
        ...

    def seconds_by_part(self) -> Mapping[str, float]:
        """Returns how many seconds since the start the engine has spent in each part of its steps, for benchmarks. The
        names of the parts are the engine's own."""
        ...


EngineFactory = Callable[[Callable[["Update"], None]], WorkerEngine]
"""Builds an engine that hands every update to the given function. The engine calls this function in a thread of its
own."""


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
    """A `BlockSnapshot` is a page of the snapshot that the router at `address` has asked for (`KvSnapshot`)."""

    address: str
    last_seq: int
    chains: Sequence[BlocksStored]
    page: int = 0
    is_last: bool = True


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
    begun_work: StepWork | None = None
    """Holds the work of a step that computes prompt tokens and has just begun. Its own update comes at its end, and
    routers would not know of it meanwhile."""
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
    stats: EngineStats | None = None
    at_s: float = 0.0
    death: WeftError | None = None

    @property
    def is_empty(self) -> bool:
        if self.begun_work is not None:
            return False
        happened = (self.released, self.reads, self.admitted, self.needed, self.aborted, self.failed)
        return self.events is None and not any((*happened, self.kv_events, self.snapshots))

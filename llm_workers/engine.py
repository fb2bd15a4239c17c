"""Runs the engine thread. Each turn takes the queued commands, runs `plan_step -> execute -> commit`, and hands over
one update; before it executes a step that computes prompt tokens, it hands over one more, which says so.

Only the engine touches the scheduler and the runner. A step that fails is tried again one sequence at a time, so that
only the request that causes the failure ends. Two causes have to be told apart: a failed device, after which every step
fails, and a single request, which fails alone. `is_device_error` and the step of `probe_plan`, which no request can
spoil, decide this. If the device is the cause, the engine ends with WorkerLost, and its requests move to other workers.

This module knows nothing of planes, futures or routers; the owner of the updates handles them. It identifies the
classes of device errors by name, so that it imports no device library.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from fabric.contracts import (
    AttemptId,
    Clock,
    EngineFailed,
    EngineStats,
    ErrorInfo,
    GenerateRequest,
    InvalidRequest,
    ModelNotFound,
    ProtocolError,
    RequestId,
    SamplingParams,
    SequenceId,
    UnitKey,
    WeftError,
    WorkerLost,
)
from llm_workers.engine_interface import AbortedSequence, Admitted, FailedAttempt, Update
from llm_workers.engine_thread import EngineThread, OpenSnapshots
from llm_workers.scheduling import (
    BROKEN_GRAMMAR_TOKEN,
    NO_BLOCK,
    NOT_FINITE_TOKEN,
    Arrival,
    Chunk,
    FeatureReference,
    Guide,
    Scheduler,
    StepEvents,
    StepPlan,
    StepResult,
)
from modalities.family import Positions

_LOG = logging.getLogger(__name__)
MAX_FAILED_STEPS = 8
"""Limits the consecutive steps in which every request fails although the probes succeed. After this many steps the
worker is no longer trusted."""
TOKEN_TO_FAILURE: dict[int, WeftError] = {
    NOT_FINITE_TOKEN: EngineFailed("the model's output is not finite"),
    BROKEN_GRAMMAR_TOKEN: InvalidRequest("the grammar of the structured output became too complex to be followed"),
}


class Engine:
    """An `Engine` owns the engine thread. The methods for other threads are thread-safe and never block. The engine
    calls `on_update` in its own thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        on_update: Callable[[Update], None],
        outlet: StageOutlet | None = None,
    ) -> None:
        """Creates an engine that is not started. `outlet` takes what the engine makes for requests with a next stage;
        without it, such a request is refused."""
        self._scheduler, self._executor, self._clock, self._on_update = scheduler, executor, clock, on_update
        self._outlet = outlet
        self._snapshots = OpenSnapshots()
        self._is_idle = True
        self._num_failed_steps = 0
        self._thread = EngineThread(self._run)
        self.times = StepTimes()

    # ------------------------------------------------------------ any thread

    def start(self) -> None:
        self._thread.start()

    def stats(self) -> EngineStats:
        """Returns the scheduler's numbers. Call it before `start` only; afterwards the scheduler belongs to the engine
        thread, and the updates deliver the numbers."""
        return self._scheduler.stats()

    def stop(self) -> None:
        """Ends the engine after the current step and joins the thread. The call is idempotent."""
        self._thread.stop()

    def check_health(self) -> None:
        """Raises WorkerLost if the engine has died, and EngineFailed if it was stopped."""
        self._thread.check_health()

    def add(self, request: GenerateRequest, positions: Positions, guide: Guide | None = None) -> None:
        """Adds a request. `guide` stands at the beginning of the request's grammar, if it has one, and belongs to the
        engine from this call on. The waiting time of the request starts with this call, even while a step is running.
        Work that takes time in proportion to the prompt is done here, in the caller's thread. An update answers a
        request that the scheduler refuses; an error that is no WeftError reaches the caller."""
        try:
            if request.adapter:
                raise ModelNotFound(f"workers.engine is weft, which has no adapter `{request.adapter}`", param="model")
            arrival = self._scheduler.prepare(request, positions, guide)
        except WeftError as error:
            failed = FailedAttempt(AttemptId(request.request_id, request.attempt), error)
            self._thread.command(lambda update: update.failed.append(failed))
        else:
            spoken = request if request.next_stage is not None else None  # Others are not kept for the command.
            self._thread.command(lambda update: self._add(arrival, update, spoken))

    def abort(self, attempt: AttemptId, choices: Sequence[int] = ()) -> None:
        self._thread.command(lambda update: self._abort(attempt, choices, update))

    def hold_feature(self, reference: FeatureReference) -> None:
        """Hands the engine a reference, through which the runner can read the feature. The feature must stay readable
        until a `ReleasedFeature` gives this reference back, which happens once."""
        self._thread.command(lambda update: self._scheduler.hold_feature(reference))

    def evict_feature(self, unit: UnitKey) -> None:
        """Asks the engine to give up the unit (one separately encoded part of a media item). A `ReleasedFeature`
        answers, unless the engine has already given back every reference to the unit."""
        self._thread.command(lambda update: self._evict(unit, update))

    def request_snapshot(self, address: str) -> None:
        self._thread.command(lambda update: self._snapshot(address, update))

    # ------------------------------------------------------------ engine thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:
            # This is the loop of the engine's thread; the owner of the updates ends every request.
            _LOG.exception("the engine has died")
            died = WorkerLost(f"the engine has died: {type(error).__name__}")
            self._on_update(self._thread.died(error if isinstance(error, WorkerLost) else died))

    def _turn(self) -> bool:
        """Runs the queued commands and one step, and hands over one update. Returns False after a call of `stop`."""
        update = Update()
        if not self._thread.run_commands(update, is_idle=self._is_idle):
            return False
        update.released += self._scheduler.release_unneeded()
        started_s = self._clock.now()
        plan = self._scheduler.plan_step()
        self.times.schedule_s += self._clock.now() - started_s
        if plan.num_sequences:
            work = self._scheduler.work(plan)
            if work.weighted_tokens:
                update.begun_work = work
                update.needed.extend(self._scheduler.drain_needed())
                self._publish(update)
                update = Update()
            self._step(plan, started_s, update)
            update.released += self._scheduler.release_unneeded()
        update.needed.extend(self._scheduler.drain_needed())
        self._add_page(update)
        self._rest(not plan.num_sequences and not update.needed and not self._snapshots)
        self._publish(update)
        return True

    def _rest(self, is_idle: bool) -> None:
        """Checks a part of the scheduler's bookkeeping when the last sequence has ended, so that a fault is found near
        its cause."""
        if is_idle and not self._is_idle and not self._scheduler.num_sequences:
            self._scheduler.check_at_rest()
        self._is_idle = is_idle

    def _publish(self, update: Update) -> None:
        self._drain_kv_events(update)
        update.reads = self._scheduler.drain_reads()
        if not update.is_empty:
            update.stats = self._scheduler.stats()
            update.at_s = self._clock.now()
            self._on_update(update)

    def _drain_kv_events(self, update: Update) -> None:
        first_seq, events = self._scheduler.drain_kv_events()
        if events and not update.kv_events:
            update.kv_first_seq = first_seq
        update.kv_events.extend(events)

    # ------------------------------------------------------------ commands

    def _add(self, arrival: Arrival, update: Update, spoken: GenerateRequest | None) -> None:
        attempt = arrival.attempt_id
        try:
            if spoken is not None and self._outlet is None:
                raise ProtocolError("this worker has no next stage to which it could send what it generates")
            admission = self._scheduler.add(arrival)
            if spoken is not None and self._outlet is not None:
                self._outlet.begin(spoken, is_finished=bool(admission.finished))
            update.admitted.append(Admitted(attempt, admission))
        except WeftError as error:  # Nothing has changed in the scheduler.
            update.failed.append(FailedAttempt(attempt, error))
        except Exception as error:
            # This is one command of the thread's loop: wrong numbers in one request must not end the other requests.
            name = attempt.request_id
            _LOG.exception("request %s could not be admitted", name, extra={"request_id": name})
            self._scheduler.abort(attempt)
            reason = f"the request could not be admitted: {type(error).__name__}"
            update.failed.append(FailedAttempt(attempt, EngineFailed(reason)))

    def _abort(self, attempt: AttemptId, choices: Sequence[int], update: Update) -> None:
        times = self._scheduler.times_of(attempt)
        for sequence_id in self._scheduler.abort(attempt, choices):
            update.aborted.append(AbortedSequence(sequence_id, times[sequence_id]))
        if self._outlet is not None:
            self._outlet.abort(attempt)

    def _evict(self, unit: UnitKey, update: Update) -> None:
        released = self._scheduler.evict_feature(unit)
        if released is not None:
            update.released.append(released)

    def _snapshot(self, address: str, update: Update) -> None:
        """Begins a snapshot of the prefix cache. The update of its first page delivers all earlier events before that
        page."""
        self._snapshots.begin(address, self._scheduler.kv_snapshot)

    def _add_page(self, update: Update) -> None:
        """Adds the next page of a snapshot to the update, behind all events that are older."""
        if self._snapshots:
            self._drain_kv_events(update)
            update.snapshots.append(self._snapshots.next_page())

    # ------------------------------------------------------------ a step

    def _step(self, plan: StepPlan, planned_at_s: float, update: Update) -> None:
        """Executes and commits the plan. If sequences break, ends their attempts and restores the other sequences to
        their state before the step."""
        result, failed = self._execute(plan)
        executed_s = self._clock.now()
        if failed:
            self._scheduler.rollback(plan)
            for attempt, error in failed.items():
                self._scheduler.abort(attempt)
                update.failed.append(FailedAttempt(attempt, error))
                if self._outlet is not None:
                    self._outlet.abort(attempt, error)
            self._distrust(plan, result, update)
        else:
            update.events = self._scheduler.commit(plan, result)
            if self._outlet is not None:
                self._outlet.committed(plan, update.events)
            update.step_work, update.step_s = self._scheduler.work(plan), self._clock.now() - planned_at_s
            self.times.num_steps += 1
            self.times.num_tokens += plan.num_tokens
        self.times.commit_s += self._clock.now() - executed_s

    def _distrust(self, plan: StepPlan, result: StepResult, update: Update) -> None:
        """Marks as distrusted, and evicts, the units whose features were read by a chunk with results that are not
        finite, because these features may be the cause. No other sequence may read them; a sequence that needs such a
        unit asks for it again."""
        chunks = [chunk for chunk in plan.others if chunk.sequence_id in result.not_finite]
        for unit in dict.fromkeys(splice.unit for chunk in chunks for splice in chunk.splices):
            update.distrusted.append(unit)
            self._evict(unit, update)

    def _execute(self, plan: StepPlan) -> tuple[StepResult, dict[AttemptId, WeftError]]:
        """Returns the result, and the error of each attempt that failed. Raises WorkerLost if the device fails."""
        failed: dict[AttemptId, WeftError] = {}
        result = self._try(plan)
        if isinstance(result, Exception):
            # Running each sequence alone shows which sequence caused the failure.
            result = StepResult({})
            for chunk in plan.chunks:
                alone = self._execute_alone(plan, chunk, failed)
                result.token_ids.update(alone.token_ids)
                result.logprobs.update(alone.logprobs)
                result.not_finite.update(alone.not_finite)
                result.readings.update(alone.readings)
        is_broken = bool(failed)
        for sequence_id, tokens in result.token_ids.items():
            if tokens[-1] < 0:
                failed[sequence_id.attempt_id] = TOKEN_TO_FAILURE[tokens[-1]]
        for sequence_id in result.not_finite:
            failed[sequence_id.attempt_id] = TOKEN_TO_FAILURE[NOT_FINITE_TOKEN]
        self._count_failures(plan, failed, is_probed=is_broken)
        return result, failed

    def _execute_alone(self, plan: StepPlan, chunk: Chunk, failed: dict[AttemptId, WeftError]) -> StepResult:
        """Executes one chunk alone, as a second attempt. If it fails again, either its request spoils the step, or the
        device fails. Raises WorkerLost if the device causes the failure."""
        result = self._try(StepPlan(plan.step, (chunk,)))
        if not isinstance(result, Exception):
            return result
        reason = ErrorInfo.of(result).message
        if is_device_error(result):
            raise WorkerLost(f"the device fails: {reason}") from result
        self._probe(plan, chunk)
        failed[chunk.sequence_id.attempt_id] = EngineFailed(f"the step of this request failed: {reason}")
        return StepResult({})

    def _probe(self, plan: StepPlan, chunk: Chunk) -> None:
        """Raises WorkerLost if the device can't compute even one harmless token, which runs in place of `chunk`.
        Without a free block there is no probe and the request is blamed; its end frees blocks."""
        block = self._scheduler.empty_block()
        if block is None:
            return
        result = self._try(probe_plan(plan, chunk, block))
        if isinstance(result, Exception):
            # The probe contains nothing of a request, so the device is the cause.
            raise WorkerLost(f"the device fails every step: {ErrorInfo.of(result).message}") from result
        if result.not_finite or any(tokens[-1] == NOT_FINITE_TOKEN for tokens in result.token_ids.values()):
            raise WorkerLost("the device gives numbers that are not finite even for one harmless token")

    def _try(self, plan: StepPlan) -> StepResult | Exception:
        """Executes a plan once, and returns its result or the error with which it failed. Raises WorkerLost if the
        executor does."""
        try:
            return self._executor.execute(plan)
        except WorkerLost:
            raise
        except Exception as error:
            # This is one step of the thread's loop: the callers find the request that caused the failure, and end it.
            names = list(dict.fromkeys(chunk.sequence_id.request_id for chunk in plan.chunks))
            alone = {"request_id": names[0]} if len(names) == 1 else {}
            _LOG.exception("step %d failed (requests: %s)", plan.step, ", ".join(names), extra=alone)
            return error

    def _count_failures(self, plan: StepPlan, failed: dict[AttemptId, WeftError], is_probed: bool) -> None:
        """Raises WorkerLost if no request of a step could be computed and the device is the cause, or if this happened
        in too many consecutive steps. A broken grammar does not count: the client caused it, and its step was
        computed."""
        uncomputed = {attempt for attempt, error in failed.items() if not isinstance(error, InvalidRequest)}
        is_all_failed = bool(uncomputed) and {chunk.sequence_id.attempt_id for chunk in plan.chunks} <= uncomputed
        if is_all_failed and not is_probed:
            self._probe(plan, plan.chunks[0])
        self._num_failed_steps = self._num_failed_steps + 1 if is_all_failed else 0
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise WorkerLost(f"{MAX_FAILED_STEPS} consecutive steps failed")


class StageOutlet(Protocol):
    """A `StageOutlet` hands what the engine makes to the next stage (`llm_workers.stages.ThinkerOutlet`). The engine's
    thread makes every call, and no call blocks."""

    def begin(self, request: GenerateRequest, is_finished: bool = False) -> None:
        """Takes an admitted request that has a next stage; with `is_finished`, it has ended already."""
        ...

    def committed(self, plan: StepPlan, events: StepEvents) -> None: ...

    def abort(self, attempt: AttemptId, error: WeftError | None = None) -> None:
        """Ends an attempt early; one that is not open is ignored."""
        ...


class Executor(Protocol):
    """An `Executor` is the part of the runner that the engine uses."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Executes the plan. The engine may call it again for a part of the same plan. A sequence is broken if its last
        token is negative or if it is in `not_finite`. Raises WorkerLost if no later step can work and no request is the
        cause."""
        ...


@dataclass(slots=True)
class StepTimes:
    """Holds running sums since the start, for benchmarks."""

    num_steps: int = 0
    num_tokens: int = 0
    schedule_s: float = 0.0
    commit_s: float = 0.0


# ---------------------------------------------------------------- the causes of a failed step

DEVICE_ERROR_NAMES = frozenset({"AcceleratorError", "OutOfMemoryError", "MemoryError"})
"""Lists classes of torch and of Python by name. Among them are `torch.AcceleratorError` (an error of the CUDA runtime)
and `torch.OutOfMemoryError`."""
DEVICE_ERROR_MARKS = (
    "CUDA error",
    "HIP error",
    "CUBLAS_STATUS",
    "CUDNN_STATUS",
    "NCCL error",
    "can't allocate memory",
)
"""Lists texts that mark a plain RuntimeError as a device error: libraries below torch report their errors in this way,
and so does torch's CPU allocator."""
PROBE_ID = SequenceId(RequestId("probe"), 0, 0)


def is_device_error(error: BaseException) -> bool:
    """Returns whether an error concerns the device or its memory. If a sequence that runs alone meets such an error
    again, the sequence is not the cause, because its step is no larger than the steps that were tried at boot."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & DEVICE_ERROR_NAMES) or any(mark in str(error) for mark in DEVICE_ERROR_MARKS)


def probe_plan(plan: StepPlan, chunk: Chunk, block: int) -> StepPlan:
    """Returns a step that no property of a request can spoil: one token of id 0 at position 0, without features,
    penalties or grammar. The step writes to `block`, which no sequence may read. A block of `chunk` itself is not safe,
    because other sequences may share it if the whole prompt was found in the prefix cache."""
    probe = replace(
        chunk,
        sequence_id=PROBE_ID,
        start=0,
        num_tokens=1,
        token_ids=np.zeros(1, dtype=np.int64),
        positions=np.zeros_like(chunk.positions[:, :1]),
        block_ids=np.array([block], dtype=chunk.block_ids.dtype),
        splices=(),
        sampling=SamplingParams(temperature=0.0),
        draw_index=0,
        counts=None,
        barred=(),
        num_barred=0,
        guide=None,
        side_names=frozenset(),
        num_drafts=0,
        copied_from=NO_BLOCK,
        reading=None,
    )
    return StepPlan(plan.step, (probe,))

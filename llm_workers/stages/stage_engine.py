"""Runs the thread of a stage: each turn takes the queued commands and the chunks that are here, schedules and executes
one step, and hands over one update.

The outputs of a step go to the transfer adapter, which sends them to the next stage, or into the update at the last
stage. A request of an earlier stage stays open until its last chunk has reached the next stage. With nothing to
compute, the thread sleeps until a command, a chunk or a save wakes it, or until the scheduler's next step is due.

A step that fails is tried again one request at a time, so that only the request that causes the failure ends; its
error travels to the next stage as a chunk. A failed device ends the engine with WorkerLost. This module knows nothing
of futures, planes or routers; the owner of the updates handles them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from fabric.contracts import (
    Aborted,
    Clock,
    EngineFailed,
    ErrorInfo,
    ProtocolError,
    RequestRefused,
    StageKey,
    StageRequest,
    WeftError,
    WorkerLost,
)
from llm_workers.engine import MAX_FAILED_STEPS, is_device_error
from llm_workers.stages.chunk_adapter import ChunkTransferAdapter
from llm_workers.stages.stage_model import StageModel, StageOutput, StageSpan
from llm_workers.stages.stage_scheduler import ChunkSource, RestoredRequest, StageScheduler, StageStatus

_LOG = logging.getLogger(__name__)
MAX_TRACE_EVENTS = 256
"""Limits the events in the trace of one request."""
_NOTHING = StageOutput({}, is_finished=False)
_NEW_SHARE = 0.1
"""Is the weight of the latest step in the moving average of the time of steps."""

MakeAdapter = Callable[[Callable[[], None], Callable[[StageKey, WeftError | None], None]], ChunkTransferAdapter]
"""Makes the adapter of an engine from the callbacks `on_loaded` and `on_saved`."""
MakeScheduler = Callable[[ChunkSource, Callable[[StageKey], int]], StageScheduler]
"""Makes the scheduler of an engine from the adapter and `StageModel.num_units_ready`."""


class TallyEvent(NamedTuple):
    """A `TallyEvent` becomes a `TraceEvent` of the request."""

    at_s: float
    name: str
    detail: dict[str, Any]


@dataclass(slots=True, eq=False)
class StageTally:
    """Counts what a stage has done for one request."""

    request: StageRequest
    received_s: float
    num_chunks_in: int = 0
    num_chunks_out: int = 0
    num_outputs: int = 0
    first_chunk_at_s: float | None = None
    first_output_at_s: float | None = None
    waiting_since_s: float | None = None
    waited_s: float = 0.0
    computed_s: float = 0.0
    is_draining: bool = False
    """Says whether everything is computed, and the request stays open for its last chunks only."""
    events: list[TallyEvent] = field(default_factory=list)

    def note(self, at_s: float, name: str, **detail: object) -> None:
        if len(self.events) < MAX_TRACE_EVENTS:
            self.events.append(TallyEvent(at_s, name, detail))


class EndedStage(NamedTuple):
    """An `EndedStage` is a request that has ended at this stage, well or with an error."""

    tally: StageTally
    error: WeftError | None


class EngineOutput(NamedTuple):
    """An `EngineOutput` is what a step of the last stage has made for one request."""

    request: StageRequest
    output: StageOutput


class StageNumbers(NamedTuple):
    """Holds the numbers of a stage after a turn."""

    num_waiting: int = 0
    num_running: int = 0
    num_waiting_for_chunk: int = 0
    step_s: float = 0.0
    num_steps: int = 0
    num_chunks_in: int = 0
    num_chunks_out: int = 0
    num_outputs: int = 0
    num_stalls: int = 0
    pool_used: int = 0
    pool_size: int = 0


@dataclass(slots=True)
class StageUpdate:
    """A `StageUpdate` is what one turn of the engine has brought."""

    outputs: list[EngineOutput] = field(default_factory=list)
    ended: list[EndedStage] = field(default_factory=list)
    numbers: StageNumbers = field(default_factory=StageNumbers)
    death: WeftError | None = None
    """Is the error with which the engine has ended, if it has."""


class StageEngine:
    """A `StageEngine` owns the thread of a stage. The methods for other threads are thread-safe and never block. The
    engine calls `on_update` in its own thread."""

    def __init__(
        self,
        model: StageModel,
        make_scheduler: MakeScheduler,
        make_adapter: MakeAdapter,
        clock: Clock,
        on_update: Callable[[StageUpdate], None],
        warm_up: Callable[[], None] | None = None,
    ) -> None:
        """`warm_up` runs placeholder steps of the model before the first request, in the engine's thread."""
        self._model, self._clock, self._on_update, self._warm_up = model, clock, on_update, warm_up
        self.adapter = make_adapter(self._wake, self._note_saved)
        self._scheduler = make_scheduler(self.adapter, model.num_units_ready)
        self._tallies: dict[StageKey, StageTally] = {}
        self._commands: deque[Callable[[StageUpdate], None]] = deque()
        self._changed = threading.Condition()
        self._is_woken = self._is_stopping = False
        self._ready: Future[None] = Future()
        self._num_failed_steps = 0
        self._totals = StageNumbers(pool_size=self._scheduler.pool_size)
        self._death: WeftError | None = None
        self._thread = threading.Thread(target=self._run, name="weft-stage-engine", daemon=True)

    # ------------------------------------------------------------ any thread

    def start(self) -> Future[None]:
        """Starts the threads. The future ends when the engine takes requests, or with the error of the warm-up."""
        self.adapter.start()
        self._thread.start()
        return self._ready

    def stop(self) -> None:
        """Ends the engine after its current step, and its adapter. The call is idempotent."""
        self._is_stopping = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join()
        self.adapter.stop()

    def check_health(self) -> None:
        """Raises WorkerLost if the engine or its adapter has died, and EngineFailed if it was stopped."""
        if self._death is not None:
            raise self._death
        if self._thread.ident is None:
            return
        if not self._thread.is_alive():
            raise EngineFailed("the engine of the stage has stopped")
        if not self.adapter.is_alive:
            raise WorkerLost("the transfer adapter of the stage has died")

    def open(self, request: StageRequest) -> None:
        """Adds a request. An update says how it ends, also if it is refused."""
        received_s = self._clock.now()
        self._command(lambda update: self._open(request, received_s, update))

    def abort(self, key: StageKey) -> None:
        """Ends a request with Aborted. One that is not open is ignored."""
        self._command(lambda update: self._fail(key, Aborted("the request was aborted"), update))

    def _command(self, command: Callable[[StageUpdate], None]) -> None:
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def _note_saved(self, key: StageKey, error: WeftError | None) -> None:
        self._command(lambda update: self._saved(key, error, update))

    # ------------------------------------------------------------ engine thread

    def _run(self) -> None:
        try:
            if self._warm_up is not None:
                self._warm_up()
            self._ready.set_result(None)
            while not self._is_stopping:
                self._turn()
            while self._commands:  # Requests that were aborted before the stop give up what they hold.
                self._commands.popleft()(StageUpdate())
        except Exception as error:
            # This is the loop of the engine's thread; the owner of the updates ends every request.
            _LOG.exception("the engine of the stage has died")
            died = WorkerLost(f"the engine of the stage has died: {type(error).__name__}")
            self._death = error if isinstance(error, WorkerLost) else died
            if not self._ready.done():
                self._ready.set_exception(error)
            self._on_update(StageUpdate(death=self._death))

    def _turn(self) -> None:
        with self._changed:
            self._is_woken = False
        update = StageUpdate()
        is_busy = bool(self._commands)
        while self._commands:
            self._commands.popleft()(update)
        is_busy |= self._receive(self._scheduler.take_chunks(), update)
        plan = self._scheduler.schedule()
        for key, error in plan.refused:
            self._fail(key, error, update)
        for key in plan.preempted:
            self._tallies[key].note(self._clock.now(), "preempted")
        if plan.spans:
            self._step(plan.spans, update)
        is_busy |= self._receive(plan.restored, update)
        for key in plan.idle:
            self._end_idle(key, update)
        self._note_waits()
        is_busy |= bool(plan.spans or plan.refused or plan.idle)
        if is_busy:
            update.numbers = self._numbers()
            self._on_update(update)
        else:
            due_s = self._scheduler.next_step_s()
            with self._changed:
                timeout_s = None if due_s is None else max(due_s - self._clock.now(), 0.0)
                self._changed.wait_for(lambda: self._is_woken, timeout_s)

    # ------------------------------------------------------------ commands

    def _open(self, request: StageRequest, received_s: float, update: StageUpdate) -> None:
        key, tally = request.key, StageTally(request, received_s)
        if key in self._tallies:
            what = f"attempt {request.attempt} of {request.request_id} is already open at this stage"
            update.ended.append(EndedStage(tally, ProtocolError(what)))
            return
        self.adapter.open(request)
        failure = self._try(partial(self._model.open, request), [key])
        if isinstance(failure, Exception):
            error = _shown(failure, "could not take the request")
            self.adapter.abort(request, ErrorInfo.of(error))
            update.ended.append(EndedStage(tally, error))
            return
        self._tallies[key] = tally
        self._scheduler.add(request)

    def _saved(self, key: StageKey, error: WeftError | None, update: StageUpdate) -> None:
        """Takes the end of a request's last save, or the failure of any of its saves."""
        tally = self._tallies.get(key)
        if tally is None:
            return
        if error is not None:
            self._fail(key, error, update)
        elif tally.is_draining:
            self._end(tally, None, update)

    def _receive(self, restored: Sequence[RestoredRequest], update: StageUpdate) -> bool:
        """Hands the chunks of requests that have come back to the model. Returns whether there are any."""
        for key, loaded in restored:
            tally, now_s = self._tallies[key], self._clock.now()
            if tally.waiting_since_s is not None:
                tally.waited_s += now_s - tally.waiting_since_s if tally.num_chunks_in else 0.0
                tally.waiting_since_s = None
            if loaded.error is not None:
                is_stall = loaded.error.code == "stage_stalled"
                self._totals = self._totals._replace(num_stalls=self._totals.num_stalls + is_stall)
                self._fail(key, loaded.error, update)
                continue
            for chunk in loaded.chunks:
                tally.num_chunks_in += 1
                tally.first_chunk_at_s = tally.first_chunk_at_s or now_s
                tally.note(now_s, "chunk_received", chunk=chunk.number, is_last=chunk.is_last)
                self._totals = self._totals._replace(num_chunks_in=self._totals.num_chunks_in + 1)
                failure = self._try(partial(self._model.receive, chunk), [key])
                if isinstance(failure, Exception):
                    self._fail(key, _shown(failure, "could not take a chunk"), update)
                    break
        return bool(restored)

    # ------------------------------------------------------------ a step

    def _step(self, spans: Sequence[StageSpan], update: StageUpdate) -> None:
        started_s = self._clock.now()
        outputs, failed = self._execute(spans)
        self._scheduler.commit(span for span in spans if span.key not in failed)
        step_s = self._clock.now() - started_s
        totals = self._totals
        mean_s = totals.step_s + _NEW_SHARE * (step_s - totals.step_s) if totals.num_steps else step_s
        self._totals = totals._replace(num_steps=totals.num_steps + 1, step_s=mean_s)
        self.adapter.num_running = len(spans)
        for span in spans:
            self._tallies[span.key].computed_s += step_s
        for key, error in failed.items():
            self._fail(key, error, update)
        for span in spans:
            if span.key in failed:
                continue
            output = outputs.get(span.key)
            is_complete = self._model.is_complete(span.key)
            if output is not None or is_complete:
                self._deliver(span.key, output or _NOTHING, is_complete, update)

    def _execute(self, spans: Sequence[StageSpan]) -> tuple[dict[StageKey, StageOutput], dict[StageKey, WeftError]]:
        """Returns the outputs, and the error of each request that failed. Raises WorkerLost if the device fails."""
        result = self._try(partial(self._model.execute, spans), [span.key for span in spans])
        if not isinstance(result, Exception):
            self._num_failed_steps = 0
            return dict(result), {}
        outputs: dict[StageKey, StageOutput] = {}
        failed: dict[StageKey, WeftError] = {}
        for span in spans:
            alone = self._try(partial(self._model.execute, [span]), [span.key])
            if not isinstance(alone, Exception):
                outputs.update(alone)
            elif is_device_error(alone):
                raise WorkerLost(f"the device fails: {ErrorInfo.of(alone).message}") from alone
            else:
                failed[span.key] = _shown(alone, "failed in a step of this request")
        self._num_failed_steps = self._num_failed_steps + 1 if len(failed) == len(spans) else 0
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise WorkerLost(f"{MAX_FAILED_STEPS} consecutive steps of the stage failed")
        return outputs, failed

    def _try(self, call: Callable[[], Any], keys: Sequence[StageKey]) -> Any:
        """Calls the model, and returns its result or the exception with which it failed. Raises WorkerLost if the model
        does."""
        try:
            return call()
        except WorkerLost:
            raise
        except RequestRefused as error:
            return error
        except Exception as error:
            # This is one call of the thread's loop: the callers end the request that caused the failure.
            alone = {"request_id": keys[0]} if len(keys) == 1 else {}
            _LOG.exception("the model of the stage failed (requests: %s)", ", ".join(keys), extra=alone)
            return error

    def _deliver(self, key: StageKey, output: StageOutput, is_complete: bool, update: StageUpdate) -> None:
        """Sends an output on its way, and ends the request's computation with its last one."""
        tally, now_s = self._tallies[key], self._clock.now()
        is_last = is_complete or output.is_finished
        output = output._replace(is_finished=is_last)
        tally.num_outputs += output.num_outputs
        self._totals = self._totals._replace(num_outputs=self._totals.num_outputs + output.num_outputs)
        if tally.request.next_stage is None:
            if output.values or is_last:
                update.outputs.append(EngineOutput(tally.request, output))
                if tally.first_output_at_s is None and output.num_outputs:
                    self._note_first(tally, now_s)
        elif self.adapter.save(output, tally.request):
            tally.note(now_s, "chunk_sent", chunk=tally.num_chunks_out)
            if tally.num_chunks_out == 0:
                self._note_first(tally, now_s)
            tally.num_chunks_out += 1
            self._totals = self._totals._replace(num_chunks_out=self._totals.num_chunks_out + 1)
        if is_last:
            self._finish(tally, update)

    def _note_first(self, tally: StageTally, now_s: float) -> None:
        tally.first_output_at_s = now_s
        tally.note(now_s, "first_output")

    # ------------------------------------------------------------ ends

    def _finish(self, tally: StageTally, update: StageUpdate) -> None:
        """Ends the computation of a request. With a next stage, it stays open until its last chunk has got there."""
        key = tally.request.key
        self._release(key)
        self.adapter.close(key)
        if tally.request.next_stage is None:
            self._end(tally, None, update)
        else:
            tally.is_draining = True

    def _end_idle(self, key: StageKey, update: StageUpdate) -> None:
        """Ends a request that has got its last chunk and has nothing to compute."""
        if key not in self._tallies or key not in self._scheduler:
            return
        if self._model.is_complete(key):
            self._deliver(key, _NOTHING, True, update)
        else:
            self._fail(key, EngineFailed("the stage has nothing to compute, but its output is not complete"), update)

    def _fail(self, key: StageKey, error: WeftError, update: StageUpdate) -> None:
        """Ends a request with an error, if it is open. The next stage learns of it, except if the request was aborted,
        because then the router ends all stages."""
        tally = self._tallies.get(key)
        if tally is None:
            return
        if not tally.is_draining:
            self._release(key)
        self.adapter.abort(tally.request, None if isinstance(error, Aborted) else ErrorInfo.of(error))
        self._end(tally, error, update)

    def _release(self, key: StageKey) -> None:
        """Frees what a request holds in the scheduler and in the model."""
        self._scheduler.remove(key)
        self._try(partial(self._model.close, key), [key])

    def _end(self, tally: StageTally, error: WeftError | None, update: StageUpdate) -> None:
        del self._tallies[tally.request.key]
        tally.note(self._clock.now(), "aborted" if isinstance(error, Aborted) else "finished")
        update.ended.append(EndedStage(tally, error))

    # ------------------------------------------------------------ numbers

    def _note_waits(self) -> None:
        now_s = self._clock.now()
        for key in self._scheduler.keys(StageStatus.WAITING_FOR_CHUNK):
            tally = self._tallies[key]
            if tally.waiting_since_s is None:
                tally.waiting_since_s = now_s

    def _numbers(self) -> StageNumbers:
        count = self._scheduler.count
        return self._totals._replace(
            num_waiting=count(StageStatus.WAITING),
            num_running=count(StageStatus.RUNNING),
            num_waiting_for_chunk=count(StageStatus.WAITING_FOR_CHUNK),
            pool_used=self._scheduler.pool_used,
        )


def _shown(error: Exception, what: str) -> WeftError:
    """Returns the error for a request whose model has failed."""
    if isinstance(error, WeftError):
        return error
    return EngineFailed(f"the model of the stage {what}: {type(error).__name__}")

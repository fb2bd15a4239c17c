"""Runs one replica of a stage behind the thinker: it takes requests, connects the engine and the connectors, and sends
the samples of the last stage to the routers.

The service runs in one event loop, where the updates of the engine arrive with one call per turn. It makes no decisions
and knows nothing of what the stage computes, except that the last one makes samples. It runs with or without Ray, and
knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fabric.contracts import (
    AbortAttempt,
    Aborted,
    Clock,
    EngineFailed,
    ErrorInfo,
    Member,
    MemberId,
    PlaneMessage,
    ProtocolError,
    RouterHeartbeat,
    StageFrame,
    StageFrames,
    StageKey,
    StageReport,
    StageRequest,
    StageResult,
    TraceEvent,
    WeftError,
    WorkerLost,
    stage_key,
)
from fabric.process_meter import ProcessMeter
from fabric.transport import Plane, RouterTable, StageConnector
from llm_workers.stages.chunk_adapter import ChunkTransferAdapter
from llm_workers.stages.stage_engine import (
    EngineOutput,
    StageEngine,
    StageNumbers,
    StageTally,
    StageUpdate,
)
from llm_workers.stages.stage_model import StageModel
from llm_workers.stages.stage_settings import StageSettings

_LOG = logging.getLogger(__name__)
MEMORY = 4096
"""Limits how many aborted attempts are remembered."""
_INT16 = 32767


@dataclass(slots=True, eq=False)
class StageCall:
    """A `StageCall` is one open `run` call."""

    request: StageRequest
    received_s: float
    future: asyncio.Future[StageResult]
    num_samples: int = 0
    """Counts the samples that were sent."""


class StageService:
    """A `StageService` is one replica of a stage. Its owner calls `start`, then `run` any number of times concurrently,
    then `stop`, and closes the plane and the connectors itself."""

    def __init__(
        self,
        member_id: MemberId,
        settings: StageSettings,
        model: StageModel,
        connectors: Mapping[str, StageConnector],
        plane: Plane,
        clock: Clock,
        warm_up: Callable[[], None] | None = None,
    ) -> None:
        """`connectors` holds a connector under each name that leads to this replica or to one of the next stage.
        `warm_up` runs placeholder steps of the model when the service starts."""
        self._member_id, self._settings, self._plane, self._clock = member_id, settings, plane, clock
        self._engine = StageEngine(
            model,
            partial(settings.make_scheduler, clock=clock),
            lambda on_loaded, on_saved: ChunkTransferAdapter(connectors, clock, settings.chunks, on_loaded, on_saved),
            clock,
            self._post,
            warm_up,
        )
        self._calls: dict[StageKey, StageCall] = {}
        self._refused: OrderedDict[StageKey, None] = OrderedDict()
        """Holds attempts that were aborted before their call arrived."""
        self._routers = RouterTable(plane, clock)
        self._router_ids: frozenset[MemberId] = frozenset()
        """Holds the routers of the latest list of members."""
        self._process = ProcessMeter(clock)
        self._numbers = StageNumbers()
        self._epoch = self._seq = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._is_report_due = self._is_stopping = False
        self._loss: WeftError | None = None
        self._on_loss: Callable[[], None] = lambda: None

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Warms the model up, then takes requests. Raises what the warm-up raises."""
        self._loop = asyncio.get_running_loop()
        await asyncio.wrap_future(self._engine.start())
        self._plane.start(self._on_message)
        self._ticker = asyncio.create_task(self._tick(), name=f"{self._member_id}-ticker")

    async def stop(self) -> None:
        """Ends every open call with WorkerLost, and stops the engine after its current step. It is idempotent."""
        self._is_stopping = True
        for key in list(self._calls):
            self._fail(key, WorkerLost("the stage is stopping"))
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        await asyncio.to_thread(self._engine.stop)
        self._loop = None

    def on_lost(self, call: Callable[[], None]) -> None:
        """Registers `call`, which runs once in the event loop when the stage is lost, or at once if it already is."""
        self._on_loss = call
        if self._loss is not None:
            call()

    def lose(self, error: WeftError) -> None:
        """Marks the stage as lost: its calls end with `error`, later calls and health checks fail with it, and its
        owner is notified. A second call has no further effect."""
        for key in list(self._calls):
            self._fail(key, error)
        if self._loss is None:
            self._loss = error
            self._report()
            self._on_loss()

    def check_health(self) -> None:
        """Raises the error with which the stage was lost, WorkerLost if the engine, a connector or the message plane
        has died, and EngineFailed if the engine was stopped or the periodic work has ended."""
        if self._loss is not None:
            raise self._loss
        self._engine.check_health()
        if self._ticker is not None and self._ticker.done():
            raise EngineFailed("the stage's periodic work has ended")
        if not self._plane.is_alive:
            raise WorkerLost("the message plane has died")

    @property
    def num_held(self) -> int:
        """Counts what requests hold here: calls, chunks, and the adapter's inputs and outputs. It is 0 when the stage
        is idle."""
        adapter = self._engine.adapter
        return len(self._calls) + adapter.num_open + adapter.num_held

    # ------------------------------------------------------------ calls

    async def run(self, request: StageRequest) -> StageResult:
        """Processes a request until the stage has ended its work on it. The result also contains failures. Cancelling
        this call aborts the request."""
        key, received_s = request.key, self._clock.now()
        error = self._refusal(request)
        if error is not None:
            return self._result(StageTally(request, received_s), error)
        call = StageCall(request, received_s, asyncio.get_running_loop().create_future())
        self._calls[key] = call
        self._routers.expect(request.router_id)
        self._engine.open(request)
        try:
            return await call.future
        except asyncio.CancelledError:
            self._engine.abort(key)
            raise
        finally:
            del self._calls[key]

    def _refusal(self, request: StageRequest) -> WeftError | None:
        """Returns the error for a request that can't be taken in, or None."""
        if request.key in self._calls:
            return ProtocolError(f"attempt {request.attempt} of {request.request_id} is already open at this stage")
        if self._is_stopping:
            return WorkerLost("the stage is stopping")
        if request.key in self._refused:
            return Aborted("the attempt was aborted before it arrived")
        if request.stage_id != self._settings.stage_id:
            wanted = f"stage {request.stage_id}, but this replica is stage {self._settings.stage_id}"
            return ProtocolError(f"a request is meant for {wanted}")
        if self._loss is not None:
            return self._loss
        try:
            self._engine.check_health()
        except WeftError as error:
            return error
        return None

    def _fail(self, key: StageKey, error: WeftError) -> None:
        call = self._calls.get(key)
        if call is not None:
            self._engine.abort(key)
            self._resolve(call, StageTally(call.request, call.received_s), error)

    def _resolve(self, call: StageCall, tally: StageTally, error: WeftError | None) -> None:
        if not call.future.done():
            call.future.set_result(self._result(tally, error))

    def _result(self, tally: StageTally, error: WeftError | None) -> StageResult:
        received_s = tally.received_s

        def since(at_s: float | None) -> float:
            return 0.0 if at_s is None else at_s - received_s

        return StageResult(
            member_id=self._member_id,
            stage_id=self._settings.stage_id,
            num_chunks_in=tally.num_chunks_in,
            num_chunks_out=tally.num_chunks_out,
            num_outputs=tally.num_outputs,
            first_chunk_s=since(tally.first_chunk_at_s),
            first_output_s=since(tally.first_output_at_s),
            waited_s=tally.waited_s,
            computed_s=tally.computed_s,
            trace=tuple(
                TraceEvent(event.at_s, self._member_id, event.name, {"stage": self._settings.stage_id, **event.detail})
                for event in tally.events
            ),
            error=None if error is None else ErrorInfo.of(error),
        )

    # ------------------------------------------------------------ messages

    def update_members(self, members: Sequence[Member]) -> None:
        """Takes the list of current members. The requests of a router that is no longer in it are aborted."""
        router_ids = frozenset(member.member_id for member in members if member.kind == "router")
        for router_id in self._router_ids - router_ids:
            self._router_gone(router_id)
        self._router_ids = router_ids
        self._epoch = next((each.epoch for each in members if each.member_id == self._member_id), self._epoch)

    def _on_message(self, message: PlaneMessage) -> None:
        if isinstance(message, AbortAttempt):
            self._abort(stage_key(message.request_id, message.attempt))
        elif isinstance(message, RouterHeartbeat):
            if self._routers.heartbeat(message):
                self._routers.send_report_to(message.router_id, self.report())
        else:
            _LOG.warning("the stage ignores a message of type %s, which it does not handle", type(message).__name__)

    def _abort(self, key: StageKey) -> None:
        """Aborts an attempt. One whose call has not arrived yet is refused when it arrives."""
        if key in self._calls:
            self._engine.abort(key)
            return
        self._refused[key] = None
        if len(self._refused) > MEMORY:
            self._refused.popitem(last=False)

    def _router_gone(self, router_id: MemberId) -> None:
        self._routers.forget(router_id)
        for key, call in self._calls.items():
            if call.request.router_id == router_id:
                self._engine.abort(key)

    # ------------------------------------------------------------ the engine's side

    def _post(self, update: StageUpdate) -> None:
        """Passes an update to the event loop. It runs in the engine's thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._apply, update)

    def _apply(self, update: StageUpdate) -> None:
        try:
            if update.death is not None:
                self.lose(update.death)
                return
            self._send(update.outputs)
            for tally, error in update.ended:
                call = self._calls.get(tally.request.key)
                if call is not None and call.request is tally.request:
                    self._resolve(call, tally, error)
            has_changed = update.ended or update.numbers.num_running != self._numbers.num_running
            self._numbers = update.numbers
            if has_changed:
                self._report_soon()
        except Exception:
            # This is the top of a callback of the event loop. What is left of the update is lost, so the calls that it
            # would have ended would never end.
            _LOG.exception("an update of the stage's engine can't be applied")
            self.lose(WorkerLost("an update of the stage's engine can't be applied"))

    def _send(self, outputs: Sequence[EngineOutput]) -> None:
        """Sends the samples of a step, in one message for each router."""
        frames: defaultdict[str, list[StageFrame]] = defaultdict(list)
        for each in outputs:
            call = self._calls.get(each.request.key)
            if call is None or call.request is not each.request or call.future.done():
                continue
            try:
                frames[each.request.router_address].append(self._frame(call, each))
            except WeftError as error:
                self._fail(each.request.key, error)
        for address, sent in frames.items():
            self._plane.send(address, StageFrames(self._member_id, tuple(sent)))

    def _frame(self, call: StageCall, each: EngineOutput) -> StageFrame:
        """Returns the frame of an output. Raises EngineFailed if its samples are not finite or do not follow those
        that were sent."""
        values = each.output.values
        samples = np.asarray(values.get("samples", np.empty(0, dtype=np.float32)), dtype=np.float32)
        first = values.get("first_sample", call.num_samples)
        if first != call.num_samples:
            raise EngineFailed(f"the stage made sample {first} next, but {call.num_samples} samples were sent")
        if not np.isfinite(samples).all():
            raise EngineFailed("the samples of the stage are not finite")
        call.num_samples += len(samples)
        return StageFrame(
            each.request.request_id,
            each.request.attempt,
            call.num_samples - len(samples),
            to_int16(samples),
            self._settings.sample_rate,
            each.output.is_finished,
        )

    # ------------------------------------------------------------ time

    def report(self) -> StageReport:
        """Returns a report of the state after the engine's last turn."""
        self._seq += 1
        return StageReport(
            member_id=self._member_id,
            stage_id=self._settings.stage_id,
            model_stage=self._settings.model_stage,
            epoch=self._epoch,
            seq=self._seq,
            max_num_seqs=self._settings.max_num_seqs,
            is_lost=self._loss is not None,
            process=self._process.read(),
            **self._numbers._asdict(),
        )

    async def _tick(self) -> None:
        """Ends the requests of routers whose lease has expired, and sends reports at regular intervals."""
        while True:
            await asyncio.sleep(self._settings.report_interval_s)
            for router_id in self._routers.take_expired():
                self._router_gone(router_id)
            if self._routers.needs(self.report()):
                self._report_soon()

    def _report_soon(self) -> None:
        """Schedules a report, at most one per turn of the event loop and no more than the routers asked for."""
        if not self._is_report_due and self._loop is not None:
            self._is_report_due = True
            self._loop.call_later(self._routers.report_wait_s(), self._report)

    def _report(self) -> None:
        self._is_report_due = False
        if self._loop is not None and len(self._routers):
            self._routers.send_report(self.report())


def to_int16(samples: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> bytes:
    """Returns samples in [-1, 1] as int16 values, little-endian; louder ones are clipped."""
    scaled = np.rint(np.clip(samples, -1.0, 1.0) * _INT16)
    return scaled.astype("<i2").tobytes()

"""Runs one LLM worker: it takes requests and sends token frames. It connects the engine, the receiver and the table of
the routers.

The service runs in one event loop, where the updates of the engine arrive with one call per turn. It makes no
decisions: the engine decides what to compute, and the feature store decides what to pull. It knows the engine only by
the Protocol `WorkerEngine`, so this module imports no torch. It runs with or without Ray, and knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from fabric.contracts import (
    WEFT_KV,
    AbortAttempt,
    Aborted,
    AttemptId,
    Clock,
    EngineFailed,
    GenerateRequest,
    GenerateResult,
    InvalidRequest,
    KvScheme,
    KvSnapshot,
    Member,
    MemberId,
    PlaneMessage,
    ProtocolError,
    RouterHeartbeat,
    SnapshotRequest,
    UnitReady,
    WeftError,
    WorkerLost,
    WorkerReport,
)
from fabric.process_meter import ProcessMeter
from fabric.transport import FeatureSink, Plane, RouterTable
from llm_workers.engine_interface import EngineFactory, Update
from llm_workers.features import FeatureEndpoint, LinkClassOf, Listener, Peers, Receiver
from llm_workers.open_calls import OpenAttempt, OpenCalls
from llm_workers.scheduling import Guide
from llm_workers.worker_config import WorkerConfig
from llm_workers.worker_reports import WorkerReporter
from modalities.family import Family

if TYPE_CHECKING:
    from llm_workers.sampling import GrammarCompiler

_LOG = logging.getLogger(__name__)


class WorkerService:
    """A `WorkerService` is one LLM worker. Its owner calls `start`, then `generate` any number of times concurrently,
    then `stop`."""

    def __init__(
        self,
        member_id: MemberId,
        config: WorkerConfig,
        family: Family,
        make_engine: EngineFactory,
        plane: Plane,
        sink: FeatureSink,
        clock: Clock,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Makes the worker's engine. Without `grammars`, the worker refuses structured output."""
        self._grammars = grammars
        self._member_id, self._config, self._family, self._clock = member_id, config, family, clock
        self._plane, self._sink = plane, sink
        self._engine = make_engine(self._post)
        self._calls = OpenCalls(member_id, plane, clock)
        endpoint = FeatureEndpoint(member_id, plane, sink, clock)
        listener = Listener(self._calls.unit_event, self._calls.needed, self._fail, self.lose)
        levels = (family.shape.num_levels, family.shape.hidden_size)
        self._receiver = Receiver(endpoint, config, levels, self._engine, listener)
        self._routers = RouterTable(plane, clock)
        stats, receiver = self._engine.stats(), self._receiver
        self._reporter = WorkerReporter(member_id, config, stats, receiver.stats, receiver.pull_log.windows)
        self._peers = Peers(plane, sink, self._receiver)
        self._process = ProcessMeter(clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._is_report_due = False
        self._is_stopping = False
        self._loss: WeftError | None = None
        """Holds the reason for which the worker is lost, if it is."""
        self._on_loss: Callable[[], None] = lambda: None
        self._aborts_before_admission: dict[AttemptId, list[Sequence[int]]] = {}
        """Holds aborts of attempts whose grammar is still being compiled, because the engine does not know these
        attempts yet."""
        self._compiling: dict[AttemptId, asyncio.Task[Guide]] = {}
        """Holds the waits for these grammars, each of which ends with its attempt."""

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Prepares the engine, then takes requests. Raises ConfigError if the engine can't compute with this model and
        config on this machine."""
        self._loop = asyncio.get_running_loop()
        await self._engine.prepare(self._reporter.costs)
        self._receiver.start()
        self._engine.start()
        self._plane.start(self._on_message)
        self._ticker = asyncio.create_task(self._tick(), name=f"{self._member_id}-ticker")

    async def stop(self) -> None:
        """Ends every open call with WorkerLost, stops the engine after its current step, and frees the inbox slots. The
        call is idempotent."""
        self._is_stopping = True
        for attempt_id in self._calls.attempts():
            self._fail(attempt_id, WorkerLost("the worker is stopping"))
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        await asyncio.to_thread(self._engine.stop)
        if self._grammars is not None:
            self._grammars.close()
        self._receiver.stop()
        self._loop = None

    def on_lost(self, call: Callable[[], None]) -> None:
        """Registers `call`, which runs once in the event loop when the worker is lost, or at once if the worker is
        already lost. The owner uses it to remove the worker from the directory."""
        self._on_loss = call
        if self._loss is not None:
            call()

    def lose(self, error: WeftError) -> None:
        """Marks the worker as lost: it computes nothing any more. Its calls end with `error`, later calls and health
        checks fail with it, its reports say that it is lost, and its owner is notified. A second call has no further
        effect."""
        for attempt_id in self._calls.attempts():
            self._fail(attempt_id, error)
        if self._loss is None:
            self._loss = error
            self._reporter.is_lost = True
            self._report()
            self._on_loss()

    @property
    def kv_scheme(self) -> KvScheme:
        """Returns how this worker hashes its KV blocks, which its record in the directory says."""
        return KvScheme(WEFT_KV, self._config.block_size)

    def check_health(self) -> None:
        """Raises the error with which the worker was lost, WorkerLost if the engine, the message plane or the feature
        channel has died, and EngineFailed if the engine was stopped or the task that ends leases and reports has
        died."""
        if self._loss is not None:
            raise self._loss
        self._engine.check_health()
        if self._ticker is not None and self._ticker.done():
            raise EngineFailed("the worker's periodic work has ended")
        if not self._plane.is_alive:
            raise WorkerLost("the message plane has died")
        if not self._sink.is_alive:
            raise WorkerLost("the feature channel has died")

    @property
    def num_units_held(self) -> int:
        """Returns the number of announcements, running pulls and landed units; it is 0 when the worker is idle. A unit
        is one separately encoded part of a media item."""
        return self._receiver.store.num_held

    def seconds_by_part(self) -> Mapping[str, float]:
        """Returns how many seconds since the start the engine has spent in each part of its steps."""
        return self._engine.seconds_by_part()

    # ------------------------------------------------------------ calls

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Processes a request until its terminal event. The result also contains failures. Cancelling this call aborts
        the attempt."""
        attempt_id = AttemptId(request.request_id, request.attempt)
        if attempt_id in self._calls:
            error = ProtocolError(f"attempt {request.attempt} of {request.request_id} is already open")
            return OpenAttempt(self._member_id, request, self._clock.now()).result(error)
        call = self._calls.open(request)
        self._routers.expect(request.router_id)
        try:
            guide = await self._guide(attempt_id, request) if request.sampling.grammar else None
            self._admit(attempt_id, request, guide)
            return await call.future
        except asyncio.CancelledError:
            self._engine.abort(attempt_id)
            raise
        except Exception as error:
            # This is the top of a call's task: a bug that one request meets must end this request and no other.
            name = attempt_id.request_id
            _LOG.exception("request %s failed with an unexpected exception", name, extra={"request_id": name})
            self._fail(attempt_id, EngineFailed(f"the request could not be admitted: {type(error).__name__}"))
            return await call.future
        finally:
            self._calls.close(attempt_id)
            self._receiver.end(attempt_id)
            self._aborts_before_admission.pop(attempt_id, None)

    async def _guide(self, attempt_id: AttemptId, request: GenerateRequest) -> Guide | None:
        """Waits for the request's grammar, which is compiled in a separate thread. Fails the call and returns None if
        the grammar can't be used or if the attempt ends meanwhile; the grammar then leaves the queue."""
        self._aborts_before_admission[attempt_id] = []
        try:
            if self._grammars is None:
                raise InvalidRequest("this worker does not support structured output")
            if self._is_stopping:
                raise WorkerLost("the worker is stopping")
            wait = asyncio.ensure_future(self._grammars.guide(request.sampling.grammar))
            self._compiling[attempt_id] = wait
            await asyncio.wait([wait])
            if wait.cancelled():
                raise Aborted("the attempt was aborted while its grammar was compiled")
            return wait.result()
        except WeftError as error:
            self._calls.fail(attempt_id, error)
            return None
        finally:
            self._stop_compiling(attempt_id)

    def _stop_compiling(self, attempt_id: AttemptId) -> None:
        if (wait := self._compiling.pop(attempt_id, None)) is not None:
            wait.cancel()

    def _admit(self, attempt_id: AttemptId, request: GenerateRequest, guide: Guide | None) -> None:
        try:
            if self._is_stopping:
                raise WorkerLost("the worker is stopping")
            if self._loss is not None:
                raise self._loss
            if self._calls.is_refused(attempt_id):
                raise Aborted("the attempt was aborted before it arrived")
            self._engine.check_health()
            positions = self._family.positions(request.token_ids, request.placeholders, request.media)
            self._receiver.expect(attempt_id, request)
        except WeftError as error:
            self._calls.fail(attempt_id, error)
        else:
            if not self._calls.is_ended(attempt_id):
                # The call has already ended if a feature that is present differs from the plan of the attempt.
                self._engine.add(request, positions, guide)
                for choices in self._aborts_before_admission.pop(attempt_id, ()):
                    self._engine.abort(attempt_id, choices)

    def _fail(self, attempt_id: AttemptId, error: WeftError) -> None:
        self._stop_compiling(attempt_id)
        self._engine.abort(attempt_id)
        self._calls.fail(attempt_id, error)

    def report(self) -> WorkerReport:
        """Returns a report of the state after the engine's last turn, or at the beginning of its running step."""
        links, process = self._receiver.link_meter.stats(), self._process.read()
        return msgspec.structs.replace(self._reporter.report(self._clock.now()), links=links, process=process)

    def classify_links(self, class_of: LinkClassOf) -> None:
        """Takes the rule by which pulls are counted for each class of links (`weft_worker_transfers_total`)."""
        self._receiver.link_meter.classify(class_of)

    def update_members(self, members: Sequence[Member]) -> None:
        """Takes the list of current members. A peer that is no longer in it counts as confirmed dead, and the worker
        gives up everything that waits for it."""
        for router_id in self._peers.update(members):
            self._router_gone(router_id)
        if (own := self._peers.get(self._member_id)) is not None:
            self._reporter.epoch = self._receiver.kept_log.epoch = own.epoch

    # ------------------------------------------------------------ messages

    def _on_message(self, message: PlaneMessage) -> None:
        if isinstance(message, UnitReady):
            self._receiver.announce(message)
        elif isinstance(message, AbortAttempt):
            self._abort(AttemptId(message.request_id, message.attempt), message.choices)
        elif isinstance(message, RouterHeartbeat):
            if self._routers.heartbeat(message):
                self._routers.send_report_to(message.router_id, self.report())
        elif isinstance(message, SnapshotRequest):
            self._send_kept_snapshot(message.address)
            self._engine.request_snapshot(message.address)
        else:
            _LOG.warning("the worker ignores a message of type %s, which it does not handle", type(message).__name__)

    def _abort(self, attempt_id: AttemptId, choices: Sequence[int]) -> None:
        """Aborts an attempt or some of its choices. An attempt whose call has not arrived yet is refused when it
        arrives."""
        if attempt_id in self._calls:
            self._aborts_before_admission.get(attempt_id, []).append(choices)
            if not choices:
                self._stop_compiling(attempt_id)
            self._engine.abort(attempt_id, choices)
        elif not choices:
            self._calls.refuse(attempt_id)

    def _router_gone(self, router_id: MemberId) -> None:
        self._routers.forget(router_id)
        for attempt_id in self._calls.of_router(router_id):
            self._abort(attempt_id, ())

    # ------------------------------------------------------------ the engine's side

    def _post(self, update: Update) -> None:
        """Passes an update to the event loop. It runs in the engine's thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._apply, update)

    def _apply(self, update: Update) -> None:
        if update.death is not None:
            self.lose(update.death)
            return
        try:
            self._apply_turn(update)
        except Exception:
            # This is the top of a callback of the event loop. What is left of the update is lost, so the calls that it
            # would have ended would never end.
            _LOG.exception("an update of the engine can't be applied")
            self.lose(WorkerLost("an update of the engine can't be applied"))

    def _apply_turn(self, update: Update) -> None:
        """Applies an update in the order in which its events happened: an attempt that was admitted after the release
        of a unit may miss that unit."""
        self._receiver.distrust(update.distrusted)
        for released in update.released:
            self._receiver.release(released)
        self._receiver.update_reads(update.reads)
        for attempt_id, admission in update.admitted:
            self._receiver.admit(attempt_id, admission.missing_units)
        for sequence_id, unit, reason in update.needed:
            self._receiver.need(sequence_id.attempt_id, unit, reason)
        self._calls.apply(update)
        self._receiver.settle()
        self._reporter.take(update)
        for attempt_id, _ in update.admitted:
            if (router_id := self._calls.router_of(attempt_id)) is not None:
                self._routers.received(router_id, attempt_id)
        self._send_snapshots(update)
        self._send_kept()
        has_ended = update.failed or update.aborted or (update.events is not None and update.events.finished)
        if update.admitted or update.released or update.kv_events or has_ended or update.begun_work is not None:
            self._report_soon()

    def _send_snapshots(self, update: Update) -> None:
        """Sends the snapshots that routers asked for, after all earlier events."""
        if update.snapshots:
            self._send_kv_events()
        epoch = self._reporter.epoch
        for address, last_seq, chains, page, is_last in update.snapshots:
            self._plane.send(address, KvSnapshot(self._member_id, epoch, last_seq, tuple(chains), page, is_last))

    def _send_kv_events(self) -> None:
        if (message := self._reporter.take_kv_events()) is not None:
            self._routers.broadcast(message)

    def _send_kept(self) -> None:
        """Sends which features the worker has begun to keep, and which it has dropped, since the last call."""
        for message in self._receiver.kept_log.drain():
            self._routers.broadcast(message)

    def _send_kept_snapshot(self, address: str) -> None:
        """Sends a router which features the worker keeps, after all earlier events."""
        self._send_kept()
        self._plane.send(address, self._receiver.kept_log.snapshot())

    # ------------------------------------------------------------ time

    async def _tick(self) -> None:
        """Checks leases, releases announcements that no request claims, and sends reports at regular intervals."""
        while True:
            await asyncio.sleep(self._config.report_interval_s)
            for router_id in self._routers.take_expired():
                self._router_gone(router_id)
            if self._loss is None:
                self._settle_and_check()
                self._send_kept()
            if self._routers.needs(self.report()):
                self._report_soon()

    def _settle_and_check(self) -> None:
        """Loses the worker if the feature store contradicts itself, because it may then free what the engine reads."""
        try:
            self._receiver.settle()
            self._receiver.check_at_rest()
        except AssertionError:
            _LOG.exception("the feature store is inconsistent")
            self.lose(WorkerLost("the feature store is inconsistent"))

    def _report_soon(self) -> None:
        """Schedules a report. It sends at most one report per turn of the event loop, and no more than the routers
        asked for, regardless of the number of changes."""
        if not self._is_report_due and self._loop is not None:
            self._is_report_due = True
            wait_s = self._routers.report_wait_s()
            if wait_s > 0:
                self._loop.call_later(wait_s, self._report)
            else:
                self._loop.call_soon(self._report)

    def _report(self) -> None:
        self._is_report_due = False
        self._send_kv_events()
        if self._loop is not None and len(self._routers):
            self._routers.send_report(self.report())
            self._receiver.pull_log.forget_windows()

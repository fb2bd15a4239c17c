"""One LLM worker: requests in, token frames out. Joins the engine thread, the receiver and the routers' links.

Runs in one event loop; the engine's updates arrive there, one call per turn. Decides nothing: what to compute is the
scheduler's, what to pull the intake's. Runs with or without Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Sequence

from fabric.channel import FeatureSink, LandedFeature
from fabric.clock import Clock
from fabric.errors import ProtocolError, WeftError, WorkerLost
from fabric.ids import AttemptId, MemberId, UnitKey
from fabric.messages import (
    AbortAttempt,
    FeatureNeeded,
    GenerateRequest,
    GenerateResult,
    KvEvents,
    KvSnapshot,
    Member,
    PlaneMessage,
    RouterHeartbeat,
    SnapshotRequest,
    TokenFrame,
    TokenFrames,
    UnitReady,
    WorkerReport,
)
from fabric.plane import Plane
from llm_workers.attempts import OpenAttempt
from llm_workers.attention import PagedKV, select_backend
from llm_workers.calibrate import calibrate
from llm_workers.config import WorkerConfig
from llm_workers.engine import Engine, StepTimes, Update
from llm_workers.intake import Need
from llm_workers.landed import LandedFeatures
from llm_workers.receiver import Endpoint, Listener, Receiver
from llm_workers.reporting import Reporter
from llm_workers.routers import RouterLinks
from llm_workers.runner import Runner
from llm_workers.scheduling.scheduler import Scheduler
from modalities.family import Family, LanguageModel

_LOG = logging.getLogger(__name__)


class _OpenCall:
    """An attempt and the future that its `generate` call waits for."""

    def __init__(self, attempt: OpenAttempt) -> None:
        self.attempt = attempt
        self.future: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()

    def end(self, error: WeftError | None = None) -> None:
        """The first call decides."""
        if not self.future.done():
            self.future.set_result(self.attempt.result(error))


class WorkerService:
    """`start`, then `generate` any number of times at once, then `stop`."""

    def __init__(
        self,
        member_id: MemberId,
        config: WorkerConfig,
        family: Family,
        model: LanguageModel,
        plane: Plane,
        sink: FeatureSink,
        clock: Clock,
    ) -> None:
        """Allocates the KV pages on the model's device."""
        self._member_id, self._config, self._family, self._clock = member_id, config, family, clock
        self._plane, self._sink = plane, sink
        shape = family.shape
        heads = (shape.num_kv_heads, shape.head_dim)
        kv = PagedKV(shape.num_layers, config.num_blocks, config.block_size, heads, model.dtype, model.device)
        scheduler = Scheduler(config, shape.max_model_len, clock)
        landed: dict[UnitKey, LandedFeature] = {}
        self._runner = Runner(model, kv, LandedFeatures(landed), select_backend("auto", kv))
        self._engine = Engine(scheduler, self._runner, clock, self._post)
        endpoint = Endpoint(member_id, plane, sink, clock)
        listener = Listener(self._unit_event, self._needed, self._fail)
        self._receiver = Receiver(
            endpoint, config, (shape.num_levels, shape.hidden_size), self._engine, listener, landed
        )
        self._routers = RouterLinks(plane, clock)
        self._reporter = Reporter(member_id, scheduler.stats(), sink)
        self._calls: dict[AttemptId, _OpenCall] = {}
        self._members: dict[MemberId, Member] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._is_report_due = False

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Calibrates (a few forwards, in a thread), then takes requests and messages."""
        self._loop = asyncio.get_running_loop()
        costs = self._reporter.costs
        await asyncio.to_thread(calibrate, self._runner, self._family, self._config, costs, self._clock)
        self._receiver.start()
        self._engine.start()
        self._plane.start(self._on_message)
        self._ticker = asyncio.create_task(self._tick(), name=f"{self._member_id}-ticker")

    async def stop(self) -> None:
        """Ends every open call with WorkerLost, stops the engine after its step, frees inbox slots. Idempotent."""
        for call in list(self._calls.values()):
            self._engine.abort(call.attempt.attempt_id)
            call.end(WorkerLost("the worker is stopping"))
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        await asyncio.to_thread(self._engine.stop)
        self._receiver.stop()
        self._loop = None

    def check_health(self) -> None:
        """Raises EngineFailed when the engine has died."""
        self._engine.check_health()

    @property
    def num_units_held(self) -> int:
        """Announcements, pulls and features that are kept; 0 when idle."""
        return self._receiver.num_held

    @property
    def step_times(self) -> StepTimes:
        """Where the engine's time went since start."""
        return self._engine.times

    # ------------------------------------------------------------ calls

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Open until the terminal event; failures are in the result. Cancelling it aborts the attempt."""
        attempt = OpenAttempt(self._member_id, request, self._clock.now())
        call = _OpenCall(attempt)
        if attempt.attempt_id in self._calls:
            return attempt.result(ProtocolError("this attempt is open already"))
        self._calls[attempt.attempt_id] = call
        try:
            self._admit(call)
            return await call.future
        except asyncio.CancelledError:
            self._engine.abort(attempt.attempt_id)
            raise
        finally:
            del self._calls[attempt.attempt_id]
            self._receiver.end(attempt.attempt_id)

    def _admit(self, call: _OpenCall) -> None:
        request = call.attempt.request
        try:
            self._engine.check_health()
            positions = self._family.positions(request.token_ids, request.placeholders, request.media)
            self._receiver.expect(call.attempt.attempt_id, request)
        except WeftError as error:
            call.end(error)
        else:
            self._engine.add(request, positions)

    def _fail(self, attempt_id: AttemptId, error: WeftError) -> None:
        call = self._calls.get(attempt_id)
        if call is not None:
            self._engine.abort(attempt_id)
            call.end(error)

    def report(self) -> WorkerReport:
        """As of the engine's last turn."""
        return self._reporter.report(list(self._calls))

    def update_members(self, members: Sequence[Member]) -> None:
        """Peers that are not there any more are confirmed dead: what waits for them is given up."""
        now = {member.member_id: member for member in members}
        for member_id in self._members.keys() - now.keys():
            gone = self._members[member_id]
            if gone.transfer_agent:
                self._sink.peer_dead(gone.transfer_agent)
                self._receiver.source_gone(gone.transfer_agent)
            self._plane.forget(gone.address)
            if gone.kind == "router":
                self._router_gone(member_id)
        self._members = now
        if self._member_id in now:
            self._reporter.epoch = now[self._member_id].epoch

    # ------------------------------------------------------------ messages

    def _on_message(self, message: PlaneMessage) -> None:
        if isinstance(message, UnitReady):
            self._receiver.announced(message)
        elif isinstance(message, AbortAttempt):
            self._abort(AttemptId(message.request_id, message.attempt), message.choices)
        elif isinstance(message, RouterHeartbeat):
            if self._routers.heartbeat(message):
                self._plane.send(message.address, self.report())
                self._engine.request_snapshot(message.address)
        elif isinstance(message, SnapshotRequest):
            self._engine.request_snapshot(message.address)
        else:
            _LOG.warning("a worker takes no %s", type(message).__name__)

    def _abort(self, attempt_id: AttemptId, choices: Sequence[int] = ()) -> None:
        if attempt_id in self._calls:
            self._engine.abort(attempt_id, choices)

    def _router_gone(self, router_id: MemberId) -> None:
        self._routers.forget(router_id)
        for attempt_id, call in self._calls.items():
            if call.attempt.request.router_id == router_id:
                self._abort(attempt_id)

    # ------------------------------------------------------------ the receiver's side

    def _unit_event(self, attempt_id: AttemptId, name: str, unit: UnitKey) -> None:
        call = self._calls.get(attempt_id)
        if call is not None:
            call.attempt.note_units(name, self._clock.now(), [unit])

    def _needed(self, needs: Sequence[Need]) -> None:
        """One message per attempt and reason."""
        grouped: dict[tuple[AttemptId, str], list[UnitKey]] = defaultdict(list)
        for need in needs:
            grouped[need.attempt, need.reason].append(need.unit)
        for (attempt_id, reason), units in grouped.items():
            call = self._calls[attempt_id]
            message = FeatureNeeded(self._member_id, *attempt_id, tuple(units), reason)
            self._plane.send(call.attempt.request.router_address, message)
            call.attempt.note_units("feature_needed", self._clock.now(), units, reason=reason)

    # ------------------------------------------------------------ the engine's side

    def _post(self, update: Update) -> None:
        """In the engine's thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._apply, update)

    def _apply(self, update: Update) -> None:
        """In the order in which it happened: what was let go may be missed by who was admitted after."""
        if update.death is not None:
            for call in self._calls.values():
                call.end(update.death)
            return
        for unit, missed_by in update.let_go:
            self._receiver.let_go(unit, missed_by)
        self._apply_admissions(update)
        self._apply_step(update)
        for failed in update.failed:
            if failed.attempt in self._calls:
                self._calls[failed.attempt].end(failed.error)
        for call in list(self._calls.values()):
            if not call.attempt.open_choices:
                call.end()
        self._receiver.settle()
        self._reporter.take(update)
        self._send_kv(update)
        if update.admitted or update.let_go or update.failed or update.aborted:
            self._report_soon()

    def _apply_admissions(self, update: Update) -> None:
        for attempt_id, admission in update.admitted:
            if attempt_id in self._calls:
                self._calls[attempt_id].attempt.admitted(admission, update.at_s)
            self._receiver.admit(attempt_id, admission.missing_units)
        for sequence_id, unit, reason in update.needed:
            self._receiver.need(sequence_id.attempt_id, unit, reason)

    def _apply_step(self, update: Update) -> None:
        events = update.events
        if events is not None:
            for sequence_id, start, end in events.prefill:
                if call := self._calls.get(sequence_id.attempt_id):
                    call.attempt.prefilled(sequence_id.choice, start, end, update.at_s)
            self._send_tokens(update)
            for sequence_id in events.preempted:
                if call := self._calls.get(sequence_id.attempt_id):
                    call.attempt.note("preempted", update.at_s, choice=sequence_id.choice)
            for finished in events.finished:
                if call := self._calls.get(finished.sequence_id.attempt_id):
                    call.attempt.finished(finished, update.at_s)
        for sequence_id in update.aborted:
            if call := self._calls.get(sequence_id.attempt_id):
                call.attempt.aborted([sequence_id.choice], update.at_s)

    def _send_tokens(self, update: Update) -> None:
        """One message per step and router."""
        assert update.events is not None
        frames: dict[str, list[TokenFrame]] = defaultdict(list)
        for tokens in update.events.tokens:
            call = self._calls.get(tokens.sequence_id.attempt_id)
            if call is not None:
                call.attempt.generated(tokens, update.at_s)
                frame = TokenFrame(*tokens.sequence_id, tokens.first_index, tokens.token_ids, tokens.finish_reason)
                frames[call.attempt.request.router_address].append(frame)
        for address, sent in frames.items():
            self._plane.send(address, TokenFrames(self._member_id, tuple(sent)))

    def _send_kv(self, update: Update) -> None:
        epoch = self._reporter.epoch
        if update.kv_events:
            self._routers.broadcast(KvEvents(self._member_id, epoch, update.kv_first_seq, tuple(update.kv_events)))
        for address, last_seq, chains in update.snapshots:
            self._plane.send(address, KvSnapshot(self._member_id, epoch, last_seq, tuple(chains)))

    # ------------------------------------------------------------ time

    async def _tick(self) -> None:
        """Leases, announcements that nobody claimed, reports."""
        while True:
            await asyncio.sleep(self._config.report_interval_s)
            for router_id in self._routers.take_expired():
                self._router_gone(router_id)
            self._receiver.settle()
            self._report()

    def _report_soon(self) -> None:
        """Once per turn of the loop, however much has changed."""
        if not self._is_report_due and self._loop is not None:
            self._is_report_due = True
            self._loop.call_soon(self._report)

    def _report(self) -> None:
        self._is_report_due = False
        if self._loop is not None and len(self._routers):
            self._routers.broadcast(self.report())

"""Runs one encoder replica, with or without Ray: the pipeline, the members that join and leave, and the reports.

`EncoderService` is the replica. `EncoderReporter` sends its gauges and cache events to the routers that the encoder
listens to, and `encoder_report` builds one report of the pipeline's and the feature table's state.

Everything but the forward pass and the decoders happens in one event loop. The plane and the feature source belong to
the caller that made them: `stop` leaves both open. The service knows nothing of routing, prompts or
Ray, or of what routers do with the numbers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from copy import copy

import msgspec

from encoder_pool.calibration import calibrate, load_spectrograms, probe_inputs, try_spectrograms
from encoder_pool.decoder import DecodePool
from encoder_pool.device_streams import open_streams
from encoder_pool.encode_call import Announcer
from encoder_pool.encoder_config import EncoderConfig
from encoder_pool.forward import ForwardThread, SlowedEncoder
from encoder_pool.pipeline import Pipeline
from encoder_pool.planning import CostEstimate, FeatureSpec, FeatureTable, LeaseKey
from fabric.contracts import (
    AbortAttempt,
    Aborted,
    AttemptId,
    Clock,
    ConfigError,
    EncodeCost,
    EncodeFailed,
    EncodeRequest,
    EncodeResult,
    EncoderLost,
    EncoderReport,
    FeatureLog,
    Member,
    MemberId,
    PlaneMessage,
    RouterHeartbeat,
    SnapshotRequest,
    UnitRelease,
    WorkerLost,
)
from fabric.process_meter import ProcessMeter
from fabric.transport import FeatureSource, Plane, RouterTable
from modalities.family import EncoderModel, Family

logger = logging.getLogger(__name__)

REPORT_SPACING_S = 0.01
"""Changes within this time share one report."""


class EncoderService:
    """An `EncoderService` is one encoder replica. `epoch` is `Member.epoch` of this start; an id that is never reused
    needs no value other than 1."""

    def __init__(
        self,
        member_id: MemberId,
        config: EncoderConfig,
        family: Family,
        model: EncoderModel,
        plane: Plane,
        source: FeatureSource,
        clock: Clock,
        epoch: int = 1,
    ) -> None:
        for modality in config.modalities:
            if modality not in family.max_items:
                known = ", ".join(family.max_items) or "only text"
                raise ConfigError(f"{family.name} does not accept {modality}; it accepts {known}")
        self._member_id = member_id
        self._config = config
        self._family = family
        if config.encode_delay_s or config.encode_delay_s_per_cost:
            model = SlowedEncoder(model, config.least_forward_s)
        self._model = model
        self._plane = plane
        self._source = source
        self._epoch = epoch
        self._log = FeatureLog(member_id, epoch)
        self._table = FeatureTable(source, clock, config.lease_s, self._log)
        self._routers = RouterTable(plane, clock, REPORT_SPACING_S)
        self._reporter = EncoderReporter(plane, self._log, self._routers)
        self._spectrograms = load_spectrograms(config, family)
        max_raw_cost = config.max_batch_cost if self._spectrograms else 0
        limits = config.decode_limits
        self._decoder = DecodePool(family, config.model_dir, config.num_decode_processes, limits, max_raw_cost)
        self._forward = ForwardThread(model, self._spectrograms, open_streams(config.device))
        announcer = Announcer(member_id, plane, source, self._table, config.lease_s)
        self._pipeline = Pipeline(
            member_id, config, self._table, announcer, self._decoder, self._forward, clock, self._changed
        )
        self._process = ProcessMeter(clock)
        self._members: dict[MemberId, Member] = {}
        self._housekeeping: asyncio.Task[None] | None = None
        self._flush: asyncio.TimerHandle | None = None
        self._is_open = False
        self._is_read: asyncio.Event | None = None
        """This is set while the encoder drains and nothing that it holds is awaited any more."""
        self._on_loss: Callable[[], None] = lambda: None
        self._is_loss_reported = False

    async def start(self) -> None:
        """Starts decoders, calibrates with short synthetic forward passes, and begins to take messages and calls."""
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._decoder.close)
            await self._decoder.start()
            spec = await asyncio.to_thread(self._calibrate)
            harmless = await asyncio.to_thread(probe_inputs, self._family, self._config.modalities[0])
            undo.pop_all()
        self._forward.start(spec, harmless)
        self._pipeline.open(spec)
        self._plane.start(self._receive)
        self._housekeeping = asyncio.create_task(self._keep_house())
        self._is_open = True

    async def drain(self, limit_s: float) -> int:
        """Waits until workers have read, or given up, every feature that is leased to them, for `limit_s` at most. New
        calls are still taken. Returns how many leases are left; it does not wait for an encoder that is lost."""
        if not self._is_open or self._forward.loss is not None:
            return 0
        self._is_read = asyncio.Event()
        self._note_read()
        try:
            async with asyncio.timeout(limit_s):
                await self._is_read.wait()
        except TimeoutError:
            logger.warning("workers have not read %d features of this encoder", self._table.usage().num_leases)
        return self._table.usage().num_leases

    def _note_read(self) -> None:
        if self._is_read is not None and not self._table.usage().num_leases and not self._pipeline.num_pending:
            self._is_read.set()

    async def stop(self) -> None:
        """Ends open calls with EncoderLost, then ends threads and processes. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self._pipeline.end_calls(lambda _: True, EncoderLost("the encoder is stopping"))
        await asyncio.sleep(0)  # this lets the calls return
        assert self._housekeeping is not None
        self._housekeeping.cancel()
        await asyncio.gather(self._housekeeping, return_exceptions=True)
        await asyncio.to_thread(self._forward.close)
        await self._decoder.close()
        await asyncio.sleep(0)  # this lets the loop take the last result of the forward thread
        if self._flush is not None:
            self._flush.cancel()

    async def encode(self, request: EncodeRequest, media: Sequence[bytes]) -> EncodeResult:
        """Encodes the items and announces each unit to `request.destination` as soon as it is done. Returns when all
        items were announced or have failed, at the latest when the request's time is over (to within a report
        interval). An item's failure is in its result and fails no other item.

        `media` holds one encoded file per item. Cancelling the call drops what is not done; units that were announced
        stay leased to the worker. Raises Overloaded or WorkerBackedUp before any work was done, EncoderLost when the
        service is stopped, and ProtocolError.
        """
        if not self._is_open:
            raise EncoderLost("the encoder is not serving")
        self._routers.received(request.router_id, AttemptId(request.request_id, request.attempt))
        return await self._pipeline.encode(request, media)

    def update_members(self, members: Sequence[Member]) -> None:
        """Takes the directory's newest view. For members that have left, workers lose their leases and what was to be
        encoded for them, and routers lose their requests."""
        present = {member.member_id: member for member in members}
        left = [member for member_id, member in self._members.items() if member_id not in present]
        self._members = present
        for member in members:
            if member.kind == "worker":
                self._table.worker_came(member.member_id)
        for member in left:
            if member.kind == "worker":
                self._worker_left(member.member_id)
            elif member.kind == "router":
                self._router_left(member.member_id)
                self._routers.forget(member.member_id)
            self._plane.forget(member.address)
        if left:
            self._pipeline.pump()
        self._note_read()

    def report(self) -> EncoderReport:
        report = encoder_report(
            self._member_id,
            self._epoch,
            self._reporter.next_seq(),
            self._pipeline,
            self._table,
            self._config.max_items_in_flight,
        )
        return msgspec.structs.replace(report, process=self._process.read())

    def on_lost(self, call: Callable[[], None]) -> None:
        """Registers `call`, which is called once, in the event loop, when the device was found to fail; the encoder's
        owner then removes the encoder from the directory."""
        self._on_loss = call

    def check_health(self) -> None:
        """Raises EncodeFailed if the forward thread died, if the loop that ends leases died, or if decode processes
        can't be started or die before they are needed. Raises EncoderLost if the device fails or hangs, if no messages
        can be sent to workers, or if workers can't read features."""
        if not self._is_open:
            return
        if self._forward.loss is not None:
            raise self._forward.loss
        if self._pipeline.device_queue.forward_s > self._config.max_forward_s:
            raise EncoderLost(f"the device has not finished a batch within {self._config.max_forward_s:g} s")
        if not self._forward.is_alive:
            raise EncodeFailed("the forward thread has died")
        if not self._decoder.is_alive:
            raise EncodeFailed("decode processes can't be started, or die while they are idle")
        if self._housekeeping is not None and self._housekeeping.done():
            raise EncodeFailed("the loop that ends expired leases has died")
        if not self._plane.is_alive:
            raise EncoderLost("the message plane has died")
        if not self._source.is_alive:
            raise EncoderLost("the feature channel has died")

    def tick(self) -> None:
        """Runs one round of housekeeping: ends what has expired, starts what can start now, and reports."""
        if self._forward.loss is not None and not self._is_loss_reported:
            self._is_loss_reported = True
            self._on_loss()
        self._table.expire()
        for router_id in self._routers.take_expired():
            logger.warning("the lease of %s has expired, so its requests end", router_id)
            self._router_left(router_id)
        self._pipeline.end_overdue()
        self._pipeline.pump()
        self._note_read()
        self._reporter.publish_events()
        if self._routers.needs(self.report()):
            self._changed()

    def check_invariants(self) -> None:
        self._table.check_invariants()
        self._pipeline.jobs.check_invariants()

    def _calibrate(self) -> FeatureSpec:
        costs, decode_costs = self._pipeline.costs, self._pipeline.decode_costs
        modalities = self._config.modalities
        specs = {calibrate(self._family, self._model, modality, costs, decode_costs) for modality in modalities}
        if self._spectrograms is not None:
            prepare_costs = self._pipeline.device_queue.prepare_costs
            try_spectrograms(self._family, self._spectrograms, decode_costs, prepare_costs)
        if len(specs) > 1:
            raise ConfigError(f"the features of {', '.join(modalities)} differ in shape or dtype: {specs}")
        return specs.pop()

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(self._config.report_interval_s)
            self.tick()

    # ------------------------------------------------------------ messages

    def _receive(self, message: PlaneMessage) -> None:
        match message:
            case UnitRelease():
                attempt_id = AttemptId(message.request_id, message.attempt)
                self._table.release(LeaseKey(message.worker_id, attempt_id, message.unit), message.generation)
                self._pipeline.pump()
                self._note_read()
            case RouterHeartbeat():
                if self._routers.heartbeat(message):
                    self._reporter.send_snapshot(message.address)
                    self._routers.send_report_to(message.router_id, self.report())
            case AbortAttempt(choices=()):
                self._abort(AttemptId(message.request_id, message.attempt))
            case AbortAttempt():
                pass  # only some choices end; the others need the features
            case SnapshotRequest():
                self._reporter.send_snapshot(message.address)
            case _:
                logger.warning(
                    "the encoder ignores a message of type %s, which it does not handle", type(message).__name__
                )

    def _abort(self, attempt_id: AttemptId) -> None:
        self._pipeline.end_attempt(attempt_id, Aborted("the attempt was aborted"))
        if self._table.end_attempt(attempt_id):
            self._pipeline.pump()

    def _router_left(self, router_id: MemberId) -> None:
        self._pipeline.end_calls(lambda request: request.router_id == router_id, Aborted(f"{router_id} has left"))
        self._table.end_router(router_id)

    def _worker_left(self, worker_id: MemberId) -> None:
        self._pipeline.end_calls(
            lambda request: request.destination.worker_id == worker_id, WorkerLost(f"{worker_id} has left")
        )
        self._table.end_worker(worker_id)

    # ------------------------------------------------------------ reports

    def _changed(self) -> None:
        """Schedules a report; further changes until then are in the same report."""
        if self._is_open and self._flush is None:
            wait_s = max(REPORT_SPACING_S, self._routers.report_wait_s())
            self._flush = asyncio.get_running_loop().call_later(wait_s, self._publish)

    def _publish(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        self._reporter.publish_events()
        self._routers.send_report(self.report())


class EncoderReporter:
    """Numbers one encoder's reports, and sends the changes of its cache to all routers that it knows. It knows nothing
    of what the numbers of a report mean; the service passes them in."""

    def __init__(self, plane: Plane, log: FeatureLog, routers: RouterTable) -> None:
        self._plane = plane
        self._log = log
        self._routers = routers
        self._seq = 0

    def next_seq(self) -> int:
        """Returns the sequence number of the next report."""
        self._seq += 1
        return self._seq

    def send_snapshot(self, address: str) -> None:
        """Sends everything that is cached now, after the events that led to it."""
        self.publish_events()
        self._plane.send(address, self._log.snapshot())

    def publish_events(self) -> None:
        """Sends what the cache has gained and lost since the last call."""
        for message in self._log.drain():
            self._routers.broadcast(message)


def encoder_report(
    encoder_id: MemberId,
    epoch: int,
    seq: int,
    pipeline: Pipeline,
    table: FeatureTable,
    max_in_flight: int,
) -> EncoderReport:
    """Returns the report, without acknowledgements, and changes nothing. Its sums cover the whole life of the parts."""
    jobs, device = pipeline.jobs, pipeline.device_queue
    costs, mixed = pipeline.costs, pipeline.costs.mixed()
    queue, decoding = device.queue_state(), pipeline.decode_queue()
    items = copy(pipeline.stats)
    items.preprocess_s += device.preprocess_s
    return EncoderReport(
        encoder_id=encoder_id,
        epoch=epoch,
        seq=seq,
        acknowledged=(),
        items=items,
        device=copy(device.stats),
        arena=table.usage(),
        num_queued=jobs.totals.num_units_queued,
        queued_cost=jobs.totals.queued_cost,
        num_encoding=pipeline.num_encoding,
        encode_s_per_cost=mixed.seconds_per_cost,
        batch_overhead_s=mixed.overhead_s,
        costs=tuple(
            _encode_cost(
                modality,
                costs.estimate(modality),
                pipeline.decode_costs.estimate(modality),
                device.prepare_costs.estimate(modality),
            )
            for modality in costs.modalities
        ),
        num_items_queued=jobs.totals.num_items_queued,
        queued_s=jobs.queued_s,
        num_items_pending=pipeline.num_pending,
        num_in_flight=jobs.totals.num_in_flight,
        max_in_flight=max_in_flight,
        num_decoding=pipeline.num_decoding,
        busy_fraction=device.busy.fraction,
        queue_profile=queue.profile,
        unit_s=queue.unit_s,
        forward_left_s=device.forward_left_s,
        patience=pipeline.config.patience,
        num_decode_processes=decoding.num_processes,
        decode_queue_s=decoding.queue_s,
        decode_short_s=decoding.short_s,
        decode_left_s=decoding.left_s,
        at_s=pipeline.now_s,
    )


def _encode_cost(modality: str, forward: CostEstimate, decode: CostEstimate, prepare: CostEstimate) -> EncodeCost:
    return EncodeCost(
        modality,
        forward.seconds_per_cost,
        forward.overhead_s,
        decode.seconds_per_cost,
        decode.overhead_s,
        prepare.seconds_per_cost,
        prepare.overhead_s,
    )

"""Runs one simulated encoder: the production pipeline with its jobs, batches, arena and reports, on virtual time.

What takes time in production is replaced by a wait from the cost table: `WaitingDecoder` prepares items on a number of
CPU processes, and `WaitingForward` runs one batch after the other on the device. Features have sizes and places in the
arena (`sim_transport`) and no bytes. The module knows nothing of how a worker uses a feature.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import msgspec
import numpy as np

from encoder_pool.decode_process import Decoded, OnUnits
from encoder_pool.encode_call import Announcer
from encoder_pool.encoder_config import EncoderConfig
from encoder_pool.encoder_service import REPORT_SPACING_S, encoder_report
from encoder_pool.pipeline import Pipeline
from encoder_pool.planning import (
    FeatureSpec,
    FeatureTable,
    ForwardResult,
    ForwardUnit,
    LeaseKey,
    SoundJob,
    SoundResult,
    split_cost,
)
from fabric.contracts import (
    AttemptId,
    EncodeRequest,
    EncodeResult,
    EncoderLost,
    EncoderReport,
    FeatureEvents,
    FeatureLog,
    MediaItem,
    Member,
    MemberId,
    PlaneMessage,
    UnitReady,
    UnitRelease,
    WeftError,
    WorkerLost,
)
from loadtest.simulator.cost_tables import CostTable
from loadtest.simulator.event_loop import SimEvent, VirtualLoop
from loadtest.simulator.sim_transport import FEATURE_DTYPE, PlacesOnly, SimPlane
from modalities.family import EncoderInput

_PIXEL = np.zeros((1, 1), dtype=np.float32)
EncoderMessage = EncoderReport | FeatureEvents
CALIBRATION_SIZES = (1, 4)
"""At its start, an encoder measures batches of the smallest unit of each modality, in these sizes."""


class EncoderOutlets(Protocol):
    """An `EncoderOutlets` takes everything that leaves an encoder."""

    def broadcast(self, message: EncoderMessage) -> None:
        """Sends a report or events of the cache to every router."""
        ...

    def unit_ready(self, address: str, message: UnitReady) -> None:
        """Sends an announcement to the worker at the address."""
        ...

    def device(self, member: SimEncoder, begin_s: float, seconds: float, done: Callable[[], None]) -> None:
        """Calls `done` when a forward pass has ended on the encoder's device."""
        ...


class SimEncoder:
    """A `SimEncoder` is one encoder."""

    def __init__(
        self,
        member: Member,
        config: EncoderConfig,
        table: CostTable,
        loop: VirtualLoop,
        outlets: EncoderOutlets,
        arena_bytes: int,
        num_decoders: int = 4,
        spacing_s: float = REPORT_SPACING_S,
    ) -> None:
        self.member = member
        self.slowness = 1.0
        """Multiplies the time of every forward pass and preparation; a fault changes it."""
        self.is_alive = True
        self.busy_s = 0.0
        self._spacing_s = max(spacing_s, REPORT_SPACING_S)
        self._table, self._loop, self._outlets, self._config = table, loop, outlets, config
        self._log = FeatureLog(member.member_id, member.epoch)
        source = PlacesOnly(str(member.member_id), arena_bytes)
        self._features = FeatureTable(source, loop, config.lease_s, self._log)
        announcer = Announcer(member.member_id, SimPlane(member.address, self._announce), source, self._features, 1e9)
        self.pipeline = Pipeline(
            member.member_id,
            config,
            self._features,
            announcer,
            WaitingDecoder(self, table, num_decoders),
            WaitingForward(self, table, loop, outlets),
            loop,
            self._changed,
        )
        self.pipeline.open(FeatureSpec(1, table.worker.hidden_size, FEATURE_DTYPE))
        self._received: list[AttemptId] = []
        self._seq = 0
        self._flush: SimEvent | None = None

    def _announce(self, address: str, message: PlaneMessage) -> None:
        assert isinstance(message, UnitReady)
        self._outlets.unit_ready(address, message)

    def slow_down(self, slowness: float) -> None:
        """Sets the factor on the times of decoding and of forward passes that begin from now on."""
        self.slowness = slowness

    def encode(self, request: EncodeRequest, answer: Callable[[EncodeResult | WeftError], None]) -> None:
        """Takes a call; `answer` gets its result or the error that ended it, once, while the encoder lives."""
        if not self.is_alive:
            answer(EncoderLost(f"{self.member.member_id} is gone"))
            return
        self._received.append(AttemptId(request.request_id, request.attempt))
        self._loop.create_task(self._encode(request, answer))

    async def _encode(self, request: EncodeRequest, answer: Callable[[EncodeResult | WeftError], None]) -> None:
        result: EncodeResult | WeftError
        try:
            result = await self.pipeline.encode(request, [b""] * len(request.items))
        except WeftError as error:
            result = error
        finally:
            self._received.append(AttemptId(request.request_id, request.attempt))
        if self.is_alive:
            answer(result)

    def release(self, message: UnitRelease) -> None:
        """Ends the lease of a worker that holds the unit or does not need it."""
        if self.is_alive:
            attempt_id = AttemptId(message.request_id, message.attempt)
            self._features.release(LeaseKey(message.worker_id, attempt_id, message.unit), message.generation)
            self.pipeline.pump()

    def worker_came(self, worker_id: MemberId) -> None:
        self._features.worker_came(worker_id)

    def worker_left(self, worker_id: MemberId) -> None:
        """Drops the units that were to be encoded for a worker that died, and ends the worker's leases."""
        if self.is_alive:
            lost = WorkerLost(f"{worker_id} has left")
            self.pipeline.end_calls(lambda request: request.destination.worker_id == worker_id, lost)
            self._features.end_worker(worker_id)
            self.pipeline.pump()

    def end_attempt(self, attempt_id: AttemptId, error: WeftError) -> None:
        if self.is_alive:
            self.pipeline.end_attempt(attempt_id, error)
            self._features.end_attempt(attempt_id)
            self.pipeline.pump()

    def start(self, first_report_s: float) -> None:
        """Measures the forward passes of the encoder, as at boot in production, and begins to report."""
        self._calibrate()
        self._loop.after(first_report_s, self._tick)

    def die(self) -> None:
        """Ends the encoder; calls that are open get no answer from it."""
        self.is_alive = False

    def send_snapshot(self, send: Callable[[EncoderMessage], None]) -> None:
        if self.is_alive:
            self._publish_events()
            send(self._log.snapshot())

    # ------------------------------------------------------------ reports

    def _changed(self) -> None:
        if self._flush is None and self.is_alive:
            self._flush = self._loop.after(self._spacing_s, self._publish)

    def _tick(self) -> None:
        if self.is_alive:
            self._features.expire()
            self.pipeline.end_overdue()
            self._publish()
            self._loop.after(self._config.report_interval_s, self._tick)

    def _publish(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        if not self.is_alive:
            return
        self._publish_events()
        self._seq += 1
        # No message is lost in a simulation, so one report acknowledges a call, and routers ignore those of others.
        acknowledged, self._received = tuple(dict.fromkeys(self._received)), []
        self._outlets.broadcast(msgspec.structs.replace(self.report(), acknowledged=acknowledged))

    def report(self) -> EncoderReport:
        """Returns the report of this moment, without acknowledgements."""
        return encoder_report(
            self.member.member_id,
            self.member.epoch,
            self._seq,
            self.pipeline,
            self._features,
            self._config.max_items_in_flight,
        )

    def _publish_events(self) -> None:
        for message in self._log.drain():
            self._outlets.broadcast(message)

    def _calibrate(self) -> None:
        for modality, costs in self._table.modality_to_encoding.items():
            if modality in self._config.modalities:
                smallest = costs.forward[0][0]
                for size in CALIBRATION_SIZES:
                    seconds = costs.forward_s(size * smallest) * self.slowness
                    self.pipeline.costs.observe(modality, size * smallest, seconds, 0.0)


# ---------------------------------------------------------------- what takes time


class WaitingDecoder:
    """Prepares items on `num_parallel` CPU processes; each takes the time of the table."""

    def __init__(self, encoder: SimEncoder, table: CostTable, num_parallel: int) -> None:
        self._encoder, self._table, self._num_parallel = encoder, table, num_parallel

    @property
    def num_parallel(self) -> int:
        return self._num_parallel

    async def decode(self, data: bytes, item: MediaItem, on_units: OnUnits) -> Decoded:
        """Waits for as long as the item's preparation takes. Units of a long item come one after the other."""
        costs = self._table.modality_to_encoding[item.modality]
        unit_costs = split_cost(item.cost, item.unit_tokens)
        seconds = (costs.prepare_s + costs.prepare_s_per_cost * item.cost) * self._encoder.slowness
        last: list[EncoderInput] = []
        for index, cost in enumerate(unit_costs):
            if seconds:
                await asyncio.sleep(seconds / len(unit_costs))
            last = [_input_of(item.modality, max(cost, 1))]
            if seconds and index < len(unit_costs) - 1:
                on_units(last)
        if not seconds and len(unit_costs) > 1:
            last = [_input_of(item.modality, max(cost, 1)) for cost in unit_costs]
        return Decoded(last, seconds)


@lru_cache(maxsize=1024)
def _input_of(modality: str, cost: int) -> EncoderInput:
    """Returns an input of this many patches, without contents."""
    return EncoderInput(modality, np.broadcast_to(_PIXEL, (cost, 1)), (1, 1, cost))


class WaitingForward:
    """Runs batches on the device; each takes the time that the table's curve gives for its cost."""

    def __init__(self, encoder: SimEncoder, table: CostTable, loop: VirtualLoop, outlets: EncoderOutlets) -> None:
        self._encoder, self._table, self._loop, self._outlets = encoder, table, loop, outlets

    def submit(self, units: Sequence[ForwardUnit], done: Callable[[ForwardResult], None]) -> None:
        cost = sum(unit.input.num_patches for unit in units)
        costs = self._table.modality_to_encoding[units[0].input.modality]
        seconds = costs.forward_s(cost) * self._encoder.slowness
        result = ForwardResult([None] * len(units), seconds)
        self._outlets.device(self._encoder, self._loop.now(), seconds, lambda: self._ended(result, done))

    def submit_sounds(self, sounds: Sequence[SoundJob], done: Callable[[SoundResult], None]) -> None:
        """Raises AssertionError: the decoder of a simulation returns units, and never sounds."""
        raise AssertionError("no sound reaches the device of a simulated encoder as samples")

    def _ended(self, result: ForwardResult, done: Callable[[ForwardResult], None]) -> None:
        self._encoder.busy_s += result.seconds
        if self._encoder.is_alive:
            done(result)

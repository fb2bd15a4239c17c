"""Provides a test bench for the encoder service.

It has the encoder of the real demo checkpoint, a local plane and channel, and a worker that only listens. It knows
nothing of routing.
"""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image

from encoder_pool.encoder_config import EncoderConfig
from encoder_pool.encoder_service import EncoderService
from encoder_pool.planning import CostEstimate, ForwardCosts
from fabric.contracts import (
    Destination,
    EncodeRequest,
    ManualClock,
    MediaItem,
    Member,
    MemberId,
    PlaneMessage,
    RequestId,
    UnitReady,
    UnitRelease,
)
from fabric.transport import LocalChannelHub, LocalFeatureSink, LocalFeatureSource, LocalHub, LocalPlane
from modalities.family import DEFAULT_OPTIONS, EncoderInput, EncoderModel, Family, MediaOptions
from modalities.media import plan_media
from modalities.registry import REGISTRY

WORKER = Member(MemberId("worker-1"), "worker", "local://worker-1", "here", 1, (), "worker-1")
ROUTER = Member(MemberId("router-1"), "router", "local://router-1", "here", 1)
ENCODER = MemberId("encoder-1")


class GatedModel:
    """Wraps the real encoder with a gate, so that a test decides what queues meanwhile. It records the size of each
    batch. A unit whose number of patches is in `poison_patches` fails its batch; one in `spoilt_patches` gets spoilt
    features."""

    def __init__(self, model: EncoderModel) -> None:
        self._model = model
        self.gate = threading.Event()
        self.gate.set()
        self.batch_sizes: list[int] = []
        self.batches: list[tuple[str, list[int]]] = []
        """Holds for each batch its modality and the number of patches of each unit."""
        self.is_stepped = False
        """If this is true, the gate closes after each forward pass."""
        self.poison_patches: set[int] = set()
        self.spoilt_patches: set[int] = set()
        self.num_spoilt_forwards = 0
        """This many of the next forward passes return values that are not finite, regardless of their units."""
        self.spoils_with = float("nan")
        self.max_units: int | None = None
        """A batch of more units than this runs out of memory."""

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        assert self.gate.wait(30)
        if self.is_stepped:
            self.gate.clear()
        self.batch_sizes.append(len(inputs))
        self.batches.append((inputs[0].modality, [unit.num_patches for unit in inputs]))
        if self.max_units is not None and len(inputs) > self.max_units:
            raise torch.OutOfMemoryError("too many units")
        if any(unit.pixels.shape[0] in self.poison_patches for unit in inputs):
            raise RuntimeError("poisoned")
        features = self._model.encode(inputs)
        if self.num_spoilt_forwards:
            self.num_spoilt_forwards -= 1
            features[0].view(-1)[7] = self.spoils_with
        for feature, unit in zip(features, inputs, strict=True):
            if unit.pixels.shape[0] in self.spoilt_patches:
                feature.view(-1)[-1] = self.spoils_with
        return features


class KnownCosts(ForwardCosts):
    """Returns fixed costs of a forward pass, independent of its duration, so that a test knows what is fused."""

    def __init__(self, overhead_s: float, seconds_per_cost: float) -> None:
        super().__init__()
        self._line = CostEstimate(seconds_per_cost, overhead_s)

    def estimate(self, modality: str) -> CostEstimate:
        return self._line

    def mixed(self) -> CostEstimate:
        return self._line


@dataclass
class Bench:
    family: Family
    model: GatedModel
    service: EncoderService
    clock: ManualClock
    sink: LocalFeatureSink
    worker: LocalPlane
    router: LocalPlane
    ready: list[UnitReady] = field(default_factory=list)
    told: list[PlaneMessage] = field(default_factory=list)
    """Holds the messages that the router received."""
    num_requests: int = 0

    def item(
        self,
        data: bytes,
        index: int = 0,
        declared: bytes | None = None,
        modality: str = "image",
        options: MediaOptions = DEFAULT_OPTIONS,
    ) -> MediaItem:
        """Plans an item from a header, as a router does. The header is that of `declared` if it is given, otherwise
        that of `data`."""
        plugin = REGISTRY.modality(modality)
        part = f"messages.0.content.{index + 1}"
        header = plugin.probe(declared or data, part)
        return plan_media(self.family, data, header, index, part, options=options).item

    def request(self, files: Sequence[bytes], items: Sequence[MediaItem] = ()) -> EncodeRequest:
        self.num_requests += 1
        planned = tuple(items) or tuple(self.item(data, index) for index, data in enumerate(files))
        destination = Destination(WORKER.member_id, WORKER.address)
        request_id = RequestId(f"req-{self.num_requests}")
        age = (float(self.num_requests), str(request_id))
        return EncodeRequest(request_id, 0, ROUTER.member_id, planned, destination, age)

    def expected(self, files: Sequence[bytes], items: Sequence[MediaItem] = ()) -> list[bytes]:
        """Returns the features that the family's encoder computes for each unit alone, as bytes."""
        planned = items or [self.item(data) for data in files]
        pairs = zip(files, planned, strict=True)
        inputs = [unit for data, item in pairs for unit in self.family.preprocess(data, item)]
        return [self.model._model.encode([unit])[0].contiguous().view(torch.uint8).numpy().tobytes() for unit in inputs]

    async def step(self) -> None:
        """Opens the gate for one forward pass and waits until the service reports its end."""
        num_batches = self.service.report().device.num_batches
        self.model.gate.set()
        await self.until(lambda: self.service.report().device.num_batches > num_batches)

    async def queued(self, num_units: int) -> None:
        """Waits until `num_units` units are decoded and wait for their forward pass."""
        pipeline = self.service._pipeline
        await self.until(lambda: sum(len(job.unit_to_input) for job in pipeline.jobs) == num_units)

    async def pull(self, message: UnitReady) -> bytes:
        landed = await asyncio.wrap_future(self.sink.pull(message.ticket, 10.0))
        payload = bytes(landed.buffer)
        self.sink.free(landed.slot_id)
        return payload

    def release(self, message: UnitReady) -> None:
        unit, generation = message.unit, message.ticket.generation
        release = UnitRelease(WORKER.member_id, message.request_id, message.attempt, unit, generation)
        self.worker.send(message.encoder_address, release)

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Runs the event loop until `is_true` returns true. The time limit of 30 s is generous, not a measurement."""
        async with asyncio.timeout(30):
            while not is_true():  # noqa: ASYNC110 - another component sets this state and has no event for it
                await asyncio.sleep(0.001)

    async def is_idle(self) -> None:
        """Releases everything that was announced, and asserts that nothing is in use afterwards."""
        for message in self.ready:
            self.release(message)
        await self.until(lambda: self.service.report().arena.num_leases == 0)
        report = self.service.report()
        assert (report.arena.used_bytes, report.queued_cost, report.num_queued, report.num_encoding) == (0, 0, 0, 0)
        self.service.check_invariants()


def picture(seed: int, width: int = 96, height: int = 64) -> bytes:
    """Returns a PNG of noise, which is different for each seed."""
    rng = np.random.default_rng(seed)
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


ALWAYS_FUSED = KnownCosts(overhead_s=1.0, seconds_per_cost=1e-6)
NEVER_FUSED = KnownCosts(overhead_s=0.0, seconds_per_cost=1e-6)


@asynccontextmanager
async def running_bench(
    family: Family,
    encoder: EncoderModel,
    config: EncoderConfig,
    arena_bytes: int = 2**24,
    costs: ForwardCosts = ALWAYS_FUSED,
) -> AsyncIterator[Bench]:
    hub, channel, clock = LocalHub(), LocalChannelHub(), ManualClock()
    model = GatedModel(encoder)
    plane = LocalPlane(hub, "local://encoder-1")
    source = LocalFeatureSource(channel, "encoder-1", arena_bytes)
    service = EncoderService(ENCODER, config, family, model, plane, source, clock)
    sink = LocalFeatureSink(channel, "worker-1", 2**24)
    worker, router = LocalPlane(hub, WORKER.address), LocalPlane(hub, ROUTER.address)
    bench = Bench(family, model, service, clock, sink, worker, router)
    worker.start(lambda message: bench.ready.append(message) if isinstance(message, UnitReady) else None)
    router.start(bench.told.append)
    await service.start()
    service._pipeline.device_queue.costs = costs
    service.update_members([WORKER, ROUTER])
    model.batch_sizes.clear()
    model.batches.clear()
    try:
        yield bench
    finally:
        model.gate.set()
        await service.stop()
        for endpoint in (worker, router, plane):
            endpoint.close()
        sink.close()
        source.close()

"""Provides a cluster of fake members around a real router service, with its planner and its message plane.

A test of a plugin uses it with the plugin's own family and registry: requests are parsed, planned, dispatched and
streamed as in a cluster, but no model runs. This module imports no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from deploy.testing.fake_members import BLOCK_SIZE, FakeEncoder, FakeWorker
from deploy.testing.fake_stages import FakeStage
from deploy.testing.tiny_family import TinyFamily, tiny_codec
from fabric.contracts import (
    Clock,
    EncodeRequest,
    EncodeResult,
    GenerateRequest,
    GenerateResult,
    InvalidMedia,
    Member,
    MemberId,
    MmHash,
    StageRequest,
    StageResult,
    SystemClock,
    TargetGone,
)
from fabric.transport import LocalHub, LocalPlane
from modalities.family import Family, MediaHeader
from modalities.registry import REGISTRY, Registry
from modalities.text import TextCodec
from router.fetch import MediaFetcher
from router.prompt import MediumFile, PromptBuilder
from router.router_config import RouterConfig
from router.run import Pools
from router.service import RouterService

TINY_MODEL = "tiny"
"""This is the name under which a fake cluster serves its model."""


class NoProber:
    """Refuses every file. Tests use it with files that need no prober, because their first bytes say what they are."""

    async def start(self) -> None:
        return

    async def close(self) -> None:
        return

    async def probe(self, modality: str, data: bytes, param: str) -> MediaHeader:
        raise InvalidMedia(f"{param}: the first bytes of the file do not show that it is a {modality}", param=param)


class FakePools:
    """Implements both pools by member id. Raises TargetGone for a member that is not present."""

    def __init__(self) -> None:
        self.workers: dict[MemberId, FakeWorker] = {}
        self.encoders: dict[MemberId, FakeEncoder] = {}
        self.stages: dict[MemberId, FakeStage] = {}

    async def generate(self, worker_id: MemberId, request: GenerateRequest) -> GenerateResult:
        if worker_id not in self.workers:
            raise TargetGone(f"{worker_id} has left")
        return await self.workers[worker_id].generate(request)

    async def encode(self, encoder_id: MemberId, request: EncodeRequest, media: Sequence[MediumFile]) -> EncodeResult:
        if encoder_id not in self.encoders:
            raise TargetGone(f"{encoder_id} has left")
        return await self.encoders[encoder_id].encode(request, [file.data for file in media])

    async def run(self, member_id: MemberId, request: StageRequest) -> StageResult:
        if member_id not in self.stages:
            raise TargetGone(f"{member_id} has left")
        return await self.stages[member_id].run(request)


class FakeCluster:
    """Holds a router service and its members. A test may add and remove members; `publish` informs the router."""

    def __init__(
        self,
        num_workers: int,
        num_encoders: int,
        config: RouterConfig,
        family: Family,
        codec: TextCodec,
        registry: Registry,
        clock: Clock,
        fetcher: MediaFetcher | None = None,
    ) -> None:
        self.hub = LocalHub()
        self.codec = codec
        self.pools = FakePools()
        self.workers = [FakeWorker(self.hub, f"worker-{index}", self.codec) for index in range(num_workers)]
        self.encoders = [FakeEncoder(self.hub, f"encoder-{index}") for index in range(num_encoders)]
        self.pools.workers = {worker.member_id: worker for worker in self.workers}
        self.pools.encoders = {encoder.member_id: encoder for encoder in self.encoders}
        self.plane = LocalPlane(self.hub, "local://router")
        self.service = RouterService(
            MemberId("router-0"),
            config,
            PromptBuilder(config, family, self.codec, registry, NoProber(), fetcher),
            self.plane,
            Pools(self.pools, self.pools, self.pools),
            clock,
        )

    @property
    def members(self) -> list[Member]:
        pools = self.pools
        there: list[FakeWorker | FakeEncoder | FakeStage]
        there = [*pools.workers.values(), *pools.encoders.values(), *pools.stages.values()]
        return [each.member for each in there]

    def publish(self) -> None:
        self.service.update_members(self.members)

    def add_worker(self) -> FakeWorker:
        """Adds a worker with a new name and returns it. The router knows it after `publish`."""
        worker = FakeWorker(self.hub, f"worker-{len(self.workers)}", self.codec)
        worker.plane.start(worker.handle)
        self.workers.append(worker)
        self.pools.workers[worker.member_id] = worker
        return worker

    def add_encoder(self) -> FakeEncoder:
        """Adds an encoder with a new name and returns it. The router knows it after `publish`."""
        encoder = FakeEncoder(self.hub, f"encoder-{len(self.encoders)}")
        encoder.plane.start(encoder.handle)
        self.encoders.append(encoder)
        self.pools.encoders[encoder.member_id] = encoder
        return encoder

    def add_stage(self, stage_id: int, model_stage: str, is_last: bool) -> FakeStage:
        """Adds a replica of a stage behind the thinker with a new name and returns it. The router knows it after
        `publish`, and needs it if the config has `speech`."""
        name = f"{model_stage}-{len(self.pools.stages)}"
        stage = FakeStage(self.hub, name, stage_id, model_stage, is_last)
        stage.plane.start(stage.handle)
        self.pools.stages[stage.member_id] = stage
        return stage

    def remove(self, member: FakeWorker | FakeEncoder | FakeStage) -> None:
        """Removes a member. The router knows this after `publish`."""
        self.pools.stages.pop(member.member_id, None)
        self.pools.workers.pop(member.member_id, None)
        self.pools.encoders.pop(member.member_id, None)

    def mm_hashes(self) -> list[MmHash]:
        return [item.mm_hash for encoder in self.encoders for request in encoder.requests for item in request.items]


@asynccontextmanager
async def fake_cluster(
    num_workers: int = 1,
    num_encoders: int = 1,
    max_model_len: int = 2048,
    model: tuple[Family, TextCodec] | None = None,
    registry: Registry = REGISTRY,
    encoder_modalities: tuple[str, ...] = ("image",),
    clock: Clock | None = None,
    fetcher: MediaFetcher | None = None,
    **settings: Any,
) -> AsyncIterator[FakeCluster]:
    """Starts a cluster whose members the router knows, and asserts at the end that no request is in flight. `model`
    replaces the tiny family and codec, and `fetcher` fetches media by URL; `settings` are fields of RouterConfig."""
    waits = {"gap_timeout_s": 0.2, "settle_timeout_s": 0.2, "capacity_wait_s": 0.2}
    defaults: dict[str, Any] = {"block_size": BLOCK_SIZE, "heartbeat_s": 60.0, **waits}
    config = RouterConfig(model_name=TINY_MODEL, **(defaults | settings))
    family, codec = model or (TinyFamily(max_model_len), tiny_codec())
    clock = clock or SystemClock()
    cluster = FakeCluster(num_workers, num_encoders, config, family, codec, registry, clock, fetcher)
    for encoder in cluster.encoders:
        encoder.modalities = encoder_modalities
        encoder.plane.start(encoder.handle)
    for worker in cluster.workers:
        worker.plane.start(worker.handle)
    await cluster.service.start()
    cluster.publish()
    try:
        yield cluster
        assert cluster.service.admission.num_in_flight == 0
        assert cluster.service.admission.bodies_bytes == 0
    finally:
        await cluster.service.stop()
        workers, encoders = cluster.workers, cluster.encoders
        planes = [each.plane for each in workers] + [each.plane for each in encoders]
        planes += [each.plane for each in cluster.pools.stages.values()]
        for plane in (cluster.plane, *planes):
            plane.close()


async def settled(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Runs the event loop until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - a fake sets no event for this condition
            await asyncio.sleep(0)

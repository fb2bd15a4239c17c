"""Runs the whole cluster in one process and one event loop, for tests and for machines without Ray.

The services, the messages and the planner are the same as on Ray; only the transports differ (direct calls, and a
message plane and a feature channel inside the process).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from deploy import compose, speech_parts
from deploy.config import ClusterConfig
from deploy.http_server import check_port, router_server
from deploy.ranks import RankedWorker, WorkerEndpoint, open_worker, spawn_rank
from deploy.sizing import arena_bytes, inbox_bytes, refuse_if_too_small
from deploy.start_phases import LOADED, LOADING, MEASURING, LoadingTeller, TellPhase, tell_nobody
from deploy.tls import TlsFiles, check_tls
from deploy.worker_pools import worker_record
from fabric.contracts import (
    WEFT_KV,
    EncodeRequest,
    EncodeResult,
    GenerateRequest,
    GenerateResult,
    KvScheme,
    Member,
    MemberId,
    MemberStage,
    StageRequest,
    StageResult,
    TargetGone,
    as_member,
    mint_member_id,
)
from fabric.transport import (
    LocalChannelHub,
    LocalFeatureSink,
    LocalFeatureSource,
    LocalHub,
    LocalPlane,
    LocalStageConnector,
    LocalStageHub,
    StageConnector,
)
from modalities.loading_progress import watched_loading
from router.edge import create_app
from router.prompt import MediumFile
from router.run import Pools

if TYPE_CHECKING:
    from encoder_pool.encoder_service import EncoderService
    from llm_workers.stages import StageService
    from llm_workers.worker_service import WorkerService
    from router.service import RouterService


class DirectWorkers:
    """Implements `WorkerPool` by direct calls."""

    def __init__(self) -> None:
        self.services: dict[MemberId, WorkerService] = {}

    async def generate(self, worker_id: MemberId, request: GenerateRequest) -> GenerateResult:
        if worker_id not in self.services:
            raise TargetGone(f"the worker {worker_id} has left the cluster")
        with as_member(worker_id):
            return await self.services[worker_id].generate(request)


class DirectEncoders:
    """Implements `EncoderPool` by direct calls."""

    def __init__(self) -> None:
        self.services: dict[MemberId, EncoderService] = {}

    async def encode(self, encoder_id: MemberId, request: EncodeRequest, media: Sequence[MediumFile]) -> EncodeResult:
        if encoder_id not in self.services:
            raise TargetGone(f"the encoder {encoder_id} has left the cluster")
        with as_member(encoder_id):
            return await self.services[encoder_id].encode(request, [file.data for file in media])


class DirectStages:
    """Implements `StagePool` by direct calls."""

    def __init__(self) -> None:
        self.services: dict[MemberId, StageService] = {}

    async def run(self, member_id: MemberId, request: StageRequest) -> StageResult:
        if member_id not in self.services:
            raise TargetGone(f"the stage {member_id} has left the cluster")
        with as_member(member_id):
            return await self.services[member_id].run(request)


class LocalCluster:
    """Holds one router and the configured encoders and workers in this process. Use `running(...)` to start it."""

    def __init__(self, config: ClusterConfig, tell: TellPhase = tell_nobody) -> None:
        """`tell` gets the phases of the members while they start."""
        compose.prepare_process(config)
        config, self.model = compose.open_model(config, has_weights=True)
        self.config = config
        self._tell = tell
        refuse_if_too_small(config, self.model)
        self.workers, self.encoders, self.stages = DirectWorkers(), DirectEncoders(), DirectStages()
        self._members: list[Member] = []
        self._planes: list[LocalPlane] = []
        self.ranked_workers: list[RankedWorker] = []
        self._hub, self._channel, self._stage_hub = LocalHub(), LocalChannelHub(), LocalStageHub()
        self._connectors: list[StageConnector] = []
        for _ in range(config.encoders.first_replicas):
            member_id, plane = self._endpoint("encoder", config)
            tell("encoder", str(member_id), LOADING)
            source = LocalFeatureSource(self._channel, str(member_id), arena_bytes(config))
            with watched_loading(LoadingTeller(partial(tell, "encoder", str(member_id), LOADING))):
                self.encoders.services[member_id] = compose.build_encoder(config, self.model, member_id, plane, source)
            tell("encoder", str(member_id), LOADED)
        for own in config.by_pool():
            for _ in range(own.workers.first_replicas):
                self._add_worker(own)
        self._add_stages()
        member_id, plane = self._endpoint("router", config)
        self.router_id = member_id
        pools = Pools(self.workers, self.encoders, self.stages)
        self.router = compose.build_router(config, self.model, member_id, plane, pools)
        self.app = create_app(self.router)

    def _add_worker(self, config: ClusterConfig) -> None:
        """Builds a worker of the pool that the config describes."""
        member_id, plane = self._endpoint("worker", config)
        self._tell("worker", str(member_id), LOADING)
        sink = LocalFeatureSink(self._channel, str(member_id), inbox_bytes(config))
        endpoint = WorkerEndpoint(member_id, plane, sink, self._open_connectors())
        with watched_loading(LoadingTeller(partial(self._tell, "worker", str(member_id), LOADING))):
            worker = open_worker(config, self.model, endpoint, "127.0.0.1", spawn_rank)
        self.ranked_workers.append(worker)
        self.workers.services[member_id] = worker.service
        self._tell("worker", str(member_id), LOADED)

    def _add_stages(self) -> None:
        """Builds the replicas of the stages that speak."""
        for stage in () if self.config.stages is None else self.config.stages.later:
            for _ in range(stage.replicas):
                connectors = self._open_connectors()
                member_id, plane = self._endpoint("stage", self.config, speech_parts.member_stage(stage, connectors))
                self._tell("stage", str(member_id), LOADING)
                self.stages.services[member_id] = speech_parts.build_stage(
                    self.config, self.model.directory, stage, member_id, plane, connectors
                )
                self._tell("stage", str(member_id), LOADED)

    def _open_connectors(self) -> dict[str, StageConnector]:
        """Returns the connectors of one replica, which exist if the cluster speaks."""
        if self.config.stages is None:
            return {}
        connector = LocalStageConnector(self._stage_hub)
        self._connectors.append(connector)
        return {"local": connector}

    def _endpoint(
        self, kind: str, config: ClusterConfig, stage: MemberStage | None = None
    ) -> tuple[MemberId, LocalPlane]:
        member_id = mint_member_id(kind)
        plane = LocalPlane(self._hub, f"local://{member_id}")
        modalities = compose.loaded_modalities(config, self.model.family) if kind == "encoder" else ()
        host = f"{compose.host_name()}/in-process"
        scheme = KvScheme(WEFT_KV, config.workers.block_size) if kind == "worker" else None
        place = compose.member_place(config, kind)
        record = compose.member(kind, member_id, plane.address, host, modalities, scheme, place)
        if kind == "worker":
            record = worker_record(config, record)
        self._members.append(msgspec.structs.replace(record, stage=stage))
        self._planes.append(plane)
        return member_id, plane

    async def start(self) -> None:
        kinds: list[tuple[str, Mapping[MemberId, EncoderService | WorkerService | StageService | RouterService]]]
        kinds = [("encoder", self.encoders.services), ("worker", self.workers.services)]
        kinds += [("stage", self.stages.services), ("router", {self.router_id: self.router})]
        for kind, member_id, service in [(kind, *each) for kind, services in kinds for each in services.items()]:
            if kind != "router":
                self._tell(kind, str(member_id), MEASURING)
            with as_member(member_id):
                await service.start()
        for worker in self.ranked_workers:
            worker.end_when_lost(asyncio.get_running_loop())
        members: list[tuple[MemberId, EncoderService | WorkerService | StageService]]
        members = [*self.workers.services.items(), *self.encoders.services.items(), *self.stages.services.items()]
        for member_id, member in members:
            member.on_lost(partial(self._remove, member_id))
        self._tell_members()

    def _tell_members(self) -> None:
        services: list[EncoderService | WorkerService | StageService | RouterService]
        services = [*self.encoders.services.values(), *self.workers.services.values(), *self.stages.services.values()]
        for service in [*services, self.router]:
            service.update_members(self._members)

    def _remove(self, member_id: MemberId) -> None:
        """Removes a worker or an encoder that is lost. Nothing replaces it, because a replacement needs a process of
        its own."""
        self._members = [member for member in self._members if member.member_id != member_id]
        self._tell_members()

    async def stop(self) -> None:
        services: list[EncoderService | WorkerService | StageService | RouterService]
        services = [self.router, *self.workers.services.values(), *self.encoders.services.values()]
        for service in [*services, *self.stages.services.values()]:
            await service.stop()
        for worker in self.ranked_workers:
            await asyncio.to_thread(worker.stop_ranks)
        for connector in self._connectors:
            connector.close()
        for plane in self._planes:
            plane.close()


@contextlib.asynccontextmanager
async def running(config: ClusterConfig, tell: TellPhase = tell_nobody) -> AsyncIterator[LocalCluster]:
    """Yields a started local cluster without an HTTP socket; callers use `cluster.app` by ASGI or `cluster.router`
    directly."""
    cluster = LocalCluster(config, tell)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.stop()


@contextlib.asynccontextmanager
async def serving(config: ClusterConfig, tell: TellPhase = tell_nobody) -> AsyncIterator[tuple[LocalCluster, int]]:
    """Yields a started local cluster with its own HTTP server, and the port of that server. Raises ConfigError, before
    it loads models, if another program listens on the port of the config."""
    if config.server.port:
        check_port(config.server.host, config.server.port)
    if (tls := TlsFiles.of(config.server)) is not None:
        check_tls(tls)
    async with running(config, tell) as cluster:
        server = router_server(cluster.app, config)
        with as_member(cluster.router_id):
            await server.start()
        try:
            yield cluster, server.port
        finally:
            await cluster.router.drain(config.server.drain_s)
            await cluster.router.stop()
            await server.stop()

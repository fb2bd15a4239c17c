"""Defines the Serve application: deployments for routers, encoders and each pool of workers, each a thin shell around
one service, and one for each stage that speaks (`stage_replica`).

A shell (`EncoderReplica`, `WorkerReplica`, `RouterReplica`) builds the service in the replica's event loop, keeps its
heartbeat with the directory, and forwards calls, health checks and the stop to the service. Serve calls `reconfigure`
with the live values of the config after the constructor, and again when they change, and it calls `__del__` after
draining, so `__del__` stops the service. `build_app` connects the three. A worker with several ranks is rank 0 itself
and starts its other rank processes as Ray actors (`launch_actor`), in the placement group that its deployment asks for.

The module knows nothing of what a service, or a rank, computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy import compose
from deploy.config import ClusterConfig, EncoderSection, RouterSection
from deploy.feature_memory import encoder_memory, worker_memory
from deploy.http_server import router_server
from deploy.live_config import LiveConfig, live_values
from deploy.logs import configure_logs
from deploy.process_setup import allow_many_files, freeze_what_lives, keep_freed_memory
from deploy.ranks import WorkerEndpoint, open_worker, run_rank
from deploy.ray import replica_news
from deploy.ray.directory import Heartbeat, phase_teller, plane_keys, watch_scaling
from deploy.ray.nodes import actor_environment, this_node
from deploy.ray.ray_pools import NoEncoders, PinnedRequestRouter, RayEncoderPool, RayWorkerPool
from deploy.ray.replica_parts import change_levels, enter_cluster, find_member_place, member_metrics, replica_id
from deploy.ray.serve_scaling import load_stats, serve_autoscaling
from deploy.ray.stage_replica import RayStagePool, StageReplica, stage_options
from deploy.scaling import EncoderMeter, PoolShares, WorkerMeter
from deploy.sizing import inbox_bytes
from deploy.speech_parts import close_connectors, open_connectors, stage_name
from deploy.stages_config import StageSection
from deploy.start_phases import LOADING, MEASURING, LoadingTeller
from deploy.vllm_worker import open_vllm_sink, process_variables, worker_python
from deploy.worker_pools import ranks_per_replica, scaled_pools, worker_record
from deploy.workers_config import WorkerSection
from fabric.contracts import (
    EncodeRequest,
    EncodeResult,
    GenerateRequest,
    GenerateResult,
    Member,
    MemberId,
    enter_request,
)
from modalities.loading_progress import watched_loading
from router.observe import report_exposition

if TYPE_CHECKING:
    from fabric.transport import FeatureSink
    from llm_workers.tensor_parallel import Invitation, RankProcess


UNBOUNDED = 1_000_000
"""Turns Serve's limit on requests off. A full replica would queue inside Serve and block the calls behind it, so Weft
limits admission itself."""
THINKER_STAGE = 0
STOP_S = 15.0
"""Serve gives a replica this many seconds to stop, in addition to the time to drain."""
DRAIN_LOOK_S = 0.5
"""A replica that drains looks this often whether its calls have ended."""


def build_app(config: ClusterConfig, has_server: bool = True) -> Application:
    """Returns the application graph: router -> pools of workers, encoders. Without a server, no process owns the
    directory of the cluster, so the replicas create it."""
    bound_workers = {
        each.pool: _worker_deployment(config, each).bind(config, each.pool, has_server) for each in config.by_pool()
    }
    encoders = _deployment(EncoderReplica, "encoder", config, config.encoders)
    router = _deployment(RouterReplica, "router", config, config.router)
    bound_encoders = encoders.bind(config, has_server) if config.encoders.replicas else None
    stages = {} if config.stages is None else {each.stage_id: each for each in config.stages.later}
    bound_stages = {
        stage_id: _stage_deployment(config, stage).bind(config, stage_id, has_server)
        for stage_id, stage in stages.items()
    }
    return router.bind(config, has_server, bound_workers, bound_encoders, bound_stages)


def _worker_deployment(config: ClusterConfig, own: ClusterConfig) -> Any:
    """Returns the deployment of a pool of workers; `own` is the config as the pool sees it."""
    shares = PoolShares(own.pool, scaled_pools(config))
    workers = _deployment(WorkerReplica, own.pool_deployment, config, own.workers, shares)
    if own.workers.engine == "vllm":
        one_rank = _reserved(config, own.workers)
        return workers.options(ray_actor_options=one_rank | vllm_reservation(own, one_rank))
    if own.workers.tensor_parallel > 1:
        return workers.options(placement_group_bundles=rank_bundles(own), placement_group_strategy="PACK")
    return workers


def _stage_deployment(config: ClusterConfig, stage: StageSection) -> Any:
    options = stage_options(stage)
    return _served(StageReplica, stage_name(stage), config, {"num_replicas": stage.replicas}, options, 1)


def _deployment(
    replica: type,
    name: str,
    config: ClusterConfig,
    section: RouterSection | EncoderSection | WorkerSection,
    shares: PoolShares | None = None,
) -> Any:
    rules = None if isinstance(section, RouterSection) else section.autoscaling.rules
    size: dict[str, Any] = {"num_replicas": max(section.replicas, 1)}
    if rules is not None:
        size = {"autoscaling_config": serve_autoscaling(rules, name, config.ray.cluster_name, shares)}
    # An encoder first finishes its calls, and then waits until workers have read what it holds for them.
    num_drains = 2 if isinstance(section, EncoderSection) else 1
    return _served(replica, name, config, size, _reserved(config, section), num_drains)


def _reserved(config: ClusterConfig, section: RouterSection | EncoderSection | WorkerSection) -> dict[str, Any]:
    """Returns what Ray reserves for a replica, or for one rank of it, and the environment in which it runs."""
    return {
        "num_cpus": section.cpus_per_replica,
        "num_gpus": 0 if isinstance(section, RouterSection) else section.gpus_per_replica,
        "resources": dict(section.ray_resources),
        "runtime_env": actor_environment(config),
    }


def vllm_reservation(config: ClusterConfig, one_rank: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what Ray reserves for a worker with vLLM, and where it runs. vLLM starts the ranks as processes of its
    own, so the replica has the GPUs of all ranks, on one node. `one_rank` says what one rank takes."""
    num_ranks = ranks_per_replica(config)
    environment = dict(one_rank["runtime_env"])
    environment["env_vars"] = dict(environment.get("env_vars", {})) | dict(process_variables(config))
    environment["py_executable"] = str(worker_python(config))
    return {
        "num_cpus": one_rank["num_cpus"] * num_ranks,
        "num_gpus": one_rank["num_gpus"] * num_ranks,
        "resources": {name: amount * num_ranks for name, amount in one_rank["resources"].items()},
        "runtime_env": environment,
    }


def _served(
    replica: type,
    name: str,
    config: ClusterConfig,
    size: dict[str, Any],
    reserved: dict[str, Any],
    num_drains: int,
) -> Any:
    """Returns a deployment. `size` says how many replicas it has, `reserved` what Ray reserves for each, and
    `num_drains` how often a replica may take the time to drain before it stops."""
    return serve.deployment(
        replica,
        name=name,
        **size,
        user_config=live_values(config),
        max_ongoing_requests=UNBOUNDED,
        graceful_shutdown_timeout_s=num_drains * config.server.drain_s + STOP_S,
        graceful_shutdown_wait_loop_s=DRAIN_LOOK_S,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        ray_actor_options={"runtime_env": actor_environment(config)} | reserved,
        request_router_config=RequestRouterConfig(request_router_class=PinnedRequestRouter),
    )


# ------------------------------------------------------------ replicas


class EncoderReplica:
    """Runs one encoder process on one device."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ClusterConfig, has_server: bool
    ) -> None:
        from fabric.transport import NixlFeatureSource, ZmqPlane

        member_id = replica_id()
        configure_logs(config.logging, f"encoder-{member_id}", member_id)
        await enter_cluster(config, has_server)
        self._has_server = has_server
        self._live = LiveConfig(config)
        node = this_node(config)
        compose.prepare_process(config)
        model = compose.load_model(config, await asyncio.to_thread(compose.resolve_model_dir, config))
        keys = await plane_keys(config.ray.cluster_name)
        self._plane = ZmqPlane(keys, node.address, compose.port_range(config))
        memory = await asyncio.to_thread(encoder_memory, config)
        self._source = NixlFeatureSource(str(member_id), memory.nbytes, make_memory=memory.make, spill=memory.beside)
        tell = phase_teller(config.ray.cluster_name)
        tell("encoder", str(member_id), LOADING)
        with watched_loading(LoadingTeller(partial(tell, "encoder", str(member_id), LOADING))):
            self._service = compose.build_encoder(config, model, member_id, self._plane, self._source)
        modalities = compose.loaded_modalities(config, model.family)
        place = await find_member_place(config, "encoder")
        record = compose.member("encoder", member_id, self._plane.address, node.address, modalities, place=place)
        tell("encoder", str(member_id), MEASURING)
        await self._service.start()
        self._metrics = member_metrics(
            config, member_id, node.address, lambda: report_exposition(self._service.report())
        )
        record = msgspec.structs.replace(record, http_address=await self._metrics.start())
        self._heartbeat = Heartbeat(config.ray.cluster_name, record, self._take_members)
        await self._heartbeat.start()
        self._service.on_lost(self._leave)
        self._meter = EncoderMeter(config.encoders.autoscaling.queue_limit_s)
        self._drain_s = config.server.drain_s
        freeze_what_lives()

    def _take_members(self, members: Sequence[Member]) -> None:
        self._service.update_members(members)
        self._metrics.update_members(members)

    def _leave(self) -> None:
        """Leaves the directory at once. Serve replaces the replica after its health checks have failed."""
        self._leaving = asyncio.create_task(self._heartbeat.stop(), name="weft-leave")

    async def reconfigure(self, values: dict[str, Any]) -> None:
        self._live.change(values, change_levels)
        self._heartbeat.note_config_flaw(self._live.flaw)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the encoder's load; Serve asks for it if the encoders are scaled."""
        return load_stats(self._meter.load(self._service.report()))

    async def encode(self, request: EncodeRequest, *media: bytes) -> EncodeResult:
        enter_request(request.request_id)
        return await self._service.encode(request, media)

    async def check_health(self) -> None:
        self._service.check_health()
        if not self._has_server:
            self._heartbeat.check()

    async def __del__(self) -> None:
        await self._service.drain(self._drain_s)
        await self._heartbeat.stop()
        await self._service.stop()
        await self._metrics.stop()
        self._plane.close()
        self._source.close()


class WorkerReplica:
    """Runs one LLM worker of a pool: a process on a device, or with `tensor_parallel` rank 0 of several ranks. Rank 0
    starts the others itself."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ClusterConfig, pool: str, has_server: bool
    ) -> None:
        from fabric.transport import ZmqPlane

        member_id = replica_id()
        configure_logs(config.logging, f"worker-{member_id}", member_id)
        await enter_cluster(config, has_server)
        self._has_server = has_server
        self._live = LiveConfig(config)
        config = config.of_pool(pool)
        node = this_node(config)
        compose.prepare_process(config)
        model = compose.load_model(config, await asyncio.to_thread(compose.resolve_model_dir, config))
        keys = await plane_keys(config.ray.cluster_name)
        self._plane = ZmqPlane(keys, node.address, compose.port_range(config))
        self._sink = await asyncio.to_thread(open_sink, config, member_id)
        self._connectors = await asyncio.to_thread(open_connectors, config, THINKER_STAGE)
        endpoint = WorkerEndpoint(member_id, self._plane, self._sink, self._connectors)
        tell = phase_teller(config.ray.cluster_name)
        tell("worker", str(member_id), LOADING)
        with watched_loading(LoadingTeller(partial(tell, "worker", str(member_id), LOADING))):
            self._worker = await asyncio.to_thread(open_worker, config, model, endpoint, node.address, launch_actor)
        self._service = self._worker.service
        scheme, place = self._service.kv_scheme, await find_member_place(config, "worker")
        record = compose.member("worker", member_id, self._plane.address, node.address, kv_scheme=scheme, place=place)
        record = worker_record(config, record)
        tell("worker", str(member_id), MEASURING)
        await self._service.start()
        self._worker.end_when_lost(asyncio.get_running_loop())
        self._metrics = member_metrics(
            config, member_id, node.address, lambda: report_exposition(self._service.report())
        )
        record = msgspec.structs.replace(record, http_address=await self._metrics.start())
        self._heartbeat = Heartbeat(config.ray.cluster_name, record, self._take_members)
        await self._heartbeat.start()
        self._service.on_lost(self._leave)
        self._meter = WorkerMeter(config.workers.slo_tpot_s)
        freeze_what_lives()

    def _take_members(self, members: Sequence[Member]) -> None:
        self._service.update_members(members)
        self._metrics.update_members(members)

    def _leave(self) -> None:
        """Leaves the directory at once. Serve replaces the replica after its health checks have failed."""
        self._leaving = asyncio.create_task(self._heartbeat.stop(), name="weft-leave")

    async def reconfigure(self, values: dict[str, Any]) -> None:
        self._live.change(values, change_levels)
        self._heartbeat.note_config_flaw(self._live.flaw)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the worker's load; Serve asks for it if the workers are scaled."""
        return load_stats(self._meter.load(self._service.report()))

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        enter_request(request.request_id)
        return await self._service.generate(request)

    async def check_health(self) -> None:
        self._service.check_health()
        if not self._has_server:
            self._heartbeat.check()

    async def __del__(self) -> None:
        await self._heartbeat.stop()
        await self._service.stop()
        await asyncio.to_thread(self._worker.stop_ranks)
        await self._metrics.stop()
        self._plane.close()
        self._sink.close()
        await asyncio.to_thread(close_connectors, self._connectors)


class RouterReplica:
    """Runs the HTTP front end and the planner. It holds no model weights."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: ClusterConfig,
        has_server: bool,
        workers: dict[str, DeploymentHandle],
        encoders: DeploymentHandle | None,
        stages: dict[int, DeploymentHandle],
    ) -> None:
        from fabric.transport import ZmqPlane
        from router.edge import create_app
        from router.run import Pools

        member_id = replica_id()
        configure_logs(config.logging, f"router-{member_id}", member_id)
        await enter_cluster(config, has_server)
        self._has_server = has_server
        self._live = LiveConfig(config)
        allow_many_files()
        keep_freed_memory()
        self._node = this_node(config)
        directory = await asyncio.to_thread(compose.resolve_model_dir, config, has_weights=False)
        self._model = model = compose.load_model(config, directory)
        keys = await plane_keys(config.ray.cluster_name)
        self._plane = ZmqPlane(keys, self._node.address, compose.port_range(config))
        encoder_pool = RayEncoderPool(encoders) if encoders else NoEncoders()
        self._worker_pool = RayWorkerPool(workers)
        pools = Pools(self._worker_pool, encoder_pool, RayStagePool(stages) if stages else None)
        self._service = compose.build_router(config, model, member_id, self._plane, pools)
        record = compose.member("router", member_id, self._plane.address, self._node.address)
        await self._service.start()
        self._metrics = member_metrics(config, member_id, self._node.address, self._service.own_exposition)
        record = msgspec.structs.replace(record, http_address=await self._metrics.start())
        self._heartbeat = Heartbeat(config.ray.cluster_name, record, self._take_members)
        await self._heartbeat.start()
        self._drain_s = config.server.drain_s
        self._follow_replicas(config)
        self._http = router_server(create_app(self._service), config)

    async def reconfigure(self, values: dict[str, Any]) -> None:
        """Takes the live values of the config. The first time it also opens the port, so no request meets other limits
        or keys than these."""
        is_first = not self._live.is_set
        self._live.change(values, self._take)
        self._heartbeat.note_config_flaw(self._live.flaw)
        if is_first:
            await self._http.start()
            freeze_what_lives()

    def _take(self, before: ClusterConfig, config: ClusterConfig) -> None:
        self._service.reconfigure(compose.router_config(config, self._model))
        change_levels(before, config)

    def _take_members(self, members: Sequence[Member]) -> None:
        self._worker_pool.update_members(members)
        self._service.update_members(members)
        self._metrics.update_members(members)

    def _follow_replicas(self, config: ClusterConfig) -> None:
        """Has the service learn which replicas are being stopped, and the decisions about the sizes of the pools."""
        loop = asyncio.get_running_loop()

        def tell(gone: frozenset[str]) -> None:
            loop.call_soon_threadsafe(self._service.update_leaving, [MemberId(name) for name in gone])

        self._stop_following = replica_news.subscribe(tell)
        self._watch: asyncio.Task[None] | None = None
        rules = [config.encoders.autoscaling.rules, *(each.autoscaling.rules for each in config.all_workers)]
        if any(rules):
            service = self._service
            watch = watch_scaling(config.ray.cluster_name, replica_id(), service.waiting_work, service.take_scaling)
            self._watch = asyncio.create_task(watch, name="weft-scaling")

    async def endpoint(self) -> tuple[str, int]:
        """Returns the address of the router's node, and the port that the router listens on (the config may ask for any
        free one)."""
        return self._node.address, self._http.port

    async def is_ready(self) -> bool:
        """Returns whether requests can be served."""
        return self._service.readiness()[0]

    async def drain(self, limit_s: float) -> int:
        """Refuses new requests from now on, and waits until those in flight have ended. Returns how many have not ended
        after `limit_s`."""
        num_left = await self._service.drain(min(limit_s, self._drain_s))
        self._drain_s = 0.0  # The time to drain is used up.
        return num_left

    async def check_health(self) -> None:
        self._service.check_health()
        if not self._has_server:
            self._heartbeat.check()

    async def __del__(self) -> None:
        await self._service.drain(self._drain_s)
        self._stop_following()
        if self._watch is not None:
            self._watch.cancel()
        await self._service.stop()
        await self._http.stop()
        await self._metrics.stop()
        await self._heartbeat.stop()
        self._plane.close()


# ------------------------------------------------------------ ranks of a worker

_CPU_SHARE = 0.001
"""Each bundle asks for this share of a CPU, because a bundle must ask for some resource and Weft's replicas ask for no
CPU."""


def open_sink(config: ClusterConfig, member_id: MemberId) -> FeatureSink:
    """Returns what pulls the features of a worker."""
    from fabric.transport import NixlFeatureSink

    if config.workers.engine == "vllm":
        return open_vllm_sink(config, inbox_bytes(config))
    memory = worker_memory(config)
    return NixlFeatureSink(str(member_id), memory.nbytes, make_memory=memory.make, staging=memory.beside)


def rank_bundles(config: ClusterConfig) -> list[dict[str, float]]:
    """Returns one bundle of resources per rank; the first is for rank 0, the replica itself."""
    section = config.workers
    bundle = {"CPU": section.cpus_per_replica or _CPU_SHARE} | section.ray_resources
    if section.gpus_per_replica:
        bundle["GPU"] = section.gpus_per_replica
    return [dict(bundle) for _ in range(config.workers.tensor_parallel)]


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class RankActor:
    """Runs one rank process. The actor ends with the replica that created it, because Ray ends an actor together with
    its owner."""

    def run(self, config: ClusterConfig, invitation: Invitation) -> None:
        this_node(config)  # gloo and NCCL use the interface of this node's address.
        run_rank(config, compose.resolve_model_dir(config), invitation)


class RayRank:
    """A `RayRank` is a `RankProcess` that runs as a Ray actor."""

    def __init__(self, actor: Any, running: Any) -> None:
        self._actor, self._running = actor, running

    def is_alive(self) -> bool:
        done, _ = ray.wait([self._running], timeout=0)
        return not done

    def end(self) -> None:
        ray.kill(self._actor)


def launch_actor(config: ClusterConfig, _: Path, invitation: Invitation) -> RankProcess:
    """Starts a rank process in the bundle of its rank, on whose node it finds the model itself. It must run in the
    replica's process."""
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=ray.util.get_current_placement_group(), placement_group_bundle_index=invitation.rank
    )
    section = config.workers
    actor = RankActor.options(  # type: ignore[attr-defined]  # added by ray.remote
        scheduling_strategy=strategy,
        num_cpus=section.cpus_per_replica,
        num_gpus=section.gpus_per_replica,
        resources=dict(section.ray_resources),
    ).remote()
    return RayRank(actor, actor.run.remote(config, invitation))

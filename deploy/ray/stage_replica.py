"""Defines the Serve deployments of the stages that speak: a thin shell around one `StageService`.

Each stage behind the thinker has a deployment of its own, named after what it computes, with its replicas, placement
and draining. The module knows nothing of what a stage computes; `serve_app` connects the deployments with the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from ray.serve.handle import DeploymentHandle

from deploy import compose, speech_parts
from deploy.config import ClusterConfig
from deploy.live_config import LiveConfig
from deploy.logs import configure_logs
from deploy.process_setup import freeze_what_lives
from deploy.ray.directory import Heartbeat, phase_teller, plane_keys
from deploy.ray.nodes import this_node
from deploy.ray.ray_pools import call_pinned
from deploy.ray.replica_parts import change_levels, enter_cluster, find_member_place, member_metrics, replica_id
from deploy.stages_config import StageSection
from deploy.start_phases import LOADING, MEASURING, LoadingTeller
from fabric.contracts import Member, MemberId, NoCapacity, StageRequest, StageResult, WorkerLost, enter_request
from modalities.loading_progress import watched_loading
from router.observe import report_exposition


class StageReplica:
    """Runs one replica of a stage behind the thinker, on one device."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ClusterConfig, stage_id: int, has_server: bool
    ) -> None:
        from fabric.transport import ZmqPlane

        assert config.stages is not None
        stage = config.stages.stage_args[stage_id]
        name, member_id = speech_parts.stage_name(stage), replica_id()
        configure_logs(config.logging, f"{name}-{member_id}", member_id)
        await enter_cluster(config, has_server)
        self._has_server = has_server
        self._live = LiveConfig(config)
        node = this_node(config)
        compose.prepare_process(config)
        model_dir = await asyncio.to_thread(compose.resolve_model_dir, config)
        keys = await plane_keys(config.ray.cluster_name)
        self._plane = ZmqPlane(keys, node.address, compose.port_range(config))
        self._connectors = await asyncio.to_thread(speech_parts.open_connectors, config, stage_id)
        tell = phase_teller(config.ray.cluster_name)
        tell("stage", str(member_id), LOADING)
        with watched_loading(LoadingTeller(partial(tell, "stage", str(member_id), LOADING))):
            self._service = speech_parts.build_stage(config, model_dir, stage, member_id, self._plane, self._connectors)
        place = await find_member_place(config, "stage")
        record = compose.member("stage", member_id, self._plane.address, node.address, place=place)
        tell("stage", str(member_id), MEASURING)
        await self._service.start()
        self._metrics = member_metrics(
            config, member_id, node.address, lambda: report_exposition(self._service.report())
        )
        record = msgspec.structs.replace(
            record,
            http_address=await self._metrics.start(),
            stage=speech_parts.member_stage(stage, self._connectors),
        )
        self._heartbeat = Heartbeat(config.ray.cluster_name, record, self._take_members)
        await self._heartbeat.start()
        self._service.on_lost(self._leave)
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

    async def run(self, request: StageRequest) -> StageResult:
        enter_request(request.request_id)
        return await self._service.run(request)

    async def check_health(self) -> None:
        self._service.check_health()
        if not self._has_server:
            self._heartbeat.check()

    async def __del__(self) -> None:
        await self._heartbeat.stop()
        await self._service.stop()
        await self._metrics.stop()
        self._plane.close()
        await asyncio.to_thread(speech_parts.close_connectors, self._connectors)


class RayStagePool:
    """Implements `StagePool` with the handles of the stages' deployments."""

    def __init__(self, stage_to_handle: Mapping[int, DeploymentHandle]) -> None:
        self._stage_to_run = {stage_id: handle.run for stage_id, handle in stage_to_handle.items()}

    async def run(self, member_id: MemberId, request: StageRequest) -> StageResult:
        run = self._stage_to_run.get(request.stage_id)
        if run is None:
            raise NoCapacity(f"this cluster has no stage {request.stage_id}")
        result: StageResult = await call_pinned(run, member_id, WorkerLost, request)
        return result


def stage_options(stage: StageSection) -> dict[str, Any]:
    """Returns what Ray reserves for each replica of a stage."""
    return {
        "num_cpus": stage.cpus_per_replica,
        "num_gpus": stage.gpus_per_replica,
        "resources": dict(stage.ray_resources),
    }

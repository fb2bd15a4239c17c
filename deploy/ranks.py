"""A worker and its ranks: rank 0's service with the group behind it, and what a follower's process runs.

Where followers run is the caller's: processes of this machine here, actors in `serving/followers.py`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deploy import compose
from deploy.allocator import freeze_what_lives
from deploy.config import ClusterConfig
from deploy.environment import keep_ranks_on_loopback, use_cuda_device
from deploy.logs import configure_logs
from fabric.channel import FeatureSink
from fabric.errors import ConfigError, WorkerLost
from fabric.ids import MemberId
from fabric.plane import Plane
from llm_workers.tensor_parallel.invitation import Invitation

if TYPE_CHECKING:
    from llm_workers.service import WorkerService
    from llm_workers.tensor_parallel.follower import Share
    from llm_workers.tensor_parallel.group import Follower, RankGroup

    LaunchFollower = Callable[[ClusterConfig, Path, Invitation], Follower]

START_TIMEOUT_S = 600.0
"""For every rank to load its share."""


class Endpoint(NamedTuple):
    """A worker's place among the members."""

    member_id: MemberId
    plane: Plane
    sink: FeatureSink


class RankedWorker(NamedTuple):
    """A service, and the ranks that it computes with if it has others than its own."""

    service: WorkerService
    group: RankGroup | None

    def end_when_lost(self, loop: asyncio.AbstractEventLoop) -> None:
        """When a rank is gone the service is lost and stops: its calls end as WorkerLost, its health check fails."""
        if self.group is not None:
            self.group.on_lost(lambda: asyncio.run_coroutine_threadsafe(self._end_lost(), loop))

    async def _end_lost(self) -> None:
        self.service.lose(WorkerLost("a rank of the worker is gone"))
        await self.service.stop()

    def stop_ranks(self) -> None:
        """After the service has stopped. Blocks for a few seconds at most."""
        if self.group is not None:
            self.group.stop()


def open_worker(
    config: ClusterConfig, model: compose.Model, endpoint: Endpoint, host: str, launch: LaunchFollower
) -> RankedWorker:
    """Loads the weights, on every rank its share. Blocks until all are ready. Raises ConfigError, WorkerLost."""
    from llm_workers.tensor_parallel.group import RankGroup
    from llm_workers.tensor_parallel.model import ParallelLanguageModel
    from modalities.sharding import shard_weights

    section = config.workers
    if section.tensor_parallel == 1:
        return RankedWorker(compose.build_worker(config, model, *endpoint), None)
    group = RankGroup(host, section.tensor_parallel, section.device, section.step_timeout_s, START_TIMEOUT_S)

    def load() -> WorkerService:
        with shard_weights(section.tensor_parallel):
            return compose.build_worker(
                config, model, *endpoint, wrap=lambda share: ParallelLanguageModel(share, group)
            )

    return RankedWorker(group.open(lambda invitation: launch(config, model.directory, invitation), load), group)


def run_follower(config: ClusterConfig, model_dir: Path, invitation: Invitation) -> None:
    """A follower's process, from its start until the group ends."""
    from llm_workers.tensor_parallel.follower import follow

    configure_logs(config.logging, f"rank-{invitation.rank}-{os.getpid()}")
    compose.prepare_process(config)

    def load() -> Share:
        share = load_share(config, compose.load_model(config, model_dir))
        freeze_what_lives()
        return share

    follow(invitation, load)


def load_share(config: ClusterConfig, model: compose.Model) -> Share:
    """A follower's weights and pages: the same numbers as rank 0's."""
    from llm_workers.attention import select_backend
    from llm_workers.paged_kv import PagedKV
    from llm_workers.tensor_parallel.follower import Share
    from llm_workers.tensor_parallel.shares import kv_heads
    from modalities.sharding import shard_weights

    told, shape = compose.worker_config(config), model.family.shape
    with shard_weights(told.num_ranks):
        share = compose.load_language_model(config, model)
    heads = kv_heads(shape, told.num_ranks)
    kv = PagedKV(shape.num_layers, told.num_blocks, told.block_size, heads, share.dtype, share.device)
    return Share(share, kv, select_backend("auto", kv))


# ---------------------------------------------------------------- followers as processes of this machine


class SpawnedFollower:
    """A `Follower`."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def spawn_follower(config: ClusterConfig, model_dir: Path, invitation: Invitation) -> Follower:
    """A fresh process: forking one that has threads and sockets would not be safe."""
    if config.workers.replicas > 1:
        raise ConfigError("one process can hold rank 0 of one worker only: set workers.replicas to 1, or use Ray")
    keep_ranks_on_loopback()
    process = multiprocessing.get_context("spawn").Process(
        target=_run_spawned, args=(config, model_dir, invitation), name=f"weft-rank-{invitation.rank}", daemon=True
    )
    process.start()
    return SpawnedFollower(process)


def _run_spawned(config: ClusterConfig, model_dir: Path, invitation: Invitation) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 stops us, whoever else was interrupted
    if invitation.device == "cuda":
        use_cuda_device(invitation.rank)
    run_follower(config, model_dir, invitation)

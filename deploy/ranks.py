"""Builds a worker and its ranks, the processes that share one model. Rank 0 holds the service and the group of the
ranks; each other rank has a process of its own, and the module contains what this process runs.

The caller decides where rank processes run: this module starts them on this machine, and
`deploy/ray/serve_app.py` starts them as Ray actors.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deploy import compose
from deploy.config import ClusterConfig
from deploy.logs import configure_logs
from deploy.process_setup import freeze_what_lives, keep_ranks_on_loopback, use_cuda_device
from deploy.vllm_worker import build_vllm_worker
from fabric.contracts import ConfigError, MemberId, WorkerLost
from fabric.transport import FeatureSink, Plane, StageConnector

if TYPE_CHECKING:
    from llm_workers.tensor_parallel import Invitation, RankGroup, RankProcess, Share
    from llm_workers.worker_service import WorkerService

    LaunchRank = Callable[[ClusterConfig, Path, Invitation], RankProcess]


class WorkerEndpoint(NamedTuple):
    """Holds a worker's place among the members: its id, its endpoint of the message plane, its sink for features, and
    its connectors to the next stage."""

    member_id: MemberId
    plane: Plane
    sink: FeatureSink
    connectors: Mapping[str, StageConnector] = {}
    """Holds the ways to the stages that speak; there are none in a cluster that answers in text alone."""


class RankedWorker(NamedTuple):
    """Holds a worker's service, and the group of ranks that it computes with; `group` is None if rank 0 is the only
    rank."""

    service: WorkerService
    group: RankGroup | None

    def end_when_lost(self, loop: asyncio.AbstractEventLoop) -> None:
        """Makes the service stop as lost when a rank is gone: its calls then end with WorkerLost, and its health check
        fails."""
        if self.group is not None:
            self.group.on_lost(lambda: asyncio.run_coroutine_threadsafe(self._end_lost(), loop))

    async def _end_lost(self) -> None:
        self.service.lose(WorkerLost("a rank process of the worker has ended"))
        await self.service.stop()

    def stop_ranks(self) -> None:
        """Stops the other ranks; call it after the service has stopped. Blocks for a few seconds at most."""
        if self.group is not None:
            self.group.stop()


def open_worker(
    config: ClusterConfig, model: compose.Model, endpoint: WorkerEndpoint, host: str, launch: LaunchRank
) -> RankedWorker:
    """Loads the weights, on each rank its share, and returns the worker. Blocks until all ranks are ready. Raises
    ConfigError or WorkerLost."""
    from llm_workers.tensor_parallel import START_TIMEOUT_S, ParallelLanguageModel, RankGroup
    from modalities.checkpoint_tensors import shard_weights

    section = config.workers
    if section.engine == "vllm":  # It starts its ranks itself.
        return RankedWorker(build_vllm_worker(config, model, endpoint.member_id, endpoint.plane, endpoint.sink), None)
    if section.tensor_parallel == 1:
        return RankedWorker(compose.build_worker(config, model, *endpoint), None)
    ports = compose.port_range(config)
    group = RankGroup(host, section.tensor_parallel, section.device, section.step_timeout_s, START_TIMEOUT_S, ports)

    def load() -> WorkerService:
        with shard_weights(section.tensor_parallel):
            return compose.build_worker(
                config, model, *endpoint, wrap=lambda share: ParallelLanguageModel(share, group)
            )

    return RankedWorker(group.open(lambda invitation: launch(config, model.directory, invitation), load), group)


def run_rank(config: ClusterConfig, model_dir: Path, invitation: Invitation) -> None:
    """Runs a rank process in this process until the group ends."""
    from llm_workers.tensor_parallel import follow

    configure_logs(config.logging, f"rank-{invitation.rank}-{os.getpid()}")
    compose.prepare_process(config)

    def load() -> Share:
        share = load_share(config, compose.load_model(config, model_dir))
        freeze_what_lives()
        return share

    follow(invitation, load)


def load_share(config: ClusterConfig, model: compose.Model) -> Share:
    """Loads a rank process's share: its part of the weights, and KV pages in the same number as on rank 0."""
    from llm_workers.compute import PagedKV, select_backend
    from llm_workers.own_engine import with_fitted_blocks
    from llm_workers.scheduling import kv_heads
    from llm_workers.tensor_parallel import Share
    from modalities.checkpoint_tensors import shard_weights

    worker, shape = compose.worker_config(config), model.family.shape
    with shard_weights(worker.num_ranks):
        share = compose.load_language_model(config, model)
    worker = with_fitted_blocks(worker, model.family, share)
    heads = kv_heads(shape, worker.num_ranks)
    kv = PagedKV(shape.num_layers, worker.num_blocks, worker.block_size, heads, share.dtype, share.device)
    return Share(share, kv, select_backend("auto", kv))


# ---------------------------------------------------------------- rank processes on this machine


class SpawnedRank:
    """A `SpawnedRank` is a `RankProcess` that runs in a process of this machine."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def spawn_rank(config: ClusterConfig, model_dir: Path, invitation: Invitation) -> RankProcess:
    """Starts a rank process in a fresh process, because it is not safe to fork a process that has threads and sockets.
    Raises ConfigError if the config asks for several workers."""
    message = "one process can hold rank 0 of one worker only"
    if config.more_workers:
        raise ConfigError(f"more_workers has a pool, but {message}; serve without --in-process")
    if config.workers.first_replicas > 1:
        message += "; set it to 1, or serve without --in-process"
        raise ConfigError(f"workers.replicas is {config.workers.first_replicas}, but {message}")
    keep_ranks_on_loopback()
    process = multiprocessing.get_context("spawn").Process(
        target=_run_spawned, args=(config, model_dir, invitation), name=f"weft-rank-{invitation.rank}", daemon=True
    )
    process.start()
    return SpawnedRank(process)


def _run_spawned(config: ClusterConfig, model_dir: Path, invitation: Invitation) -> None:
    # This process ignores interrupts, because rank 0 stops it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if invitation.device == "cuda":
        use_cuda_device(invitation.rank)
    run_rank(config, model_dir, invitation)

"""Starts rank processes for tests as forks of one process that has imported torch and transformers. A fresh process
takes seconds of processor time for these imports, and a fork takes none.

The module knows nothing of what a rank computes.
"""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from deploy.config import ClusterConfig
from deploy.ranks import SpawnedRank, _run_spawned
from llm_workers.tensor_parallel import Invitation, RankProcess, smallest_of_ranks
from llm_workers.tensor_parallel.process_group import process_group

if TYPE_CHECKING:
    from deploy.ranks import LaunchRank

IMPORTS = (
    "deploy.ranks",
    "llm_workers.compute",
    "llm_workers.tensor_parallel",
    "modalities.checkpoint_tensors",
    "modalities.families.causal_lm.language_model",
    "transformers.modeling_utils",
)
"""The process that is forked imports these modules. It starts no thread, so it is safe to fork it."""


def smallest_in_forks(numbers: Sequence[int]) -> list[int]:
    """Returns what `smallest_of_ranks` returns in each of as many processes as there are numbers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTS))
    door, store = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    ports = (door.getsockname()[1], store.getsockname()[1])
    door.close()
    store.close()
    answers = context.SimpleQueue()
    processes = [
        context.Process(target=_ask, args=(rank, len(numbers), ports, number, answers), daemon=True)
        for rank, number in enumerate(numbers)
    ]
    for process in processes:
        process.start()
    found = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    return found


def _ask(rank: int, num_ranks: int, ports: tuple[int, int], number: int, answers: Any) -> None:
    invitation = Invitation(rank, num_ranks, "127.0.0.1", *ports, b"", "cpu", 60.0, 60.0)
    store = dist.TCPStore("127.0.0.1", ports[1], num_ranks, is_master=rank == 0, wait_for_workers=False)
    with process_group(invitation, store):
        answers.put(smallest_of_ranks(number, 60.0))


@contextmanager
def rank_forks() -> Iterator[LaunchRank]:
    """Yields a function that does what `deploy.ranks.spawn_rank` does, with a fork. At its end it stops the process
    that is forked, and removes its folder, which multiprocessing would keep until this process ends."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTS))

    def fork_rank(config: ClusterConfig, model_dir: Path, invitation: Invitation) -> RankProcess:
        process = context.Process(target=_run_spawned, args=(config, model_dir, invitation), daemon=True)
        process.start()
        return SpawnedRank(process)

    try:
        yield fork_rank
    finally:
        forkserver._forkserver._stop()
        for finalizer in list(util._finalizer_registry.values()):
            if finalizer._callback is util._remove_temp_dir:
                finalizer()

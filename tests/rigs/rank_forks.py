"""Starts rank processes for tests as forks of one process that has imported torch and transformers. A fresh process
takes seconds of processor time for these imports, and a fork takes none.

The module knows nothing of what a rank computes.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, util
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.config import ClusterConfig
from deploy.ranks import SpawnedRank, _run_spawned
from llm_workers.tensor_parallel import Invitation, RankProcess

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

"""Starts a worker's rank processes (for its ranks other than rank 0) as Ray actors, in the placement group of the
replica that is rank 0. It knows nothing of what a rank computes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.config import ClusterConfig
from deploy.ranks import run_rank
from llm_workers.tensor_parallel.invitation import Invitation

if TYPE_CHECKING:
    from llm_workers.tensor_parallel.group import RankProcess

_CPU_SHARE = 0.001
"""Each bundle asks for this share of a CPU, because a bundle must ask for some resource and Weft's replicas ask for no
CPU."""


def rank_bundles(config: ClusterConfig) -> list[dict[str, float]]:
    """Returns one bundle of resources per rank; the first is for rank 0, the replica itself."""
    bundle = {"CPU": _CPU_SHARE}
    if config.workers.gpus_per_replica:
        bundle["GPU"] = config.workers.gpus_per_replica
    return [dict(bundle) for _ in range(config.workers.tensor_parallel)]


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class RankActor:
    """Runs one rank process. The actor ends with the replica that created it, because Ray ends an actor together with
    its owner."""

    def run(self, config: ClusterConfig, model_dir: Path, invitation: Invitation) -> None:
        run_rank(config, model_dir, invitation)


class RayRank:
    """A `RayRank` is a `RankProcess` that runs as a Ray actor."""

    def __init__(self, actor: Any, running: Any) -> None:
        self._actor, self._running = actor, running

    def is_alive(self) -> bool:
        done, _ = ray.wait([self._running], timeout=0)
        return not done

    def end(self) -> None:
        ray.kill(self._actor)


def launch_actor(config: ClusterConfig, model_dir: Path, invitation: Invitation) -> RankProcess:
    """Starts a rank process in the bundle of its rank. It must run in the replica's process."""
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=ray.util.get_current_placement_group(), placement_group_bundle_index=invitation.rank
    )
    actor = RankActor.options(  # type: ignore[attr-defined]
        scheduling_strategy=strategy, num_gpus=config.workers.gpus_per_replica
    ).remote()
    return RayRank(actor, actor.run.remote(config, model_dir, invitation))

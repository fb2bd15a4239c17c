"""Says what sets the pools of workers of one cluster apart: whether each pool's engine takes the model, and what the
record of a worker tells the routers about its pool, so that a request goes to workers that can take it.

A pool is a section of the config (`workers`, or an entry of `more_workers`) and a deployment of its own. Its processes
get the config as `ClusterConfig.of_pool` returns it, so nothing that builds a worker knows of other pools. The module
knows nothing of how pools are deployed.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from deploy.config import ClusterConfig
from fabric.contracts import ADAPTERS, EMBEDDINGS, SPEECH, ConfigError, Member, MemberPlace
from modalities.checkpoint_files import read_quantisation
from modalities.family import Family, ModelShape

VLLM_MEDIA_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_omni")
"""Lists the families whose media a worker with vLLM takes; of other families it takes those without media."""


def check_pools(config: ClusterConfig, family: Family, model_dir: Path) -> None:
    """Raises ConfigError for media and for quantised weights that the engine of a pool can't take, and for KV heads
    that the ranks of a worker can't share evenly."""
    for each in config.by_pool():
        _check_engine(each, family, model_dir)
        check_shares(family.shape, each.workers.tensor_parallel, each.pool_path)


def _check_engine(config: ClusterConfig, family: Family, model_dir: Path) -> None:
    path = config.pool_path
    if config.workers.engine == "weft":
        read_quantisation(model_dir)
    elif family.max_items and family.name not in VLLM_MEDIA_FAMILIES:
        raise ConfigError(
            f"{path}.engine is vllm, which takes media of {', '.join(VLLM_MEDIA_FAMILIES)} here, and not those of "
            f"{family.name}; use {path}.engine: weft"
        )


def check_shares(shape: ModelShape, num_ranks: int, path: str = "workers") -> None:
    """Raises ConfigError if the KV heads can't be divided evenly among the ranks: a head is never split or kept
    twice. `path` names the section of the workers."""
    if shape.num_kv_heads % num_ranks:
        raise ConfigError(
            f"{path}.tensor_parallel is {num_ranks}, which does not divide the model's {shape.num_kv_heads} KV heads"
        )


def pipeline_stages(config: ClusterConfig) -> int:
    """Returns the number of pipeline stages of each worker, which only vLLM has. Raises ConfigError if it is no
    number."""
    if config.workers.engine != "vllm":
        return 1
    num_stages = config.workers.vllm.get("pipeline_parallel_size", 1)
    if not isinstance(num_stages, int) or num_stages < 1:
        key = f"{config.pool_path}.vllm.pipeline_parallel_size"
        raise ConfigError(f"{key} must be 1 or more, and it is {num_stages!r}")
    return num_stages


def ranks_per_worker(config: ClusterConfig) -> int:
    """Returns the number of ranks of each worker: each stage of the pipeline has `tensor_parallel` of them."""
    return config.workers.tensor_parallel * pipeline_stages(config)


def ranks_per_replica(config: ClusterConfig) -> int:
    """Returns for how many ranks Ray reserves what a replica asks for, all on one node. vLLM starts its ranks itself,
    as processes of the replica; the ranks of Weft's own engine are actors, which may be on several nodes."""
    return ranks_per_worker(config) if config.workers.engine == "vllm" else 1


def worker_record(config: ClusterConfig, record: Member) -> Member:
    """Returns the record of a worker with what its pool says."""
    longest = _stated_context(config)
    is_shorter = any(longest < _stated_context(each) for each in config.by_pool())
    return msgspec.structs.replace(
        record,
        pool=config.pool,
        engine=config.workers.engine,
        lacks=worker_lacks(config),
        max_context_tokens=int(longest) if is_shorter else 0,
    )


def _stated_context(config: ClusterConfig) -> float:
    """Returns the tokens of the longest sequence that workers of a pool take by the config; infinity if that of the
    model counts."""
    stated = config.workers.vllm.get("max_model_len")
    return stated if isinstance(stated, int) and stated > 0 else math.inf


def worker_lacks(config: ClusterConfig) -> tuple[str, ...]:
    """Returns what the workers of a pool can't do for a request that others of the cluster may take."""
    if config.workers.engine == "vllm":
        return (EMBEDDINGS, SPEECH)
    num_ranks = [each.workers.tensor_parallel for each in config.by_pool() if each.stages is not None]
    # Workers of several ranks store no rows for the talker, so they leave spoken answers to those that do.
    is_silent = 1 in num_ranks and config.workers.tensor_parallel > 1
    return (ADAPTERS,) * bool(config.model.adapters) + (SPEECH,) * is_silent


def scaled_pools(config: ClusterConfig) -> dict[str, int]:
    """Returns the largest size of each pool of workers that is scaled. Pools that are not can't grow for the work that
    waits at the routers."""
    return {
        each.pool: each.workers.most_replicas for each in config.by_pool() if each.workers.autoscaling.rules is not None
    }


def pool_place(config: ClusterConfig, place: MemberPlace) -> MemberPlace:
    """Returns the place of a worker, told apart from those of other pools: the routers learn one cost for all members
    on equal hardware, and pools cost differently on it."""
    if not config.more_workers:
        return place
    return msgspec.structs.replace(place, hardware=f"{place.hardware} {config.pool_deployment}")

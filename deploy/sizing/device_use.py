"""Adds up what shares a GPU, and says what share of a GPU a worker with vLLM may take.

Processes that ask for a whole GPU have it alone. Those that ask for a fraction share one: Ray puts on it what fits, and
`shared_kinds` fills a GPU in the same way. This is arithmetic on numbers that others have found out; the module asks no
device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from deploy.config import ClusterConfig
from deploy.speech_parts import stage_name
from deploy.worker_pools import ranks_per_worker
from fabric.contracts import ConfigError

GIB = 2**30
CONTEXT_BYTES = GIB
"""CUDA's own context, its libraries and the buffers of NCCL take about this much on each device."""
VLLM_UTILIZATION = 0.92
"""vLLM takes this share of a GPU if `gpu_memory_utilization` does not say otherwise (its `CacheConfig`)."""
OTHERS_MARGIN = 1.1
"""A worker with vLLM that shares its GPU leaves this many times what the others are estimated to take, because
allocators keep more than they need."""
_ROUNDING = 1e-6


class GpuNeed(NamedTuple):
    """Says how many processes of one kind there are, and how many GPUs each takes."""

    num_processes: int
    gpus_each: float


class DeviceUse(NamedTuple):
    """Says what one GPU holds at most: how many processes of each kind, and what they take together."""

    kind_to_count: Mapping[str, int]
    taken_bytes: int
    unknown: tuple[str, ...] = ()
    """Names the pools whose sizes are not known, so that `taken_bytes` is without them."""

    @property
    def name(self) -> str:
        """Returns what is on the GPU, for people: `encoder + 2 worker`."""
        return " + ".join(f"{count} {kind}" if count > 1 else kind for kind, count in self.kind_to_count.items())


def gpu_needs(config: ClusterConfig) -> dict[str, GpuNeed]:
    """Maps each kind of process that computes on GPUs to what it needs. A rank of a worker counts as a process.
    Raises ConfigError for a pool whose ranks can't be counted."""
    encoders = config.encoders
    found = {"encoder": (encoders.device, encoders.most_replicas, encoders.gpus_per_replica)}
    for each in config.by_pool():
        workers, num_ranks = each.workers, each.workers.most_replicas * ranks_per_worker(each)
        found[each.pool_deployment] = (workers.device, num_ranks, workers.gpus_per_replica)
    for stage in () if config.stages is None else config.stages.later:
        found[stage_name(stage)] = (stage.devices, stage.replicas, stage.gpus_per_replica)
    return {
        kind: GpuNeed(count, each) for kind, (device, count, each) in found.items() if device == "cuda" and count > 0
    }


def shared_kinds(needs: Mapping[str, GpuNeed]) -> list[dict[str, int]]:
    """Returns, for each way in which a GPU of the cluster is filled, how many processes of each kind are on it."""
    filled = [{kind: 1} for kind, need in needs.items() if need.gpus_each >= 1]
    left = {kind: need for kind, need in needs.items() if 0 < need.gpus_each < 1}
    if not left:
        return filled
    kind_to_count: dict[str, int] = {}
    taken, is_growing = 0.0, True
    while is_growing:  # One of each kind goes on the GPU in turn, as long as there is one that fits.
        is_growing = False
        for kind, need in left.items():
            count = kind_to_count.get(kind, 0)
            if count < need.num_processes and taken + need.gpus_each <= 1 + _ROUNDING:
                kind_to_count[kind], taken, is_growing = count + 1, taken + need.gpus_each, True
    alone = [{kind: 1} for kind in left if kind not in kind_to_count]
    return [*filled, kind_to_count, *alone]


def num_gpus(needs: Mapping[str, GpuNeed]) -> int:
    """Returns the number of GPUs that the cluster takes."""
    whole = sum(
        need.num_processes * math.ceil(need.gpus_each - _ROUNDING) for need in needs.values() if need.gpus_each >= 1
    )
    shares = sum(need.num_processes * need.gpus_each for need in needs.values() if need.gpus_each < 1)
    return whole + math.ceil(shares - _ROUNDING)


def too_few_gpus(config: ClusterConfig, num_devices: int) -> list[str]:
    """Returns one sentence if the cluster takes more than `num_devices` GPUs, and else none."""
    needed = num_gpus(gpu_needs(config))
    return [f"the cluster takes {needed} GPUs, but there are {num_devices}"] if needed > num_devices else []


def shared_utilization(device_bytes: int, others_bytes: int, num_workers: int = 1) -> float:
    """Returns the `gpu_memory_utilization` of each of `num_workers` workers with vLLM that share a GPU with processes
    that take `others_bytes` together: what these leave, in hundredths. Raises ConfigError if they leave nothing."""
    left = device_bytes - int(others_bytes * OTHERS_MARGIN)
    hundredths = min(left * 100 // device_bytes // num_workers, int(VLLM_UTILIZATION * 100))
    if hundredths < 1:
        raise ConfigError(
            f"workers with vLLM have no room on a GPU of {device_bytes / GIB:.1f} GiB, because what shares it takes "
            f"{others_bytes / GIB:.1f} GiB; lower encoders.max_batch_cost, or give the encoders a GPU of their own"
        )
    return hundredths / 100


def misfits(uses: Sequence[DeviceUse], device_bytes: int) -> list[str]:
    """Returns one sentence for each GPU that does not hold what is on it."""
    return [
        f"a GPU of {device_bytes / GIB:.1f} GiB does not hold {use.name}, which take{'' if ' + ' in use.name else 's'} "
        f"{use.taken_bytes / GIB:.1f} GiB"
        for use in uses
        if use.taken_bytes > device_bytes
    ]

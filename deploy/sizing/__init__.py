"""Says how much memory a cluster needs before it starts: the sizes of its arenas, and the table of all memory pools.

`budget` adds up the pools of each process and refuses a config that can't hold one request. `largest_media` finds the
largest medium of each modality that the limits permit, because that medium must fit. `stored_weights` counts the
parameters of a checkpoint from the headers of its files. `device_use` adds up what shares a GPU, and says what share of
it a worker with vLLM may take.

The replicas take the sizes of their arenas from here, `weft serve` asks whether the config is too small, and `weft
check` prints the table. `planned_cluster` turns this around: it finds the pools, and the numbers of encoders and
workers, that fit the devices of a machine (`weft init`). The folder allocates nothing, imports no torch, and knows
nothing of Ray or of requests.
"""

from deploy.gpu_devices import GpuDevice
from deploy.sizing.budget import (
    arena_bytes,
    budget_lines,
    check_budget,
    inbox_bytes,
    machine_bytes,
    refuse_if_too_small,
    spill_bytes,
    staging_bytes,
    worker_utilization,
)
from deploy.sizing.device_use import too_few_gpus
from deploy.sizing.planned_cluster import Machine, PlannedCluster, plan_cluster
from deploy.sizing.stored_weights import read_stored_weights

__all__ = [
    "GpuDevice",
    "Machine",
    "PlannedCluster",
    "arena_bytes",
    "budget_lines",
    "check_budget",
    "inbox_bytes",
    "machine_bytes",
    "plan_cluster",
    "read_stored_weights",
    "refuse_if_too_small",
    "spill_bytes",
    "staging_bytes",
    "too_few_gpus",
    "worker_utilization",
]

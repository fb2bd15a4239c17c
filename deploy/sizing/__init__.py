"""Says how much memory a cluster needs before it starts: the sizes of its arenas, and the table of all memory pools.

`budget` adds up the pools of each process and refuses a config that can't hold one request. `largest_media` finds the
largest medium of each modality that the limits permit, because that medium must fit. `stored_weights` counts the
parameters of a checkpoint from the headers of its files.

The replicas take the sizes of their arenas from here, `weft serve` asks whether the config is too small, and `weft
check` prints the table. The folder allocates nothing, imports no torch, and knows nothing of Ray or of requests.
"""

from deploy.sizing.budget import arena_bytes, budget_lines, check_budget, inbox_bytes, refuse_if_too_small

__all__ = [
    "arena_bytes",
    "budget_lines",
    "check_budget",
    "inbox_bytes",
    "refuse_if_too_small",
]

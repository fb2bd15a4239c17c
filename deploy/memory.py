"""How large the arenas for features are where the config does not say: the seed's budgets, bounded by the machine.

Seed 000: 16 GB of host memory for encoded features, 4 GB for those staged to language models, whatever their number
of processes on a machine. Reads the machine's memory; allocates nothing.
"""

from __future__ import annotations

import os

from deploy.config import ClusterConfig

FEATURES_BYTES = 16 * 10**9
STAGING_BYTES = 4 * 10**9
FEATURES_SHARE, STAGING_SHARE = 8, 16
"""Of the machine's memory, at most one part in so many: weights, KV blocks and decoded media need room too."""


def machine_bytes() -> int:
    """Physical memory of this machine, or what its control group may use."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as limit:
            return min(total_bytes, int(limit.read()))
    except (OSError, ValueError):  # no such group, or "max"
        return total_bytes


def arena_bytes(config: ClusterConfig) -> int:
    """Of each encoder."""
    section = config.encoders
    return section.arena_bytes or _share(FEATURES_BYTES, FEATURES_SHARE, section.replicas)


def inbox_bytes(config: ClusterConfig) -> int:
    """Of each worker."""
    section = config.workers
    return section.inbox_bytes or _share(STAGING_BYTES, STAGING_SHARE, section.replicas)


def _share(budget_bytes: int, share: int, replicas: int) -> int:
    return min(budget_bytes, machine_bytes() // share) // max(replicas, 1)

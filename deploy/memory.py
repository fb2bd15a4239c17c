"""Computes how large the arenas for features are where the config does not say: published budgets, limited by the
memory of the machine.

The OmniConnector article (docs/references.md) sets 16 GB of host memory for encoded features, and 4 GB for features
staged to language models, for all processes on a machine together. The module reads the size of the
machine's memory and allocates nothing.
"""

from __future__ import annotations

import os

from deploy.config import ClusterConfig

FEATURES_BYTES = 16 * 10**9
STAGING_BYTES = 4 * 10**9
FEATURES_SHARE, STAGING_SHARE = 8, 16
"""A budget takes at most one part in this many of the machine's memory, because weights, KV blocks and decoded media
need room too."""


def machine_bytes() -> int:
    """Returns the physical memory of this machine, or the limit of the process's control group if that is lower."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as limit:
            return min(total_bytes, int(limit.read()))
    except (OSError, ValueError):  # There is no such group, or the limit is "max".
        return total_bytes


def arena_bytes(config: ClusterConfig) -> int:
    """Returns the size of each encoder's arena for features."""
    section = config.encoders
    return section.arena_bytes or _share(FEATURES_BYTES, FEATURES_SHARE, section.replicas)


def inbox_bytes(config: ClusterConfig) -> int:
    """Returns the size of each worker's inbox, its arena for features."""
    section = config.workers
    return section.inbox_bytes or _share(STAGING_BYTES, STAGING_SHARE, section.replicas)


def _share(budget_bytes: int, share: int, replicas: int) -> int:
    return min(budget_bytes, machine_bytes() // share) // max(replicas, 1)

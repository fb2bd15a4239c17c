"""Replicas of a pool under given loads, for tests of decisions about the size of the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from deploy.scaling import ReplicaLoad


class Load(NamedTuple):
    """A `Load` is what a replica has at a moment, and how much work arrives at it per second until then."""

    queue_s: float = 0.0
    work_rate: float = 0.0
    memory_use: float = 0.0


class LoadedReplicas:
    """A `LoadedReplicas` sums the work that arrives at each replica."""

    def __init__(self) -> None:
        self._arrived_s: Counter[str] = Counter()

    def after(self, seconds: float, loads: Sequence[Load | None]) -> dict[str, ReplicaLoad | None]:
        """Returns the loads of the replicas after so many seconds; None stands for a silent replica."""
        told: dict[str, ReplicaLoad | None] = {}
        for index, load in enumerate(loads):
            name = f"r{index}"
            told[name] = None
            if load is not None:
                self._arrived_s[name] += load.work_rate * seconds
                told[name] = ReplicaLoad(load.queue_s, self._arrived_s[name], 0.0, load.memory_use)
        return told

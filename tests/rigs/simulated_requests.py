"""Builds small simulations for tests."""

from __future__ import annotations

import random
from collections.abc import Mapping

from loadtest.simulator.cost_tables import load_table
from loadtest.simulator.sim_cluster import ClusterSettings, SimCluster, SimResult
from loadtest.simulator.sim_requests import SimRequest
from loadtest.simulator.workloads import WorkloadSpec, generate

TABLE = load_table("omniconnector-a100")
MIX: Mapping[str, float] = {"text": 0.6, "image": 0.25, "video-30f": 0.05, "audio-30s": 0.1}


def small_cluster(**changes: object) -> ClusterSettings:
    fields: dict[str, object] = {"table": TABLE, "num_workers": 3, "num_encoders": 2, "num_blocks": 2048} | changes
    return ClusterSettings(**fields)


def small_workload(num_requests: int, rate: float = 12.0, seed: int = 0, **changes: object) -> list[SimRequest]:
    fields: dict[str, object] = {"mean_prompt": 300, "mean_output": 40, "shared_media": 0.3} | changes
    mix = fields.pop("kind_to_share", MIX)
    return list(generate(WorkloadSpec(num_requests, rate, mix, **fields), seed))


def run(settings: ClusterSettings, requests: list[SimRequest], **options: int) -> SimResult:
    return SimCluster(settings).run(requests, **options)


def lone_text(
    index: int, num_tokens: int, num_output: int = 8, at_s: float = 0.1, first: int | None = None
) -> SimRequest:
    """Returns a request of text; equal `first` means equal text."""
    token = random.Random(index).randrange(1 << 29) if first is None else first
    return SimRequest(index, at_s, "text", ((token, num_tokens),), num_output, (1 << 29) + 1000 * index)

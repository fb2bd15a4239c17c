"""Simulates a burst of pictures on a cluster that scales itself: five times as many pictures for a while, and the same
texts before, during and after.

A `BurstScenario` describes cluster and load, and `run_burst` carries out one run of it: with the burst or without, and
with pools that are scaled or fixed. The texts of all runs are the same requests at the same moments. The module knows
nothing of how results are shown.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from heapq import merge
from itertools import takewhile

import numpy as np

from deploy.scaling import ScalingRules
from loadtest.simulator.cost_tables import load_table
from loadtest.simulator.sim_cluster import ClusterSettings, SimCluster, SimResult
from loadtest.simulator.sim_requests import SimRequest
from loadtest.simulator.sim_scaling import PoolAutoscaler, SizeChange
from loadtest.simulator.workloads import WorkloadSpec, generate

KINDS = ("encoder", "worker")
SESSIONS = 1_000_000
"""Keeps the conversations of the parts of the load apart."""


@dataclass(frozen=True, slots=True)
class BurstScenario:
    """Describes a cluster and its load. The encoders are so slow that they limit pictures, as a small share of a GPU or
    a tower of several billion parameters does."""

    seed: int = 1
    picture: str = "image"
    text_rate: float = 8.0
    image_rate: float = 8.0
    factor: float = 5.0
    """Multiplies the rate of pictures during the burst."""
    text_factor: float = 1.0
    """Multiplies the rate of texts during the burst."""
    num_blocks: int = 16384
    """Holds the KV blocks of a worker, of 32 tokens each."""
    sees_routers: bool = True
    """Says that the decisions know what waits at the routers."""
    burst_from_s: float = 60.0
    burst_until_s: float = 120.0
    end_s: float = 270.0
    startup_s: float = 20.0
    """Holds how long a new member takes to start."""
    encoder_slowness: float = 60.0
    encoders: ScalingRules = ScalingRules(1, 8, slo_ttft_s=2.0, downscale_delay_s=20.0, startup_s=20.0)  # noqa: RUF009
    workers: ScalingRules = ScalingRules(6, 10, slo_ttft_s=2.0, downscale_delay_s=20.0, startup_s=20.0)  # noqa: RUF009
    settings: ClusterSettings = field(init=False)

    def __post_init__(self) -> None:
        settings = ClusterSettings(
            load_table("omniconnector-a100"),
            self.workers.min_replicas,
            self.encoders.min_replicas,
            block_size=32,
            num_blocks=self.num_blocks,
            encoder_slowness=(self.encoder_slowness,),
            seed=self.seed,
        )
        object.__setattr__(self, "settings", settings)

    def requests(self, *, has_burst: bool) -> Iterator[SimRequest]:
        """Yields the requests in order of arrival. Those without the burst are the same in both cases."""
        parts = [
            self._part("text", self.text_rate, 0.0, self.end_s, 0),
            self._part(self.picture, self.image_rate, 0.0, self.end_s, 1),
        ]
        if has_burst:
            more = (
                (self.picture, (self.factor - 1) * self.image_rate),
                ("text", (self.text_factor - 1) * self.text_rate),
            )
            for number, (kind, rate) in enumerate(more, 2):
                if rate > 0.0:
                    parts.append(self._part(kind, rate, self.burst_from_s, self.burst_until_s, number))
        ordered = merge(*parts, key=lambda request: request.arrival_s)
        return (replace(request, index=index) for index, request in enumerate(ordered))

    def _part(self, kind: str, rate: float, from_s: float, until_s: float, number: int) -> Iterator[SimRequest]:
        spec = WorkloadSpec(round(2 * rate * until_s) + 10, rate, {kind: 1.0}, mean_prompt=600)
        drawn = generate(spec, 1000 * self.seed + number)
        moved = (
            replace(one, arrival_s=one.arrival_s + from_s, session=one.session + number * SESSIONS) for one in drawn
        )
        return takewhile(lambda request: request.arrival_s < until_s, moved)


@dataclass(frozen=True, slots=True)
class BurstRun:
    """A `BurstRun` is what came out of one run."""

    label: str
    scenario: BurstScenario
    result: SimResult
    changes: tuple[SizeChange, ...]
    kind_to_sizes: dict[str, list[tuple[float, int]]]
    num_moved: int

    def ttft_ms(self, kind: str, quantile: float) -> float:
        """Returns a quantile of the time to first token, in milliseconds, of the requests since the burst began."""
        since_s = self.scenario.burst_from_s
        outcomes = [one for one in self.result.outcomes if one.kind == kind and one.arrival_s >= since_s]
        return 1e3 * float(np.quantile([one.first_token_s for one in outcomes if one.is_served], quantile))

    @property
    def num_lost(self) -> int:
        """Counts the requests without an answer, and those with another number of tokens than they asked for."""
        return sum(not one.is_served or one.num_tokens != one.num_output for one in self.result.outcomes)

    def intervals_until_growth(self, kind: str) -> float:
        """Returns the intervals from the beginning of the burst until the pool was asked to grow; inf if it was not."""
        rules, begun_s = self._rules(kind), self.scenario.burst_from_s
        grown = [one.at_s for one in self.changes if one.kind == kind and one.num_after > one.num_before]
        return min(((at_s - begun_s) / rules.interval_s for at_s in grown if at_s >= begun_s), default=float("inf"))

    def size(self, kind: str, at_s: float) -> int:
        """Returns the running members of a pool at a time."""
        return [size for taken_s, size in self.kind_to_sizes[kind] if taken_s <= at_s][-1]

    def peak_s(self, kind: str) -> float:
        """Returns the first time at which most members of a pool ran."""
        return max(self.kind_to_sizes[kind], key=lambda taken: taken[1])[0]

    def member_s(self, kind: str) -> float:
        """Returns the seconds for which members of a pool ran, summed over the members."""
        sizes = self.kind_to_sizes[kind]
        return sum(size * self._rules(kind).interval_s for _, size in sizes)

    def _rules(self, kind: str) -> ScalingRules:
        return self.scenario.encoders if kind == "encoder" else self.scenario.workers


def run_burst(label: str, scenario: BurstScenario, *, has_burst: bool, scaled: Sequence[str]) -> BurstRun:
    """Runs a scenario. The pools that `scaled` does not name keep their smallest size."""
    cluster = SimCluster(scenario.settings)
    rules = {"encoder": scenario.encoders, "worker": scenario.workers}
    scalers = []
    for kind, own in rules.items():
        fixed = replace(own, max_replicas=own.min_replicas)
        own = own if kind in scaled else fixed
        scalers.append(PoolAutoscaler(cluster, kind, own, scenario.startup_s, sees_routers=scenario.sees_routers))
    result = cluster.run(scenario.requests(has_burst=has_burst))
    changes = sorted((one for scaler in scalers for one in scaler.changes), key=lambda change: change.at_s)
    sizes = {scaler.kind: scaler.sizes for scaler in scalers}
    return BurstRun(label, scenario, replace(result, policy=label), tuple(changes), sizes, cluster.num_moved)


def run_bursts(scenario: BurstScenario, num_processes: int) -> tuple[BurstRun, BurstRun, BurstRun]:
    """Returns three runs: without the burst, with it, and with it and as many encoders as before."""
    runs = [
        ("without the burst", False, KINDS),
        ("with the burst", True, KINDS),
        ("with the burst, encoders fixed", True, ("worker",)),
    ]
    if num_processes <= 1:
        calm, burst, fixed = (_run(scenario, *run) for run in runs)
        return calm, burst, fixed
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        calm, burst, fixed = [future.result() for future in [pool.submit(_run, scenario, *run) for run in runs]]
    return calm, burst, fixed


def _run(scenario: BurstScenario, label: str, has_burst: bool, scaled: Sequence[str]) -> BurstRun:
    return run_burst(label, scenario, has_burst=has_burst, scaled=scaled)


def text_ratio(burst: BurstRun, calm: BurstRun) -> float:
    """Returns how many times as long the slowest hundredth of the texts waits with the burst as without it."""
    return burst.ttft_ms("text", 0.99) / calm.ttft_ms("text", 0.99)

"""Compares the joint plan with other policies: the experiments behind the bars on the choice of members.

    policies        all policies on one mixed workload at 80 % load
    curve           the joint plan and the sequential policies over load, heterogeneity and the share of media
    oracle          the joint plan and the best of all assignments, on cases small enough to try all
    staleness       eight routers with reports a second old, and one router with fresh reports
    recovery        how soon predictions are right again after all costs change
    isolation       text alone, and the same text with pictures and videos on top

Every comparison runs the same requests. The module knows nothing of how a run works or of how results are shown.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from fabric.contracts import RequestId
from loadtest.benches.bench_result import Bar
from loadtest.simulator.cost_tables import load_table
from loadtest.simulator.faults import MemberFault
from loadtest.simulator.policies import POLICIES, SEQUENTIAL, FixedPolicy
from loadtest.simulator.sim_cluster import ClusterSettings, SimCluster, SimResult
from loadtest.simulator.sim_report import Plot, Summary, Table, distribution_plot, summarise, summary_table
from loadtest.simulator.sim_requests import SimRequest
from loadtest.simulator.sim_runs import SimRun, at_load, run_all
from loadtest.simulator.workloads import WorkloadSpec

MIX: Mapping[str, float] = {"text": 0.7, "image": 0.15, "image*4": 0.05, "video-30f": 0.07, "audio-30s": 0.03}


@dataclass(frozen=True, slots=True)
class Experiment:
    """An `Experiment` is what came out of one comparison."""

    name: str
    parts: tuple[str | Table | Plot, ...]
    bars: tuple[Bar, ...]
    summaries: tuple[Summary, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class ChoiceScale:
    """Sets how large the experiments are."""

    num_requests: int = 4000
    num_workers: int = 16
    num_encoders: int = 6
    num_processes: int = 2
    seed: int = 1

    def settings(self) -> ClusterSettings:
        """Returns the cluster of the experiments; an encoder in three takes twice as long, and so does a worker in
        four."""
        return ClusterSettings(
            load_table("omniconnector-a100"),
            self.num_workers,
            self.num_encoders,
            block_size=32,
            num_blocks=4096,
            worker_slowness=(1.0, 1.0, 1.0, 2.0),
            encoder_slowness=(1.0, 1.0, 2.0),
            seed=self.seed,
        )

    def workload(self, **changes: object) -> WorkloadSpec:
        spec = WorkloadSpec(
            self.num_requests,
            1.0,
            MIX,
            mean_prompt=600,
            system_tokens=256,
            mean_turns=2.0,
            think_s=5.0,
            shared_media=0.3,
            burstiness=1.5,
        )
        return replace(spec, **changes)  # type: ignore[arg-type]


def media_bound(settings: ClusterSettings) -> ClusterSettings:
    """Returns a cluster whose encoders are as busy as its workers: with fewer of them, encoding limits the load."""
    return replace(settings, num_encoders=max(2, settings.num_encoders // 3))


# ---------------------------------------------------------------- policies


def policies(scale: ChoiceScale, names: Sequence[str] = tuple(POLICIES), load: float = 0.8) -> Experiment:
    """Runs all policies on the mixed workload."""
    settings = scale.settings()
    workload = at_load(settings, scale.workload(), load)
    runs = [SimRun(name, replace(settings, policy=name), workload, scale.seed) for name in names]
    results = run_all(runs, scale.num_processes)
    summaries = [summarise(each) for each in results]
    table = summary_table(summaries)
    plot = distribution_plot(results, "policies")
    bars = (_sequential_bar(summaries, f"joint over the best sequential policy, TTFT p99 at {load:.0%} load"),)
    text = (
        f"{workload.num_requests:,} requests at {load:.0%} of what {settings.num_workers} workers and "
        f"{settings.num_encoders} encoders bear ({workload.rate:.1f} requests/s); the same requests for each policy."
    )
    return Experiment("policies", (text, table, plot), bars, tuple(summaries))


def _sequential_bar(summaries: Sequence[Summary], name: str) -> Bar:
    policy_to_p99 = {one.policy: one.ttft.p99 for one in summaries}
    best = min(policy_to_p99[policy] for policy in SEQUENTIAL if policy in policy_to_p99)
    return Bar(name, policy_to_p99["joint"] / best, 0.8, "times", is_max=True)


# ---------------------------------------------------------------- where the joint plan pays


def curve(scale: ChoiceScale, loads: Sequence[float] = (0.5, 0.65, 0.8, 0.9)) -> Experiment:
    """Runs the joint plan and the sequential policies over load, heterogeneity and the share of media."""
    names = ("joint", *SEQUENTIAL)
    base = scale.settings()
    axes: dict[str, list[tuple[float, ClusterSettings, WorkloadSpec]]] = {
        "load": [(load, base, at_load(base, scale.workload(), load)) for load in loads],
        "slowness of the slow members": [],
        "share of requests with media": [],
        "encoders per worker": [],
    }
    for factor in (1.0, 2.0, 4.0):
        settings = replace(base, worker_slowness=(1.0, 1.0, 1.0, factor), encoder_slowness=(1.0, 1.0, factor))
        axes["slowness of the slow members"].append((factor, settings, at_load(settings, scale.workload(), 0.8)))
    for share in (0.1, 0.3, 0.6, 0.9):
        mix = {"text": 1.0 - share, "image": 0.5 * share, "image*4": 0.2 * share, "video-30f": 0.3 * share}
        workload = at_load(base, scale.workload(kind_to_share=mix), 0.8)
        axes["share of requests with media"].append((share, base, workload))
    for num_encoders in (2, 3, 6):
        settings = replace(base, num_encoders=num_encoders)
        ratio = num_encoders / base.num_workers
        axes["encoders per worker"].append((ratio, settings, at_load(settings, scale.workload(), 0.8)))
    runs = [
        SimRun(f"{axis}|{x}|{name}", replace(settings, policy=name), workload, scale.seed)
        for axis, points in axes.items()
        for x, settings, workload in points
        for name in names
    ]
    label_to_summary = {each.policy: summarise(each) for each in run_all(runs, scale.num_processes)}
    rows = [["axis", "value", *(f"{name} p99 (ms)" for name in names), "joint / best sequential", "media p99 ratio"]]
    plots: list[Plot] = []
    for axis, points in axes.items():
        lines: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for x, _, _ in points:
            found = [label_to_summary[f"{axis}|{x}|{name}"] for name in names]
            for name, one in zip(names, found, strict=True):
                lines[name].append((x, one.ttft.p99))
            best = min(one.ttft.p99 for one in found[1:])
            media = [_media_p99(one) for one in found]
            rows.append(
                [
                    axis,
                    f"{x:.2f}",
                    *(f"{one.ttft.p99:.0f}" for one in found),
                    f"{found[0].ttft.p99 / best:.2f}",
                    f"{media[0] / max(min(media[1:]), 1e-9):.2f}",
                ]
            )
        plots.append(Plot(f"curve-{axis.split()[0]}", f"TTFT p99 over the {axis}", axis, "ms", lines))
    text = "The 99th percentile of the time to first token, of the joint plan and of the sequential policies."
    return Experiment("curve", (text, rows, *plots), ())


def _media_p99(summary: Summary) -> float:
    """Returns the largest p99 over the kinds with media that have at least 20 requests."""
    return max(
        (one.p99 for kind, one in summary.kind_to_ttft.items() if kind != "text" and one.count >= 20), default=0.0
    )


# ---------------------------------------------------------------- oracle


def oracle(scale: ChoiceScale, num_cases: int = 6, num_requests: int = 4) -> Experiment:
    """Compares the joint plan with the best of all assignments to 2 workers and 2 encoders. The best assignment knows
    all requests before the first one comes, so it is a bound that no router can be held to."""
    settings = replace(scale.settings(), num_workers=2, num_encoders=2, worker_slowness=(1.0, 1.5))
    ratios: list[float] = []
    rows = [["case", "joint: mean TTFT (ms)", "best assignment (ms)", "joint / best"]]
    for case in range(num_cases):
        requests = _small_case(random.Random(1000 * scale.seed + case), num_requests)
        joint_s = _mean_ttft(SimCluster(settings).run(requests))
        best_s = min(
            _mean_ttft(SimCluster(settings, lambda _, fixed=fixed: fixed).run(requests))  # type: ignore[misc]
            for fixed in _assignments(settings, requests)
        )
        ratios.append(joint_s / best_s)
        rows.append([str(case), f"{1e3 * joint_s:.1f}", f"{1e3 * best_s:.1f}", f"{ratios[-1]:.3f}"])
    bar = Bar("joint over the best assignment, mean TTFT on small cases", float(np.mean(ratios)), 1.1, "times", True)
    text = (
        f"{num_requests} requests that come within 100 ms, each with a picture or a video; all assignments are tried."
    )
    return Experiment("oracle", (text, rows), (bar,))


def _small_case(rng: random.Random, num_requests: int) -> list[SimRequest]:
    requests = []
    for number in range(num_requests):
        kind = rng.choice(("image", "video-30f"))
        parts = ((rng.randrange(1 << 30), rng.randrange(100, 1500)), (kind, f"c{rng.getrandbits(40)}"), (7, 20))
        requests.append(SimRequest(number, 0.1 + 0.1 * number / num_requests, kind, parts, 20, rng.randrange(1 << 30)))
    return requests


def _assignments(settings: ClusterSettings, requests: Sequence[SimRequest]) -> list[FixedPolicy]:
    workers = [settings.member("worker", index).member_id for index in range(settings.num_workers)]
    encoders = [settings.member("encoder", index).member_id for index in range(settings.num_encoders)]
    choices = [(worker, (encoder,)) for worker in workers for encoder in encoders]
    return [
        FixedPolicy({RequestId(f"r{number}"): choice for number, choice in enumerate(chosen)})
        for chosen in product(choices, repeat=len(requests))
    ]


def _mean_ttft(result: SimResult) -> float:
    return float(np.mean([one.first_token_s for one in result.outcomes]))


# ---------------------------------------------------------------- stale reports


def staleness(scale: ChoiceScale, delays_s: Sequence[float] = (0.05, 1.0, 5.0)) -> Experiment:
    """Runs 1 to 8 routers with reports of several ages."""
    base = scale.settings()
    workload = at_load(base, scale.workload(), 0.8)
    cases = [(1, 0.0), *((1, delay_s) for delay_s in delays_s), (4, 1.0), (8, 0.0), (8, 1.0), (8, 5.0)]
    runs = [
        SimRun(
            f"{num_routers} routers, {delay_s:g} s",
            replace(base, num_routers=num_routers, report_delay_s=delay_s),
            workload,
            scale.seed,
        )
        for num_routers, delay_s in cases
    ]
    summaries = [summarise(each) for each in run_all(runs, scale.num_processes)]
    fresh = summaries[0].ttft.p99
    by_label = {one.policy: one.ttft.p99 for one in summaries}
    bar = Bar(
        "8 routers with reports 1 s old over one with fresh ones, TTFT p99",
        by_label["8 routers, 1 s"] / fresh,
        1.1,
        "times",
        is_max=True,
    )
    text = "Joint plan at 80 % load; reports and events reach every router late by the given time."
    return Experiment("staleness", (text, summary_table(summaries)), (bar,), tuple(summaries))


# ---------------------------------------------------------------- recovery


def recovery(scale: ChoiceScale, window: int = 50) -> Experiment:
    """Doubles all costs in the middle of a run, and shows the error of predictions around that moment. Load stays low,
    so that an error is one of costs and not of queues."""
    base = replace(scale.settings(), worker_slowness=(), encoder_slowness=())
    workload = at_load(base, scale.workload(num_requests=min(scale.num_requests, 2000), mean_turns=1.0), 0.25)
    change_s = 0.5 * workload.num_requests / workload.rate
    faults = tuple(
        MemberFault("slow", f"{kind}-{index}", change_s, 2.0)
        for kind, count in (("worker", base.num_workers), ("encoder", base.num_encoders))
        for index in range(count)
    )
    (result,) = run_all([SimRun("joint", replace(base, faults=faults), workload, scale.seed)], 1)
    served = sorted((one for one in result.outcomes if one.is_served), key=lambda one: one.arrival_s)
    errors = np.array([abs(one.predicted_s - one.first_token_s) / one.first_token_s for one in served])
    after = next(index for index, one in enumerate(served) if one.arrival_s >= change_s)
    medians = {
        start: float(np.median(errors[start : start + window])) for start in range(after, len(errors) - window, 10)
    }
    before = float(np.median(errors[max(0, after - 500) : after]))
    num_until = next((start - after for start, error in medians.items() if error < 0.1), len(errors))
    points = [
        (float(start - after), 100 * float(np.median(errors[start : start + window])))
        for start in range(max(0, after - 300), min(len(errors) - window, after + 600), 10)
    ]
    plot = Plot(
        "recovery",
        "Error of predictions around a doubling of all costs",
        "requests since",
        "median error (%)",
        {"joint": points},
    )
    bar = Bar("requests until the median error is below 10 % again", float(num_until), 200, "requests", is_max=True)
    text = f"All costs double after request {after}; the median error before is {before:.1%}."
    return Experiment("recovery", (text, plot), (bar,))


# ---------------------------------------------------------------- isolation


def isolation(scale: ChoiceScale) -> Experiment:
    """Runs text at 64 % load, and the same text with a quarter as many pictures and videos on top, which makes about
    80 %."""
    base = scale.settings()
    text_only = scale.workload(kind_to_share={"text": 1.0}, mean_turns=1.0)
    text_only = at_load(base, text_only, 0.64)
    with_media = replace(
        text_only,
        num_requests=round(1.25 * text_only.num_requests),
        rate=1.25 * text_only.rate,
        kind_to_share={"text": 0.8, "image": 0.16, "video-30f": 0.04},
    )
    runs = [SimRun("text alone", base, text_only, scale.seed), SimRun("with media", base, with_media, scale.seed)]
    alone, mixed = (summarise(each) for each in run_all(runs, scale.num_processes))
    ratio = mixed.kind_to_ttft["text"].p99 / alone.kind_to_ttft["text"].p99
    bar = Bar("TTFT p99 of text with 20 % media on top, over text alone", ratio, 1.2, "times", is_max=True)
    rows = summary_table([alone, mixed])
    text = "The text requests come at the same rate in both runs; their prompts and moments are drawn alike."
    return Experiment("isolation", (text, rows), (bar,), (alone, mixed))


EXPERIMENTS: Mapping[str, Callable[[ChoiceScale], Experiment]] = {
    "policies": policies,
    "curve": curve,
    "oracle": oracle,
    "staleness": staleness,
    "recovery": recovery,
    "isolation": isolation,
}

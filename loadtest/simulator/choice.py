"""Compares the joint plan with other policies: the experiments behind the bars on the choice of members.

    policies        all policies on one mixed workload at 80 % load
    curve           the joint plan and the sequential policies over load, heterogeneity, media, encoders and network
    chance          how far chance moves the joint plan and the sequential policies
    oracle          the joint plan and the best of all assignments, on cases small enough to try all
    staleness       eight routers with reports a second old, and one router with fresh reports
    recovery        how soon predictions are right again after costs change
    isolation       text alone, and the same text with pictures and videos on top
    autoscaling     five times the pictures on a cluster that scales its pools, beside the same texts without them
    sizing          how many encoders some mixes need beside a number of workers
    large           two large clusters, with the time that their simulations take

Every comparison runs the same requests. The module knows nothing of how a run works or of how results are shown.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from fabric.contracts import RequestId
from loadtest.bench_result import Bar
from loadtest.report_page import Percentiles, Plot, Table
from loadtest.simulator.choice_curve import LOADS, curve_parts, curve_points
from loadtest.simulator.cluster_size import LOAD, SizeGoal, SizingResult, size_cases
from loadtest.simulator.cost_tables import load_table
from loadtest.simulator.faults import MemberFault
from loadtest.simulator.policies import POLICIES, SEQUENTIAL, FixedPolicy
from loadtest.simulator.scaling_burst import KINDS, BurstScenario, run_bursts, text_ratio
from loadtest.simulator.sim_cluster import ClusterSettings, SimCluster, SimResult
from loadtest.simulator.sim_report import Summary, distribution_plot, summarise, summary_table
from loadtest.simulator.sim_requests import SimRequest
from loadtest.simulator.sim_runs import SimRun, at_load, run_all
from loadtest.simulator.workloads import WorkloadSpec
from router.member_feeds import MAX_REPORTS_PER_S

MIX: Mapping[str, float] = {"text": 0.7, "image": 0.15, "image*4": 0.05, "video-30f": 0.07, "audio-30s": 0.03}
MEDIA_MIX: Mapping[str, float] = {"image": 0.5, "image*4": 1 / 6, "video-30f": 0.7 / 3, "audio-30s": 0.1}
"""Holds the shares among the conversations with media, which are those of `MIX`."""


class LargeRun(NamedTuple):
    """A `LargeRun` is the size of one run of the experiment `large`."""

    num_requests: int
    num_workers: int
    num_encoders: int


LARGE_RUNS = LargeRun(200_000, 256, 64), LargeRun(50_000, 1000, 200)
LARGE_MINUTES = 20.0
"""Each of these runs must take less time than this on a machine of two cores."""


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
    large_runs: tuple[LargeRun, ...] = LARGE_RUNS
    num_seeds: int = 3
    """Counts the seeds of the experiments that tell chance from choice, beginning with `seed`."""

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.num_seeds)

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


def curve(scale: ChoiceScale, loads: Sequence[float] = LOADS) -> Experiment:
    """Runs the joint plan and the sequential policies over the axes of `choice_curve`."""
    points = curve_points(scale.settings(), scale.workload(), MEDIA_MIX, loads)
    return Experiment("curve", curve_parts(points, scale.seeds, scale.num_processes), ())


# ---------------------------------------------------------------- how far chance goes


def chance(scale: ChoiceScale) -> Experiment:
    """Runs the joint plan with and without its chances, and the sequential policies, with several random seeds, at the
    middle of the curve. All runs of one seed have the same requests."""
    base = scale.settings()
    workload = at_load(base, scale.workload(), 0.8)
    label_to_settings = {
        "joint": base,
        "joint without exploration": replace(base, planner=replace(base.planner, exploration=0.0)),
        "joint, equals only if equal": replace(base, planner=replace(base.planner, tolerance=0.0)),
        **{name: replace(base, policy=name) for name in SEQUENTIAL},
    }
    runs = [
        SimRun(label, replace(settings, seed=seed), workload, seed)
        for label, settings in label_to_settings.items()
        for seed in scale.seeds
    ]
    ttfts = [summarise(each).ttft for each in run_all(runs, scale.num_processes)]
    num, rows = len(scale.seeds), [["policy", "p99 of each seed (ms)", "joint / it: p99", "p90", "mean"]]
    joint = ttfts[:num]
    for number, label in enumerate(label_to_settings):
        own = ttfts[number * num : (number + 1) * num]
        ratios = [
            _interval([first / second for first, second in zip(_values(joint, name), _values(own, name), strict=True)])
            for name in ("p99", "p90", "mean")
        ]
        rows.append([label, ", ".join(f"{one.p99:.0f}" for one in own), *ratios])
    text = (
        f"{workload.num_requests:,} requests at 80 % load with each of {num} seeds. A ratio is the geometric mean over "
        "the seeds, and behind it is twice its standard error."
    )
    return Experiment("chance", (text, rows), ())


def _values(percentiles: Sequence[Percentiles], name: str) -> list[float]:
    return [float(getattr(one, name)) for one in percentiles]


def _interval(ratios: Sequence[float]) -> str:
    logs = np.log(ratios)
    error = 2.0 * float(logs.std(ddof=1)) / len(logs) ** 0.5 if len(logs) > 1 else 0.0
    return f"{float(np.exp(logs.mean())):.3f} ± {error:.3f}"


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
    """Runs 1 to 8 routers with reports of several ages. The two cases of the bar run with several seeds, because a p99
    of so few requests depends on one burst."""
    decisive = [(1, 0.0), (8, 1.0)]
    others = [*((1, delay_s) for delay_s in delays_s), (4, 1.0), (8, 0.0), (8, 5.0)]
    cases = [(seed, case) for seed in scale.seeds for case in decisive] + [(scale.seed, case) for case in others]
    runs = []
    for seed, (num_routers, delay_s) in cases:
        base = replace(scale.settings(), seed=seed)
        settings = replace(base, num_routers=num_routers, report_delay_s=delay_s)
        workload = at_load(base, scale.workload(), 0.8)
        runs.append(SimRun(f"{num_routers} routers, {delay_s:g} s, seed {seed}", settings, workload, seed))
    summaries = [summarise(each) for each in run_all(runs, scale.num_processes)]
    p99s = [one.ttft.p99 for one in summaries[: len(decisive) * scale.num_seeds]]
    ratios = [late / fresh for fresh, late in zip(p99s[::2], p99s[1::2], strict=True)]
    bar = Bar(
        "8 routers with reports 1 s old over one with fresh ones, TTFT p99",
        float(np.exp(np.mean(np.log(ratios)))),
        1.1,
        "times",
        is_max=True,
    )
    text = (
        "Joint plan at 80 % load; reports and events reach every router late by the given time. The bar is the "
        f"geometric mean over the seeds, which have {', '.join(f'{ratio:.2f}' for ratio in ratios)}."
    )
    return Experiment("staleness", (text, summary_table(summaries)), (bar,), tuple(summaries))


# ---------------------------------------------------------------- recovery


class CostChange(NamedTuple):
    """A `CostChange` is what happens to the costs in the middle of a run."""

    name: str
    factor: float
    every: int
    """This is 1 if all members change, and 2 if every other one does."""


DOUBLED = CostChange("all costs double", 2.0, 1)
CHANGES = (DOUBLED, CostChange("all costs halve", 0.5, 1), CostChange("those of every other member double", 2.0, 2))


def recovery(scale: ChoiceScale, window: int = 50) -> Experiment:
    """Changes costs in the middle of a run, and shows the error of predictions around that moment. Load stays low, so
    that an error is one of costs and not of queues."""
    base = replace(scale.settings(), worker_slowness=(), encoder_slowness=())
    workload = at_load(base, scale.workload(num_requests=min(scale.num_requests, 2000), mean_turns=1.0), 0.25)
    change_s = 0.5 * workload.num_requests / workload.rate
    runs = [
        SimRun(change.name, replace(base, faults=_faults(base, change, change_s)), workload, scale.seed)
        for change in CHANGES
    ]
    starts = range(0, 201, 50)
    rows = [["change", "before (%)", *(f"{start} to {start + window} (%)" for start in starts), "below 10 % after"]]
    name_to_points: dict[str, list[tuple[float, float]]] = {}
    name_to_until: dict[str, int] = {}
    for result in run_all(runs, scale.num_processes):
        served = sorted((one for one in result.outcomes if one.is_served), key=lambda one: one.arrival_s)
        errors = np.array([abs(one.predicted_s - one.first_token_s) / one.first_token_s for one in served])
        after = next(index for index, one in enumerate(served) if one.arrival_s >= change_s)
        medians = {
            start - after: float(np.median(errors[start : start + window]))
            for start in range(max(0, after - 300) // 10 * 10 + after % 10, len(errors) - window, 10)
        }
        until = next((start for start, error in medians.items() if start >= 0 and error < 0.1), len(errors))
        name_to_until[result.policy] = until
        before = float(np.median(errors[max(0, after - 500) : after]))
        shown = [f"{100 * value:.1f}" for value in (before, *(medians.get(start, np.nan) for start in starts))]
        rows.append([result.policy, *shown, str(until)])
        name_to_points[result.policy] = [(float(at), 100 * error) for at, error in medians.items() if at < 600]
    plot = Plot(
        "recovery",
        "Error of predictions around a change of costs",
        "requests since",
        "median error (%)",
        name_to_points,
    )
    name = "requests until the median error is below 10 % again, all costs doubled"
    bar = Bar(name, float(name_to_until[DOUBLED.name]), 200, "requests", is_max=True)
    text = f"Costs change in the middle of a run; medians over {window} requests, which begin after the change."
    return Experiment("recovery", (text, rows, plot), (bar,))


def _faults(settings: ClusterSettings, change: CostChange, at_s: float) -> tuple[MemberFault, ...]:
    return tuple(
        MemberFault("slow", f"{kind}-{index}", at_s, change.factor)
        for kind, count in (("worker", settings.num_workers), ("encoder", settings.num_encoders))
        for index in range(0, count, change.every)
    )


# ---------------------------------------------------------------- isolation


def isolation(scale: ChoiceScale) -> Experiment:
    """Runs a mix at 80 % load of which a fifth has pictures and videos, and its texts alone, which come as often. A
    third run, which no bar reads, has so many texts alone that the load is that of the mix: it tells what any work of
    that amount does to texts from what media do."""
    base = scale.settings()
    shares = {"text": 0.8, "image": 0.16, "video-30f": 0.04}
    mixed = at_load(base, scale.workload(kind_to_share=shares, mean_turns=1.0), 0.8)
    texts = replace(
        mixed,
        num_requests=round(0.8 * mixed.num_requests),
        rate=0.8 * mixed.rate,
        kind_to_share={"text": 1.0},
    )
    as_loaded = at_load(base, texts, 0.8)
    runs = [
        SimRun("text alone", base, texts, scale.seed),
        SimRun("with media", base, mixed, scale.seed),
        SimRun("text alone at 80 % load", base, as_loaded, scale.seed),
    ]
    results = run_all(runs, scale.num_processes)
    summaries = [summarise(each) for each in results]
    p99s = [one.kind_to_ttft["text"].p99 for one in summaries]
    tpots = [
        float(np.mean([one.token_s for one in each.outcomes if one.is_served and one.kind == "text"]))
        for each in results
    ]
    bars = (
        Bar("TTFT p99 of text beside media, over text alone", p99s[1] / p99s[0], 1.2, "times", is_max=True),
        Bar("time of a further token of text beside media, over text alone", tpots[1] / tpots[0], 1.1, "times", True),
    )
    text = (
        f"{mixed.rate:.1f} requests/s are 80 % of what the cluster bears. The text requests come at the same rate in "
        f"both runs; their prompts and moments are drawn alike. A further token of text takes {1e3 * tpots[0]:.1f} ms "
        f"alone and {1e3 * tpots[1]:.1f} ms beside media, whose tokens have to be computed in some steps. Where texts "
        f"alone are 80 % of what the cluster bears ({as_loaded.rate:.1f} requests/s), it takes {1e3 * tpots[2]:.1f} ms."
    )
    return Experiment("isolation", (text, summary_table(summaries)), bars, tuple(summaries))


# ---------------------------------------------------------------- autoscaling


def autoscaling(scale: ChoiceScale, scenario: BurstScenario | None = None) -> Experiment:
    """Runs a burst of pictures on a cluster that scales its pools, the same load without the burst, and the burst with
    a fixed number of encoders, which no bar reads. The sizes of the scale have no meaning here."""
    scenario = replace(scenario or BurstScenario(), seed=scale.seed)
    calm, burst, fixed = run_bursts(scenario, scale.num_processes)
    begun_s, end_s = scenario.burst_from_s, scenario.end_s
    before, after = (burst.size("encoder", at_s) for at_s in (begun_s, end_s))
    bars = (
        Bar("TTFT p99 of text with a burst of pictures, over without", text_ratio(burst, calm), 1.3, "times", True),
        Bar("intervals until the encoders grow", burst.intervals_until_growth("encoder"), 2, "intervals", True),
        Bar("requests without their whole answer", float(calm.num_lost + burst.num_lost), 0, "requests", True),
        Bar("encoders at the end, over those before the burst", after / before, 1.0, "times", True),
    )
    rows = [
        ["run", "text TTFT p50 (ms)", "p99", "picture p50", "p99", "encoders", "workers", "encoder s", "moved", "lost"]
    ]
    for run in (calm, burst, fixed):
        sizes = ["/".join(str(run.size(kind, at_s)) for at_s in (begun_s, run.peak_s(kind), end_s)) for kind in KINDS]
        times = [run.ttft_ms(kind, share) for kind in ("text", scenario.picture) for share in (0.5, 0.99)]
        rows.append(
            [
                run.label,
                *(f"{time_ms:.0f}" for time_ms in times),
                *sizes,
                f"{run.member_s('encoder'):.0f}",
                str(run.num_moved),
                str(run.num_lost),
            ]
        )
    text = (
        f"{scenario.text_rate:g} texts and {scenario.image_rate:g} pictures per second for {end_s:g} s, and "
        f"{scenario.factor:g} times as many pictures from {begun_s:g} s to {scenario.burst_until_s:g} s. A member "
        f"takes {scenario.startup_s:g} s to start. Sizes are those when the burst begins, the largest and the last. "
        "Times are of the requests since the burst began."
    )
    changes = [f"{one.at_s:g} s: the {one.kind}s {one.told}" for one in burst.changes]
    return Experiment(
        "autoscaling", (text, rows, *changes), bars, tuple(summarise(run.result) for run in (calm, burst))
    )


# ---------------------------------------------------------------- sizes


def sizing(scale: ChoiceScale, goal: SizeGoal | None = None) -> Experiment:
    """Counts the encoders that several mixes need beside the workers of the scale, whose members are all alike."""
    goal = goal or SizeGoal()
    settings = replace(scale.settings(), num_encoders=1)
    workload = WorkloadSpec(scale.num_requests, 1.0, mean_prompt=600)
    results = size_cases(settings, workload, goal, scale.num_processes)
    rows = [
        ["hardware", "mix", "requests/s", "encoders", "at least", "met", "media TTFT (ms)", "encoders busy", "one less"]
    ]
    rows += [_sizing_row(one) for one in results]
    found = [(one.smallest.num_encoders, max(one.least_encoders, 1)) for one in results if one.smallest is not None]
    most = max(encoders / least for encoders, least in found)
    bar = Bar("encoders, over those that the work of the mix fills", most, 2.0, "times", is_max=True)
    text = (
        f"Encoders beside {scale.num_workers} workers at {LOAD:.0%} of what these bear, so that {goal.share:.0%} of "
        f"the texts and of the requests with media have their first token within {goal.ttft_s:g} s and further ones "
        f"{goal.tpot_s:g} s apart. `at least` counts the encoders that the work would fill; the last column is the "
        f"share of requests in time with one encoder less. {scale.num_requests:,} requests each."
    )
    return Experiment("sizing", (text, rows), (bar,))


def _sizing_row(one: SizingResult) -> list[str]:
    row = [one.hardware.name, one.case.name, f"{one.rate:.1f}"]
    if one.smallest is None:
        return [*row, "none meets it", str(one.least_encoders), "-", "-", "-", "-"]
    return [
        *row,
        str(one.smallest.num_encoders),
        str(one.least_encoders),
        f"{one.smallest.share_met:.1%}",
        f"{one.smallest.media_ttft_ms:.0f}",
        f"{one.smallest.encoder_busy:.0%}",
        "-" if one.one_less is None else f"{one.one_less.share_met:.1%}",
    ]


# ---------------------------------------------------------------- large clusters


def large(scale: ChoiceScale) -> Experiment:
    """Runs large clusters with the joint plan at 80 % load, and tells how long their simulations take. They are those
    of `weft simulate run`: all members are alike, and no content comes twice. Reports come as rarely as routers of
    production ask for in a cluster of that size."""
    runs = _large_runs(scale)
    rows = [
        [
            "cluster",
            "requests",
            "failed",
            "requests/s",
            "TTFT p50 (ms)",
            "p90",
            "p99",
            "steps",
            "planned",
            "stretches",
            "events",
            "processor (s)",
            "wall (min)",
        ]
    ]
    bars, summaries = [], []
    for run, result in zip(runs, run_all(runs, scale.num_processes), strict=True):
        summary = summarise(result)
        summaries.append(summary)
        rows.append(
            [
                run.label,
                f"{len(result.outcomes):,}",
                str(sum(not one.is_served for one in result.outcomes)),
                f"{run.workload.rate:.0f}",
                *(f"{one:.0f}" for one in (summary.ttft.p50, summary.ttft.p90, summary.ttft.p99)),
                *(f"{one:,}" for one in (result.num_steps, result.num_planned, result.num_stretches)),
                f"{result.num_events:,}",
                f"{result.cpu_s:.0f}",
                f"{result.wall_s / 60:.1f}",
            ]
        )
        what = f"{run.workload.num_requests:,} requests on {run.label}: wall time"
        bars.append(Bar(what, result.wall_s / 60, LARGE_MINUTES, "min", is_max=True))
    text = f"Joint plan at 80 % load, {scale.num_processes} runs at once; wall time counts the building of the cluster."
    return Experiment("large", (text, rows), tuple(bars), tuple(summaries))


def _large_runs(scale: ChoiceScale) -> list[SimRun]:
    runs = []
    for num_requests, num_workers, num_encoders in scale.large_runs:
        spacing_s = (num_workers + num_encoders) / MAX_REPORTS_PER_S
        settings = ClusterSettings(
            load_table("omniconnector-a100"),
            num_workers,
            num_encoders,
            seed=scale.seed,
            block_size=32,
            num_blocks=4096,
            report_spacing_s=spacing_s,
            report_interval_s=max(0.2, spacing_s),
        )
        workload = at_load(settings, WorkloadSpec(num_requests, 1.0, MIX, mean_prompt=600), 0.8)
        runs.append(SimRun(f"{num_workers} workers, {num_encoders} encoders", settings, workload, scale.seed))
    return runs


EXPERIMENTS: Mapping[str, Callable[[ChoiceScale], Experiment]] = {
    "policies": policies,
    "curve": curve,
    "chance": chance,
    "oracle": oracle,
    "staleness": staleness,
    "recovery": recovery,
    "isolation": isolation,
    "autoscaling": autoscaling,
    "sizing": sizing,
    "large": large,
}
ONLY_BY_NAME = ("autoscaling", "sizing", "large")
"""Lists the experiments that run only if they are named, because they take long."""

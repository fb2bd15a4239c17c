"""Runs the joint plan and the sequential policies over what might decide between them: load, slow members, media,
encoders that are as busy as the workers, the network, and the places of encoders.

Each value on an axis is a `CurvePoint`. All policies run the same requests, with several random seeds, whose requests
are counted together. The module knows nothing of how a run works, and of no experiment but this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np

from loadtest.report_page import Plot, Table
from loadtest.simulator.policies import SEQUENTIAL
from loadtest.simulator.sim_cluster import ClusterSettings, SimResult
from loadtest.simulator.sim_report import WARM_UP
from loadtest.simulator.sim_requests import Outcome
from loadtest.simulator.sim_runs import LeastWork, SimRun, at_load, capacity, num_full_encoders, run_all
from loadtest.simulator.workloads import WorkloadSpec

LOADS = (0.5, 0.8, 0.95, 1.05)
NETWORKS = (12e9, 1.25e9, 0.3e9)
"""Holds bytes per second between machines: those of the cost table, and of Ethernet at 10 and at 2.5 Gbit/s."""
SMALL_MACHINE = 4
"""Counts the workers of a machine where the points are about machines."""
NAMES = ("joint", *SEQUENTIAL)


class CurvePoint(NamedTuple):
    """A `CurvePoint` is one value on one axis of the curve."""

    axis: str
    x: float
    settings: ClusterSettings
    workload: WorkloadSpec


class PolicyFigures(NamedTuple):
    """Holds what one policy did at one point, over all seeds; times are milliseconds."""

    p99: float
    mean: float
    seed_p99s: tuple[float, ...]
    media_p99: float
    """This is the largest p99 over the kinds with media that have at least 20 requests."""
    bound_p99: float
    worker_busy: float
    encoder_busy: float

    @classmethod
    def of(cls, results: Sequence[SimResult]) -> PolicyFigures:
        """Returns the figures of runs that differ in their seeds only."""
        runs = [_served(each) for each in results]
        served = [one for run in runs for one in run]
        kinds = sorted({one.kind for one in served} - {"text"})
        of_kinds = [[one.first_token_s for one in served if one.kind == kind] for kind in kinds]
        times = [one.first_token_s for one in served]
        return cls(
            p99=_p99(times),
            mean=1e3 * float(np.mean(times)),
            seed_p99s=tuple(_p99([one.first_token_s for one in run]) for run in runs),
            media_p99=max((_p99(of_kind) for of_kind in of_kinds if len(of_kind) >= 20), default=0.0),
            bound_p99=_p99([one.lower_bound_s for one in served]),
            worker_busy=float(np.mean([each.worker_busy for each in results])),
            encoder_busy=float(np.mean([each.encoder_busy for each in results])),
        )


def _served(result: SimResult) -> list[Outcome]:
    return [one for one in result.outcomes[int(WARM_UP * len(result.outcomes)) :] if one.is_served]


def _p99(seconds: Sequence[float]) -> float:
    return 1e3 * float(np.percentile(seconds, 99))


def curve_parts(
    points: Sequence[CurvePoint], seeds: Sequence[int], num_processes: int
) -> tuple[str | Table | Plot, ...]:
    """Runs all points, and returns a text, one table and a plot for each axis. A point that is on two axes runs
    once."""
    unique: list[tuple[ClusterSettings, WorkloadSpec]] = []
    for one in points:
        if (one.settings, one.workload) not in unique:
            unique.append((one.settings, one.workload))
    runs = [
        SimRun(name, replace(settings, policy=name, seed=seed), workload, seed)
        for settings, workload in unique
        for name in NAMES
        for seed in seeds
    ]
    results, figures = run_all(runs, num_processes), dict[tuple[int, str], PolicyFigures]()
    for number in range(len(unique)):
        for of_name, name in enumerate(NAMES):
            first = (number * len(NAMES) + of_name) * len(seeds)
            figures[number, name] = PolicyFigures.of(results[first : first + len(seeds)])
    rows, ratios = [list(_HEADINGS)], []
    axis_to_lines: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for one in points:
        number = unique.index((one.settings, one.workload))
        found = {name: figures[number, name] for name in NAMES}
        ratios.append(found["joint"].p99 / min(found[name].p99 for name in SEQUENTIAL))
        rows.append(_row(one, found, ratios[-1]))
        lines = axis_to_lines.setdefault(one.axis, {name: [] for name in NAMES})
        for name, of_policy in found.items():
            lines[name].append((one.x, of_policy.p99))
    plots = [
        Plot(f"curve-{axis.split()[0].lower()}", f"TTFT p99 over: {axis}", axis, "ms", lines)
        for axis, lines in axis_to_lines.items()
    ]
    text = (
        "The 99th percentile of the time to first token, of the joint plan and of the sequential policies. The joint "
        f"plan takes {min(ratios):.2f} to {max(ratios):.2f} times that of the best sequential policy; the geometric "
        f"mean over all points is {np.exp(np.mean(np.log(ratios))):.2f}. Beside each ratio are the least and the "
        "largest of single seeds, which say how far chance goes. The load is a share of the least work "
        "(`sim_runs.capacity`), so that the real one is higher."
    )
    return (text, rows, *plots)


_HEADINGS = (
    "axis",
    "value",
    "requests/s",
    *(f"{name} p99 (ms)" for name in NAMES),
    "joint / best sequential",
    "of single seeds",
    "mean ratio",
    "media p99 ratio",
    "bound p99",
    "workers busy",
    "encoders busy",
)


def _row(one: CurvePoint, found: Mapping[str, PolicyFigures], ratio: float) -> list[str]:
    joint, others = found["joint"], [found[name] for name in SEQUENTIAL]
    by_seed = [p99 / min(other.seed_p99s[number] for other in others) for number, p99 in enumerate(joint.seed_p99s)]
    return [
        one.axis,
        f"{one.x:g}",
        f"{one.workload.rate:.0f}",
        *(f"{found[name].p99:.0f}" for name in NAMES),
        f"{ratio:.2f}",
        f"{min(by_seed):.2f} to {max(by_seed):.2f}",
        f"{joint.mean / min(other.mean for other in others):.2f}",
        f"{joint.media_p99 / max(min(other.media_p99 for other in others), 1e-9):.2f}",
        f"{joint.bound_p99:.0f}",
        f"{joint.worker_busy:.0%}",
        f"{joint.encoder_busy:.0%}",
    ]


# ---------------------------------------------------------------- the points


def curve_points(
    base: ClusterSettings,
    workload: WorkloadSpec,
    media_mix: Mapping[str, float],
    loads: Sequence[float] = LOADS,
) -> list[CurvePoint]:
    """Returns the points around a cluster and a workload. `media_mix` holds the shares of kinds among the conversations
    with media."""
    points = [CurvePoint("load", load, base, at_load(base, workload, load)) for load in loads]

    def add(axis: str, x: float, settings: ClusterSettings, spec: WorkloadSpec = workload) -> None:
        points.append(CurvePoint(axis, x, settings, at_load(settings, spec, 0.8)))

    for factor in (1.0, 2.0, 4.0):
        slow = replace(base, worker_slowness=(1.0, 1.0, 1.0, factor), encoder_slowness=(1.0, 1.0, factor))
        add("slowness of the slow members", factor, slow)
    for share in (0.1, 0.3, 0.9):
        spec = workload if share == 0.3 else _with_media(workload, media_mix, share)
        add("share of conversations with media", share, base, spec)
    for factor in (1.0, 8.0, 16.0):
        add("times that encoding takes", factor, with_encoding(base, factor))
    for bytes_per_s in NETWORKS:
        add("bytes per second of the network", bytes_per_s, with_network(base, bytes_per_s))
    return [*points, *_points_of_both_stages(base, workload, media_mix), *_points_of_places(base, workload, media_mix)]


def _points_of_both_stages(
    base: ClusterSettings, workload: WorkloadSpec, media_mix: Mapping[str, float]
) -> list[CurvePoint]:
    """Returns points at which encoders have as much to do as workers, or a stated part of it."""
    points: list[CurvePoint] = []

    def add(axis: str, x: float, settings: ClusterSettings, spec: WorkloadSpec, share: float) -> None:
        loaded = with_encoder_load(settings, spec, share)
        points.append(CurvePoint(axis, x, loaded, at_load(loaded, spec, 0.8)))

    machines = replace(base, machine_size=SMALL_MACHINE, encoders_stand="both")
    for share in (0.25, 0.5, 1.0):
        add("encoders' load over the workers' load", share, base, workload, share)
    for bytes_per_s in NETWORKS:
        axis = "network with both stages loaded and some encoders apart (bytes/s)"
        add(axis, bytes_per_s, with_network(machines, bytes_per_s), workload, 1.0)
    for share in (0.6, 0.9):
        add("conversations with media, both stages loaded", share, base, _with_media(workload, media_mix, share), 1.0)
    return points


def _points_of_places(
    base: ClusterSettings, workload: WorkloadSpec, media_mix: Mapping[str, float]
) -> list[CurvePoint]:
    """Returns points with many media, small machines and slow networks, at which the place of an encoder matters."""
    points: list[CurvePoint] = []
    spec = _with_media(workload, media_mix, 0.6)

    def add(axis: str, x: float, settings: ClusterSettings, workload: WorkloadSpec = spec) -> None:
        points.append(CurvePoint(axis, x, settings, at_load(settings, workload, 0.8)))

    half = replace(base, machine_size=SMALL_MACHINE, num_encoders=max(1, base.num_workers // SMALL_MACHINE // 2))
    crossed = with_encoder_load(with_crossed_machines(base), spec, 0.5)
    for bytes_per_s in NETWORKS:
        add("half of the machines have an encoder: network (bytes/s)", bytes_per_s, with_network(half, bytes_per_s))
    for bytes_per_s in NETWORKS:
        axis = "machines with fast encoders have slow workers: network (bytes/s)"
        add(axis, bytes_per_s, with_network(crossed, bytes_per_s))
    slow = with_network(crossed, NETWORKS[-1])
    for share in (0.6, 0.9):
        add("repeated share of media, slow network", share, slow, replace(spec, shared_media=share))
    for turns in (1.0, 4.0):
        add("turns of a conversation, slow network", turns, slow, replace(spec, mean_turns=turns))
    return points


def _with_media(workload: WorkloadSpec, media_mix: Mapping[str, float], share: float) -> WorkloadSpec:
    """Returns the workload with this share of conversations with media."""
    shares = {kind: share * part for kind, part in media_mix.items()}
    return replace(workload, kind_to_share=shares | {"text": 1.0 - share})


def with_encoding(settings: ClusterSettings, factor: float) -> ClusterSettings:
    """Returns the cluster with encoders on which everything takes this many times as long: those of smaller devices, or
    those of a language model that is smaller by as much."""
    return replace(settings, encoder_slowness=tuple(factor * one for one in settings.encoder_slowness or (1.0,)))


def with_encoder_load(settings: ClusterSettings, workload: WorkloadSpec, share: float) -> ClusterSettings:
    """Returns the cluster with encoders of such a speed that their load is this share of the workers' load. With a
    share of 1, both stages limit the capacity alike. The workload must have media."""
    of_workers = capacity(replace(settings, num_encoders=0), workload)
    of_encoders = num_full_encoders(settings) / LeastWork.of(settings.table, workload).encode_s
    return with_encoding(settings, share * of_encoders / of_workers)


def with_network(settings: ClusterSettings, bytes_per_s: float) -> ClusterSettings:
    """Returns the cluster with this network between machines."""
    links = dict(settings.table.links)
    links["network"] = msgspec.structs.replace(links["network"], bytes_per_s=bytes_per_s)
    return replace(settings, table=msgspec.structs.replace(settings.table, links=links))


def with_crossed_machines(settings: ClusterSettings) -> ClusterSettings:
    """Returns the cluster on small machines, of which every second one has slow workers and fast encoders, and the
    others the reverse. So no machine has the best of both."""
    num_machines = -(-settings.num_workers // SMALL_MACHINE)
    workers = tuple(2.0 - index // SMALL_MACHINE % 2 for index in range(2 * SMALL_MACHINE))
    encoders = tuple(1.0 + index % 2 for index in range(num_machines))
    return replace(settings, machine_size=SMALL_MACHINE, worker_slowness=workers, encoder_slowness=encoders)

"""Runs `weft bench costs`: measures how well the router learns costs, and what that takes.

A small world on a virtual clock holds workers that serve one request after another. Each request goes to the worker for
which `Learning`, the production code, predicts the earliest end, and only that worker's time is observed. The world
knows no prefix cache, no batching and no media: what a prediction is worth in a cluster is for `weft simulate` to say.

The bench also measures how far off a shared link is learned, and the processor time of a refresh for a large cluster.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from fabric.contracts import EngineStats, FeatureStats, Member, MemberId, PullTime, PullWindow, WorkerReport
from loadtest.bench_result import Bar, BenchResult
from router.planning import CostDefaults, Learning, Line, LinkClass

NUM_WORKERS = 16
NUM_REQUESTS = 20_000
LOAD = 0.8
TRUTH = Line(0.02, 1e-4)
LINK = Line(4e-4, 1 / 8e9)
MIB = 2**20


def run(options: Sequence[str] = ()) -> BenchResult:
    parser = argparse.ArgumentParser(prog="weft bench costs", allow_abbrev=False)
    parser.add_argument(
        "--requests", type=int, default=NUM_REQUESTS, help="sends this many requests through each drift"
    )
    asked = parser.parse_args(options)
    rows = [["drift", "median error", "P90 error", "P50 (ms)", "P99 (ms)", "back under 10 % after"]]
    bars: list[Bar] = []
    for name, drift in DRIFTS.items():
        outcome = run_drift(drift, asked.requests)
        back = str(outcome.num_until_right) if outcome.num_until_right is not None else "-"
        rows.append(
            [
                name,
                f"{100 * outcome.median_error:.1f} %",
                f"{100 * outcome.p90_error:.1f} %",
                f"{1e3 * outcome.p50_s:.0f}",
                f"{1e3 * outcome.p99_s:.0f}",
                back,
            ]
        )
        if name == CHANGE and outcome.num_until_right is not None:
            bar = "requests until the error is under 10 % again, all workers twice as slow"
            bars.append(Bar(bar, outcome.num_until_right, 200, "requests", is_max=True))
    for num_pulls in (1, 4, 8):
        error = 100 * abs(learned_link(num_pulls).per_unit_s / LINK.per_unit_s - 1.0)
        bars.append(Bar(f"error of the learned beta, {num_pulls} pulls side by side", error, 10, "%", is_max=True))
    bars.append(Bar("refresh of 1,000 workers and 200 encoders, p50", refresh_ms(), 2, "ms CPU", is_max=True))
    notes = [
        f"{NUM_WORKERS} workers at {100 * LOAD:.0f} % load (where all become slower, at half of that), times with 10 % "
        "of noise; an error is that of a request's own predicted time",
    ]
    return BenchResult(rows, bars, notes)


# ------------------------------------------------------------ drifts


class Moment(NamedTuple):
    """A `Moment` is what a drift depends on."""

    worker: int
    at: float
    """Says where in the run the request is, from 0 to 1."""
    rng: random.Random


class Drift(NamedTuple):
    """A `Drift` is how the costs of the workers change."""

    cost: Callable[[Moment], tuple[float, float]]
    """Returns the factor on a worker's cost, and a pause in seconds on top of it."""
    load: Callable[[float], float] = lambda _: LOAD
    """Returns the share of the workers' time that the requests take, by the place in the run."""


def _steady(_: Moment) -> tuple[float, float]:
    return 1.0, 0.0


def _all_slower(moment: Moment) -> tuple[float, float]:
    return (2.0 if moment.at >= 0.5 else 1.0), 0.0


def _one_slow(moment: Moment) -> tuple[float, float]:
    return (4.0 if moment.worker == 0 else 1.0), 0.0


def _slow_for_a_while(moment: Moment) -> tuple[float, float]:
    return (8.0 if moment.worker < NUM_WORKERS // 2 and 0.3 <= moment.at < 0.35 else 1.0), 0.0


def _pauses(moment: Moment) -> tuple[float, float]:
    return 1.0, moment.rng.uniform(0.2, 2.0) if moment.rng.random() < 0.01 else 0.0


def _bursts_of_pauses(moment: Moment) -> tuple[float, float]:
    is_burst = int(moment.at * 200) % 10 == 0 and moment.worker == int(moment.at * 20) % NUM_WORKERS
    return 1.0, moment.rng.uniform(0.2, 2.0) if is_burst else 0.0


CHANGE = "all workers twice as slow from the middle on"
DRIFTS = {
    "steady": Drift(_steady),
    CHANGE: Drift(_all_slower, lambda _: LOAD / 2),
    "one worker four times as slow": Drift(_one_slow),
    "half of the workers eight times as slow for a while": Drift(_slow_for_a_while),
    "the same at 5 % load, and then 80 %": Drift(_slow_for_a_while, lambda at: 0.05 if at < 0.5 else LOAD),
    "a pause in every hundredth request": Drift(_pauses),
    "bursts of pauses on one worker at a time": Drift(_bursts_of_pauses),
}


class DriftOutcome(NamedTuple):
    median_error: float
    p90_error: float
    p50_s: float
    p99_s: float
    num_until_right: int | None
    """Counts the requests from the middle of the run until the median error of 25 in a row is under a tenth."""


def run_drift(drift: Drift, num_requests: int) -> DriftOutcome:
    """Runs one world. Latencies are from arrival to end; errors compare a request's own predicted time with the actual
    one."""
    rng = random.Random(7)
    learning = Learning(CostDefaults(), 6144.0)
    states = [learning.new_worker(_member("worker", f"w{number}")) for number in range(NUM_WORKERS)]
    rows = np.array([learning.worker_row(state.member.member_id) for state in states])
    free_s, booked_s = [0.0] * NUM_WORKERS, np.zeros(NUM_WORKERS)
    under_way: list[list[tuple[float, float]]] = [[] for _ in states]
    errors: list[float] = []
    latencies: list[float] = []
    mean_s = TRUTH.at(500.0)
    now = 0.0
    for number in range(num_requests):
        now += rng.expovariate(drift.load(number / num_requests) * NUM_WORKERS / mean_s)
        learning.refresh(now)
        for worker, ended in enumerate(under_way):
            while ended and ended[0][0] <= now:
                booked_s[worker] -= ended.pop(0)[1]
        tokens = rng.choice([100.0, 300.0, 500.0, 1100.0])
        own_s = learning.believed.workers[0, 0, rows] + tokens * learning.believed.workers[0, 1, rows]
        waits_s = booked_s + own_s
        near = np.flatnonzero(waits_s <= waits_s.min() + 0.02 * own_s.min())
        worker = int(rng.choice(near.tolist()))
        factor, pause_s = drift.cost(Moment(worker, number / num_requests, rng))
        actual_s = factor * TRUTH.at(tokens) * rng.uniform(0.9, 1.1)
        free_s[worker] = max(free_s[worker], now) + actual_s + pause_s
        booked_s[worker] += own_s[worker]
        under_way[worker].append((free_s[worker], float(own_s[worker])))
        states[worker].prefill.observe(tokens, actual_s + pause_s, now)
        if not pause_s:
            errors.append(abs(float(own_s[worker]) / actual_s - 1.0))
        else:
            errors.append(errors[-1] if errors else 0.0)  # No estimate can know of a pause.
        latencies.append(free_s[worker] - now)
    warm = num_requests // 20
    half = num_requests // 2
    settled = (at for at in range(half, num_requests - 25) if median(errors[at : at + 25]) < 0.1)
    until = next(settled, None)
    ordered = sorted(latencies[warm:])
    return DriftOutcome(
        median(errors[warm:]),
        sorted(errors[warm:])[int(0.9 * len(errors[warm:]))],
        ordered[len(ordered) // 2],
        ordered[int(0.99 * len(ordered))],
        None if until is None else until - half,
    )


# ------------------------------------------------------------ links and refreshes


def learned_link(num_pulls: int) -> Line:
    """Returns what is learned of a link on which `num_pulls` pulls always run side by side."""
    rng, learning = random.Random(num_pulls), Learning(CostDefaults(), 6144.0)
    learning.new_worker(_member("worker", "w0", "host-1"))
    learning.new_encoder(_member("encoder", "e0", "host-2"))
    for seq in range(300):
        sizes = sorted(rng.choice([0.25, 1, 4, 16]) * MIB for _ in range(num_pulls))
        pulls, at_s, moved = [], LINK.base_s, 0.0
        for index, size in enumerate(sizes):  # Equal shares: the smallest ends first, and the others go on faster.
            at_s += (size - moved) * (num_pulls - index) * LINK.per_unit_s
            moved = size
            pulls.append(PullTime("e0", int(size), 0.0, at_s * rng.uniform(0.97, 1.03)))
        report = WorkerReport(
            MemberId("w0"), 1, seq, (), EngineStats(), FeatureStats(), pulls=(PullWindow(tuple(pulls)),)
        )
        learning.observe_report(report, 0.1 * seq)
    return learning.links()[LinkClass.TCP]


def refresh_ms() -> float:
    """Returns the median processor time of a refresh for 1,000 workers and 200 encoders of three modalities."""
    rng, learning = random.Random(0), Learning(CostDefaults(), 6144.0)
    workers = [learning.new_worker(_member("worker", f"w{number}")) for number in range(1000)]
    for worker in workers:
        worker.prefill.observe(100.0, rng.uniform(0.01, 0.1), 0.0)
    for number in range(200):
        cost = learning.new_encoder(_member("encoder", f"e{number}")).cost
        for modality in ("image", "video", "audio"):
            cost.observe_decode(modality, 256, rng.uniform(0.01, 0.1), 0.0)
            cost.observe_encode(modality, 256, rng.uniform(0.01, 0.1), 0.0)
    taken: list[float] = []
    for number in range(200):
        workers[number].prefill.observe(100.0, rng.uniform(0.01, 0.1), float(number))
        started_s = time.thread_time()
        assert learning.refresh(1.0 + number), "a cost has changed"
        taken.append(time.thread_time() - started_s)
    return 1e3 * median(taken)


def _member(kind: str, name: str, host: str = "host") -> Member:
    return Member(MemberId(name), kind, f"address-{name}", host, 1)

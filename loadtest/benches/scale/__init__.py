"""Runs `weft bench scale`, which shows that the cost of one event does not grow with what is stored or waiting.

Each module of this folder other than `scale_case`, which defines what a case is, holds the cases of one part of the
project in a tuple `CASES`: `encoder_pool_cases`, `receiver_cases`, `router_cases` and `scheduling_cases`. A case is
prepared at two sizes ten times apart, and the two are measured in turn for several rounds; the bar is the ratio of the
medians. The folder knows nothing of whole requests.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import pkgutil
import statistics
import time
from collections.abc import Iterator, Sequence

from loadtest.bench_result import Bar, BenchResult
from loadtest.benches.scale.scale_case import ScaleCase

__all__ = ["run"]

GROWTH = 10
"""The large size is this many times the small one."""
MAX_RATIO = 1.5
"""An event may cost this many times as much at the large size: logarithmic growth passes, linear growth does not."""


def run(options: Sequence[str] = ()) -> BenchResult:
    """Measures every case, or those whose names contain `--only`. Times are CPU times of this thread."""
    parser = argparse.ArgumentParser(prog="weft bench scale")
    parser.add_argument("--only", default="", help="measures only the cases whose names contain this text")
    parser.add_argument("--rounds", type=int, default=7, help="measures both sizes this many times, in turn")
    chosen = parser.parse_args(list(options))
    rows = [["event", "small", "large", "µs per event at small", "at large", "ratio"]]
    bars = []
    for case in _all_cases():
        if chosen.only not in case.name:
            continue
        small_s, large_s = _measure(case, chosen.rounds)
        ratio = large_s / small_s
        rows.append(
            [
                case.name,
                str(case.small),
                str(case.small * GROWTH),
                f"{small_s * 1e6:.1f}",
                f"{large_s * 1e6:.1f}",
                f"{ratio:.2f}",
            ]
        )
        bars.append(Bar(f"{case.name}: cost at ten times the size", ratio, MAX_RATIO, "x", is_max=True))
    notes = ["Each time is the median over the rounds of a round's CPU time per event, both sizes measured in turn."]
    return BenchResult(rows, bars, notes, variant="partial" if chosen.only else "")


def _all_cases() -> Iterator[ScaleCase]:
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        if module.name != "scale_case":
            yield from importlib.import_module(f"{__name__}.{module.name}").CASES


def _measure(case: ScaleCase, num_rounds: int) -> tuple[float, float]:
    """Returns the median CPU seconds per event at the small and at the large size. The state of each size is prepared
    once; the first round of each size only warms up and is not counted."""
    size_to_run = {size: case.prepare(size) for size in (case.small, case.small * GROWTH)}
    size_to_costs: dict[int, list[float]] = {size: [] for size in size_to_run}
    gc.collect()
    gc.disable()  # a collection walks the whole heap, so its time belongs to no single event
    try:
        for _ in range(num_rounds + 1):
            for size, run_events in size_to_run.items():
                start = time.thread_time()
                num_events = run_events()
                size_to_costs[size].append((time.thread_time() - start) / num_events)
    finally:
        gc.enable()
    small_s, large_s = (statistics.median(costs[1:]) for costs in size_to_costs.values())
    return small_s, large_s

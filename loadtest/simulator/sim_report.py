"""Turns the results of simulations into numbers, tables and plots.

`Summary` holds the numbers of one run, and `loadtest.report_page` makes a page of them. The module knows nothing of
how a result comes about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from loadtest.report_page import Percentiles, Plot
from loadtest.simulator.sim_cluster import SimResult
from loadtest.simulator.sim_requests import Outcome

WARM_UP = 0.05
"""This share of the requests, the first ones of a run, is part of no percentile, because the cluster is empty then."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A `Summary` holds the numbers of one run."""

    policy: str
    num_requests: int
    num_failed: int
    requests_per_s: float
    tokens_per_s: float
    ttft: Percentiles
    kind_to_ttft: Mapping[str, Percentiles]
    tpot: Percentiles
    total: Percentiles
    """Holds the percentiles of the time from arrival to the last token."""
    bound: Percentiles
    """Holds the percentiles of the predicted times on empty queues, which no policy can beat by much."""
    overlap: float
    """Holds the median of bound / actual."""
    prediction_median: float
    """Holds the median relative error of the predicted time to first token."""
    prediction_p90: float
    hit_share: float
    """Holds the share of prompt tokens that were found in prefix caches."""
    worker_busy: float
    encoder_busy: float
    num_steps: int
    num_planned: int
    cpu_s: float


def summarise(result: SimResult, warm_up: float = WARM_UP) -> Summary:
    """Returns the numbers of a run without its first requests."""
    outcomes = result.outcomes[int(warm_up * len(result.outcomes)) :]
    served = [one for one in outcomes if one.is_served]
    begin_s = min((one.arrival_s for one in served), default=0.0)
    end_s = max((one.arrival_s + one.end_s for one in served), default=1.0)
    span_s = max(end_s - begin_s, 1e-9)
    errors = [abs(one.predicted_s - one.first_token_s) / one.first_token_s for one in served if one.first_token_s > 0]
    bounds = [one.lower_bound_s / one.first_token_s for one in served if one.first_token_s > 0]
    kinds = dict.fromkeys(one.kind for one in served)
    return Summary(
        policy=result.policy,
        num_requests=len(result.outcomes),
        num_failed=sum(not one.is_served for one in result.outcomes),
        requests_per_s=len(served) / span_s,
        tokens_per_s=sum(one.num_tokens for one in served) / span_s,
        ttft=_ttft(served, lambda one: True),
        kind_to_ttft={kind: _ttft(served, lambda one, kind=kind: one.kind == kind) for kind in sorted(kinds)},  # type: ignore[misc]
        tpot=Percentiles.of([one.token_s for one in served if one.num_tokens > 1]),
        total=Percentiles.of([one.end_s for one in served]),
        bound=Percentiles.of([one.lower_bound_s for one in served]),
        overlap=float(np.median(bounds)) if bounds else 0.0,
        prediction_median=float(np.median(errors)) if errors else 0.0,
        prediction_p90=float(np.percentile(errors, 90)) if errors else 0.0,
        hit_share=sum(one.num_cached for one in served) / max(sum(one.num_prompt for one in served), 1),
        worker_busy=result.worker_busy,
        encoder_busy=result.encoder_busy,
        num_steps=result.num_steps,
        num_planned=result.num_planned,
        cpu_s=result.cpu_s,
    )


def _ttft(served: Sequence[Outcome], is_meant: Callable[[Outcome], bool]) -> Percentiles:
    return Percentiles.of([one.first_token_s for one in served if is_meant(one)])


def summary_table(summaries: Sequence[Summary]) -> list[list[str]]:
    """Returns one row per run."""
    rows = [
        [
            "policy",
            "requests/s",
            "TTFT p50 (ms)",
            "p90",
            "p99",
            "TPOT p50 (ms)",
            "bound p99",
            "bound/actual",
            "prediction error p50",
            "cached",
            "workers busy",
            "encoders busy",
            "failed",
        ]
    ]
    rows += [
        [
            one.policy,
            f"{one.requests_per_s:.1f}",
            f"{one.ttft.p50:.0f}",
            f"{one.ttft.p90:.0f}",
            f"{one.ttft.p99:.0f}",
            f"{one.tpot.p50:.1f}",
            f"{one.bound.p99:.0f}",
            f"{one.overlap:.2f}",
            f"{one.prediction_median:.0%}",
            f"{one.hit_share:.0%}",
            f"{one.worker_busy:.0%}",
            f"{one.encoder_busy:.0%}",
            str(one.num_failed),
        ]
        for one in summaries
    ]
    return rows


def kind_table(summaries: Sequence[Summary]) -> list[list[str]]:
    """Returns the percentiles of each kind of request, one row per run and kind."""
    rows = [["policy", "kind", "requests", "TTFT p50 (ms)", "p90", "p99"]]
    for one in summaries:
        rows += [
            [one.policy, kind, str(ttft.count), f"{ttft.p50:.0f}", f"{ttft.p90:.0f}", f"{ttft.p99:.0f}"]
            for kind, ttft in one.kind_to_ttft.items()
        ]
    return rows


def as_json(summary: Summary) -> dict[str, Any]:
    return asdict(summary)


def distribution_plot(results: Sequence[SimResult], name: str = "ttft") -> Plot:
    """Returns the share of requests that had to wait longer than a time, per run."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        outcomes = result.outcomes[int(WARM_UP * len(result.outcomes)) :]
        times = np.sort([1e3 * one.first_token_s for one in outcomes if one.is_served])
        if len(times):
            at = np.unique(np.geomspace(1, len(times), 200).astype(int))
            lines[result.policy] = [(float(times[len(times) - k]), k / len(times)) for k in at.tolist()]
    return Plot(name, "Time to first token", "ms", "share of requests that waited longer", lines, is_log=True)

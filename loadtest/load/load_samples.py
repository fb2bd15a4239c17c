"""Holds what was measured of each answer of a load test, and makes tables, plots and a page of many.

A `LoadSample` is one answer. `kind_rows` is the table of each kind of request, `summary_json` the same as numbers, and
`load_page` writes the page with the plots. The module knows nothing of how requests were sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadtest.report_page import Percentiles, Plot, Table, write_report


class LoadSample(msgspec.Struct, frozen=True, array_like=True):
    """A `LoadSample` is one answer. It is sent from the processes of locust that make load to the one that reports."""

    kind: str
    sent_s: float
    """Holds the moment of sending, in seconds after an epoch that all samples share."""
    late_s: float
    """Says by how much the request was sent after the moment of its arrival. If it is more than a few milliseconds,
    the sender is too busy, and its times are those of the sender."""
    ttft_s: float
    tpot_s: float
    total_s: float
    num_prompt: int
    num_output: int
    error: str = ""
    is_right: bool | None = None
    """Says whether the answer was the right one; None means that it is not known."""


def span_s(samples: Sequence[LoadSample]) -> float:
    """Returns the seconds from the first request to the last answer."""
    if not samples:
        return 0.0
    return max(one.sent_s + one.total_s for one in samples) - min(one.sent_s for one in samples)


def _by_kind(samples: Iterable[LoadSample]) -> dict[str, list[LoadSample]]:
    kinds: dict[str, list[LoadSample]] = {}
    for one in samples:
        kinds.setdefault(one.kind, []).append(one)
    return dict(sorted(kinds.items()))


def kind_rows(samples: Sequence[LoadSample]) -> list[list[str]]:
    """Returns a row for each kind of request, and one for all together."""
    heading = ["kind", "requests", "failed", "right", "requests/s", "tokens/s", "TTFT p50 (ms)", "p90", "p99"]
    rows = [[*heading, "TPOT p50 (ms)", "p99", "whole answer p50 (ms)", "p99", "late p99 (ms)"]]
    seconds = max(span_s(samples), 1e-9)
    for kind, some in [*_by_kind(samples).items(), ("all", list(samples))]:
        numbers = _numbers(some, seconds)
        ttft, tpot, total, late = (numbers[name] for name in ("ttft_ms", "tpot_ms", "total_ms", "late_ms"))
        right = numbers["right_share"]
        rows.append(
            [
                kind,
                str(numbers["requests"]),
                str(numbers["failed"]),
                "-" if right is None else f"{right:.0%}",
                f"{numbers['requests_per_s']:.2f}",
                f"{numbers['tokens_per_s']:.1f}",
                *(f"{ttft[share]:.0f}" for share in ("p50", "p90", "p99")),
                *(f"{tpot[share]:.1f}" for share in ("p50", "p99")),
                *(f"{total[share]:.0f}" for share in ("p50", "p99")),
                f"{late['p99']:.0f}",
            ]
        )
    return rows


def _numbers(samples: Sequence[LoadSample], seconds: float) -> dict[str, Any]:
    served = [one for one in samples if not one.error]
    judged = [one.is_right for one in served if one.is_right is not None]
    errors: dict[str, int] = {}
    for one in samples:
        if one.error:
            errors[one.error] = errors.get(one.error, 0) + 1
    return {
        "requests": len(samples),
        "failed": len(samples) - len(served),
        "errors": errors,
        "right_share": sum(judged) / len(judged) if judged else None,
        "requests_per_s": len(served) / seconds,
        "tokens_per_s": sum(one.num_output for one in served) / seconds,
        "prompt_tokens": sum(one.num_prompt for one in served),
        "output_tokens": sum(one.num_output for one in served),
        "ttft_ms": _percentiles([one.ttft_s for one in served]),
        "tpot_ms": _percentiles([one.tpot_s for one in served if one.num_output > 1]),
        "total_ms": _percentiles([one.total_s for one in served]),
        "late_ms": _percentiles([one.late_s for one in samples]),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    found = Percentiles.of(seconds)
    return {"p50": found.p50, "p90": found.p90, "p99": found.p99, "mean": found.mean}


def summary_json(samples: Sequence[LoadSample]) -> dict[str, Any]:
    """Returns the numbers of all requests, and of each kind."""
    seconds = span_s(samples)
    kinds = {kind: _numbers(some, max(seconds, 1e-9)) for kind, some in _by_kind(samples).items()}
    return {"seconds": seconds, **_numbers(samples, max(seconds, 1e-9)), "kinds": kinds}


# ------------------------------------------------------------ the page

NUM_BINS = 30


def load_page(
    folder: Path,
    title: str,
    samples: Sequence[LoadSample],
    series: Mapping[str, Sequence[tuple[float, float]]],
    source: str,
) -> Path:
    """Writes a page with tables and plots into the folder. `series` maps names to points (seconds, share) of how busy
    members were. Returns the path of the page."""
    first_s = min((one.sent_s for one in samples), default=0.0)
    moved = {name: [(at_s - first_s, value) for at_s, value in points] for name, points in series.items()}
    parts: list[str | Table | Plot] = [kind_rows(samples)]
    errors = summary_json(samples)["errors"] if samples else {}
    if errors:
        parts.append([["error", "requests"], *([name, str(count)] for name, count in sorted(errors.items()))])
    if samples:
        parts += [
            _over_time("ttft", "Time to first token, P90 of the requests sent at a time", samples, first_s),
            _open_plot(samples, first_s),
            _distribution(samples),
        ]
    if any(moved.values()):
        parts.append(Plot("busy", "How busy the cluster was", "s", "share", moved))
    page, _ = write_report(folder, title, parts, source)
    return page


def _over_time(name: str, title: str, samples: Sequence[LoadSample], first_s: float) -> Plot:
    width_s = max(max(one.sent_s for one in samples) - first_s, 1e-9) / NUM_BINS
    lines: dict[str, list[tuple[float, float]]] = {}
    for kind, some in _by_kind(one for one in samples if not one.error).items():
        bins: dict[int, list[float]] = {}
        for one in some:
            bins.setdefault(min(int((one.sent_s - first_s) / width_s), NUM_BINS - 1), []).append(one.ttft_s)
        lines[kind] = [(width_s * (place + 0.5), 1e3 * float(np.percentile(bins[place], 90))) for place in sorted(bins)]
    return Plot(name, title, "s", "ms", lines)


def _open_plot(samples: Sequence[LoadSample], first_s: float) -> Plot:
    """Plots how many requests were open, which grows without end if a cluster gets more than it can serve."""
    changes = sorted([(one.sent_s, 1) for one in samples] + [(one.sent_s + one.total_s, -1) for one in samples])
    counts = np.cumsum([change for _, change in changes]).tolist()
    points = [(at_s - first_s, float(count)) for (at_s, _), count in zip(changes, counts, strict=True)]
    step = max(len(points) // 400, 1)
    return Plot("open", "Open requests", "s", "requests", {"open": points[::step]})


def _distribution(samples: Sequence[LoadSample]) -> Plot:
    lines: dict[str, list[tuple[float, float]]] = {}
    for kind, some in _by_kind(one for one in samples if not one.error).items():
        times = np.sort([1e3 * one.ttft_s for one in some])
        at = np.unique(np.geomspace(1, len(times), 200).astype(int))
        lines[kind] = [(float(times[len(times) - k]), k / len(times)) for k in at.tolist()]
    return Plot("distribution", "Time to first token", "ms", "share of requests that waited longer", lines, is_log=True)

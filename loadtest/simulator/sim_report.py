"""Turns the results of simulations into numbers, tables, plots and a page.

`Summary` holds the numbers of one run. `write_report` writes an HTML page with tables and, where matplotlib is
installed (the `simulate` extra), PNG plots beside it. The module knows nothing of how a result comes about.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.simulator.sim_cluster import SimResult
from loadtest.simulator.sim_requests import Outcome

WARM_UP = 0.05
"""This share of the requests, the first ones of a run, is part of no percentile, because the cluster is empty then."""
Table = Sequence[Sequence[str]]
"""Holds rows of cells; the first row is the heading."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Holds percentiles in milliseconds; they are 0 if there was nothing to count."""

    count: int
    p50: float
    p90: float
    p99: float
    mean: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        if not seconds:
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        values = 1e3 * np.asarray(seconds)
        p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
        return cls(len(seconds), p50, p90, p99, float(values.mean()))


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


# ---------------------------------------------------------------- plots and a page


@dataclass(frozen=True, slots=True)
class Plot:
    """A `Plot` shows lines; each has a name and points (x, y)."""

    name: str
    title: str
    x_label: str
    y_label: str
    name_to_points: Mapping[str, Sequence[tuple[float, float]]]
    is_log: bool = False


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


def write_report(folder: Path, title: str, parts: Sequence[str | Table | Plot], source: str) -> tuple[Path, list[Path]]:
    """Writes `index.html` with the parts in their order: paragraphs, tables and plots. Returns the page and the plots
    that it shows; without matplotlib the page says that they are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[Path] = []
    body: list[str] = []
    for part in parts:
        if isinstance(part, str):
            body.append(f"<p>{html.escape(part)}</p>")
        elif isinstance(part, Plot):
            picture = folder / f"{part.name}.png"
            if _draw(part, picture):
                pictures.append(picture)
                body.append(f'<img src="{picture.name}" alt="{html.escape(part.title)}">')
            else:
                body.append(f"<p>{html.escape(part.title)}: install weft[simulate] to get this plot.</p>")
        else:
            body.append(_html_table(part))
    page = folder / "index.html"
    page.write_text(_PAGE.format(title=html.escape(title), body="\n".join(body), source=html.escape(source)))
    return page, pictures


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
th, td {{ border-bottom: 1px solid #ddd; padding: .25rem .7rem; text-align: right }}
th:first-child, td:first-child {{ text-align: left }}
img {{ max-width: 100%; margin: 1rem 0 }}
footer {{ color: #777; font-size: 13px }}
</style></head><body>
<h1>{title}</h1>
{body}
<footer>{source}</footer>
</body></html>
"""


def _html_table(rows: Table) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows[1:]]
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


MARKERS = "osD^vP*X<>"


def _draw(plot: Plot, path: Path) -> bool:
    """Draws a plot. Returns False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
    except ImportError:
        return False
    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (name, points) in enumerate(plot.name_to_points.items()):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        marker = MARKERS[index % len(MARKERS)] if len(points) < 40 else None
        axes.plot(xs, ys, label=name, marker=marker, linewidth=2.4 if name == "joint" else 1.5)
    if plot.is_log:
        axes.set_yscale("log")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(plot.title)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    axes.grid(visible=True, alpha=0.3, which="both" if plot.is_log else "major")
    axes.legend()
    figure.savefig(path)
    return True

"""Writes a page with tables and plots of what a run has measured or simulated.

`write_report` writes an HTML page and, where matplotlib is installed (the `simulate` extra), PNG plots beside it.
`Percentiles` are what the tables are made of. The module knows nothing of how a number came about.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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
class Plot:
    """A `Plot` shows lines; each has a name and points (x, y)."""

    name: str
    title: str
    x_label: str
    y_label: str
    name_to_points: Mapping[str, Sequence[tuple[float, float]]]
    is_log: bool = False


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

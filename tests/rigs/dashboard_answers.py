"""Answers every query of a dashboard: from a Prometheus, or with series that are made up.

Answers have Prometheus' own form (the `result` of `query_range`, or of `query` for a table) and stand by the expression
as the file of the dashboard has it, so that they stay right when panels move. The module knows nothing of how they are
drawn.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from dashboard_queries import BoardQuery, boards, panels, queries
from prometheus_process import PrometheusProcess

Answers = dict[str, list[dict[str, Any]]]
"""Maps the expression of a query, with its variables, to the series."""
MADE_UP_LABELS = {"stage": ("queue", "prefill", "held"), "modality": ("text", "image", "video")}
"""Maps a label to values that series have in made-up answers."""
LEAST_SAMPLES_PER_RATE = 4
"""Is the number of scrapes that Grafana's `$__rate_interval` covers at least."""


class BoardTime(NamedTuple):
    """A `BoardTime` is the time that a dashboard shows, in seconds since 1970, and the time between two points."""

    from_s: float
    until_s: float
    step_s: float
    rate_s: float
    """Is what `$__rate_interval` stands for."""


def board_time(from_s: float, until_s: float, scrape_s: float, num_points: int = 400) -> BoardTime:
    """Returns a time with as many points as a panel is wide, and with Grafana's rule for `$__rate_interval`: the step
    and one scrape, but at least four scrapes. Points stand at multiples of the step."""
    step_s = max(scrape_s, float(math.ceil((until_s - from_s) / num_points)))
    rate_s = max(step_s + scrape_s, LEAST_SAMPLES_PER_RATE * scrape_s)
    return BoardTime(from_s // step_s * step_s, until_s // step_s * step_s, step_s, rate_s)


def board_queries(board: str, rate_s: float) -> list[BoardQuery]:
    """Returns the queries of one dashboard."""
    return [query for query in queries(f"{rate_s:g}s") if query.board == board]


def asked(prometheus: PrometheusProcess, board: str, time: BoardTime) -> Answers:
    """Asks Prometheus every query of a dashboard. Raises AssertionError with its error if it refuses one."""
    answers: Answers = {}
    for query in board_queries(board, time.rate_s):
        if query.is_instant:
            found = prometheus.query(query.expr, time.until_s)
        else:
            found = prometheus.range(query.expr, time.from_s, time.until_s, time.step_s)
        answers[query.template] = found
    return answers


def made_up(board: str, time: BoardTime) -> Answers:
    """Returns series for every query of a dashboard, each a wave of its own that reaches the second level of its panel.
    They are the same in each call."""
    title_to_panel = {panel["title"]: panel for panel in panels(boards()[board])}
    answers: Answers = {}
    for query in board_queries(board, time.rate_s):
        most = _most(title_to_panel[query.panel]["fieldConfig"]["defaults"])
        number = ord(query.ref) - ord("A")
        series = []
        for labels in _label_sets(re.findall(r"\{\{(\w+)\}\}", query.legend)):
            wave = _wave(time, most * (number + 1) / (number + 2), len(series) + 2 * number)
            shown = {"value": wave[-1]} if query.is_instant else {"values": wave}
            series.append({"metric": labels} | shown)
        answers[query.template] = series
    return answers


def _most(defaults: dict[str, Any]) -> float:
    levels = [step["value"] for step in defaults["thresholds"]["steps"] if step["value"]]
    return float(defaults.get("max") or max(levels, default=1.0)) * (1.0 if "max" in defaults else 1.5)


def _label_sets(labels: list[str]) -> list[dict[str, str]]:
    if not labels:
        return [{}]
    name_to_values = {name: MADE_UP_LABELS.get(name, (f"{name}-1", f"{name}-2")) for name in labels}
    length = max(len(values) for values in name_to_values.values())
    return [{name: values[i % len(values)] for name, values in name_to_values.items()} for i in range(length)]


def _wave(time: BoardTime, most: float, phase: int) -> list[list[float | str]]:
    num_points = int((time.until_s - time.from_s) / time.step_s) + 1
    heights = [0.55 + 0.35 * math.sin(i / num_points * 12 + phase) + 0.1 * math.sin(i * 1.7) for i in range(num_points)]
    return [[time.from_s + i * time.step_s, str(most * height)] for i, height in enumerate(heights)]

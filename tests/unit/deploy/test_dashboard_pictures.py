"""Tests what draws the dashboards: every query of every panel is asked and answered, and every type of panel has a
component of Grafana."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest
from dashboard_answers import asked, board_time, made_up
from dashboard_queries import boards, panels
from prometheus_process import PrometheusProcess

PAGE = Path(__file__).resolve().parents[2] / "dashboards" / "page"
HOUR = board_time(0, 3600, 15)


def targets(board: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns each query with the type of its panel."""
    return [(panel["type"], target) for panel in panels(boards()[board]) for target in panel["targets"]]


def expressions(board: str) -> set[str]:
    return {target["expr"] for _, target in targets(board)}


@pytest.mark.parametrize("board", boards())
def test_every_query_of_a_dashboard_is_asked_of_prometheus(board: str) -> None:
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200, json={"status": "success", "data": {"result": [str(request.url)]}})

    with httpx.Client(base_url="http://prometheus", transport=httpx.MockTransport(answer)) as client:
        answers = asked(PrometheusProcess(client), board, HOUR)
    assert answers.keys() == expressions(board)
    assert len(requests) == len(targets(board))
    for kind, target in targets(board):
        (url,) = answers[target["expr"]]
        path, _, query = str(url).partition("?")
        assert path.endswith("/query" if kind == "table" else "/query_range")
        assert "$" not in parse_qs(query)["query"][0]


def test_a_refused_query_is_an_error_with_prometheus_words() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(400, json={"status": "error", "error": "parse error: unexpected end of input"})

    with (
        httpx.Client(base_url="http://prometheus", transport=httpx.MockTransport(refuse)) as client,
        pytest.raises(AssertionError, match="unexpected end of input"),
    ):
        asked(PrometheusProcess(client), "weft-speech", HOUR)


@pytest.mark.parametrize("board", boards())
def test_made_up_series_fill_every_panel(board: str) -> None:
    answers = made_up(board, HOUR)
    assert answers.keys() == expressions(board)
    assert answers == made_up(board, HOUR)
    for series in answers.values():
        assert series
        names = [tuple(sorted(each["metric"].items())) for each in series]
        assert len(set(names)) == len(names)
        for each in series:
            values = [float(value) for _, value in each.get("values", [each.get("value")])]
            assert min(values) >= 0
            assert len(set(values)) > 1 or "value" in each


@pytest.mark.parametrize(
    ("minutes", "scrape_s", "step_s", "rate_s"),
    [(3, 2, 2, 8), (60, 15, 15, 60), (24 * 60, 15, 216, 231), (60, 30, 30, 120)],
)
def test_a_rate_covers_four_scrapes_and_a_step(minutes: int, scrape_s: float, step_s: float, rate_s: float) -> None:
    shown = board_time(1000, 1000 + minutes * 60, scrape_s)
    assert (shown.step_s, shown.rate_s) == (step_s, rate_s)
    assert shown.from_s % step_s == shown.until_s % step_s == 0


def test_every_type_of_panel_is_drawn() -> None:
    drawn = re.search(r"TYPE_TO_DRAWING = \{([^}]*)\}", (PAGE / "panels.jsx").read_text())
    assert drawn
    types = {panel["type"] for board in boards().values() for panel in panels(board)}
    assert types <= set(re.findall(r"(\w+):", drawn[1]))


def test_the_packages_of_the_page_are_exact_and_locked() -> None:
    wanted = json.loads((PAGE / "package.json").read_text())["dependencies"]
    locked = json.loads((PAGE / "package-lock.json").read_text())["packages"]
    assert {name: locked[f"node_modules/{name}"]["version"] for name in wanted} == wanted
    assert all(each["integrity"] for name, each in locked.items() if name)
    assert "resolved" not in (PAGE / "package-lock.json").read_text(), "no lock file names a registry"

"""Tests the dashboards: the committed files are those of the code, every panel explains itself, and every expression is
valid PromQL over metrics that there are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboard_queries import FOLDER, BoardQuery, boards, panels, queries
from prometheus_tools import prometheus_tool

from deploy.grafana import BOARDS, board_json
from deploy.grafana.write_boards import write_all

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "docs" / "hooks"))

from reference_tables import metric_rows

PANELS = [(name, panel) for name, board in boards().items() for panel in panels(board)]
COLOURS = {"green", "yellow", "red"}
SERIES = {
    name
    for row in metric_rows()
    for name in (
        [f"{row.name}_{part}" for part in ("bucket", "sum", "count")] if row.type == "histogram" else [row.name]
    )
}


def label(value: object) -> str:
    return value["title"] if isinstance(value, dict) else str(value)


def test_the_committed_dashboards_are_those_of_the_code(tmp_path: Path) -> None:
    write_all(tmp_path)
    made = {path.name: path.read_text() for path in tmp_path.glob("*.json")}
    assert made.keys() == {f"{board.slug}.json" for board in BOARDS}
    assert made == {path.name: path.read_text() for path in FOLDER.glob("*.json")}, "run `make dashboards`"


@pytest.mark.parametrize("name", boards())
def test_a_dashboard_works_with_any_data_source_and_fits_into_a_config_map(name: str) -> None:
    board, text = boards()[name], (FOLDER / f"{name}.json").read_text()
    assert len(text) < 2**19
    assert board["uid"] == name
    assert set(re.findall(r'"uid": "([^"]+)"', text)) == {"${datasource}", name}
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert list(variables) == ["datasource", "cluster", "namespace", "job", "instance"]
    assert all(variables[each]["allValue"] == ".*" for each in list(variables)[1:]), "series may lack the label"
    assert all(variables[each]["includeAll"] for each in list(variables)[1:])


@pytest.mark.parametrize("name", boards())
def test_panels_stand_beside_each_other(name: str) -> None:
    cells = set()
    for panel in boards()[name]["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= own
    assert len({panel["id"] for panel in boards()[name]["panels"]}) == len(boards()[name]["panels"])


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=label)
def test_a_panel_explains_itself(board: str, panel: dict[str, Any]) -> None:
    assert panel["title"]
    sentences = re.findall(r"[.?!](?: |$)", panel["description"])
    assert len(sentences) >= 2, "say what is shown, and what a bad value means"
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"]
    assert defaults["thresholds"]["steps"][0]["value"] is None
    assert {step["color"] for step in defaults["thresholds"]["steps"]} <= COLOURS
    levels = [step["value"] for step in defaults["thresholds"]["steps"][1:]]
    assert levels == sorted(levels)
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    names = [target["refId"] for target in panel["targets"]]
    assert len(set(names)) == len(names) >= 1
    if panel["type"] == "timeseries":
        assert all(target["legendFormat"] for target in panel["targets"]), "a series needs a name"


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=label)
def test_a_panel_links_to_dashboards_with_its_time_and_variables(board: str, panel: dict[str, Any]) -> None:
    for link in panel.get("links", []):
        path, _, query = link["url"].removeprefix("/d/").partition("?")
        assert path in boards().keys() - {board}
        assert query == "${__url_time_range}&${__all_variables}"


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=label)
def test_an_override_is_of_a_series_that_there_may_be(board: str, panel: dict[str, Any]) -> None:
    legends = [re.sub(r"\{\{status\}\}", "500", target.get("legendFormat", "")) for target in panel["targets"]]
    for rule in panel["fieldConfig"]["overrides"]:
        wanted = rule["matcher"]["options"]
        if rule["matcher"]["id"] == "byRegexp":
            assert any(re.search(wanted.strip("/"), legend) for legend in legends)
        else:
            assert any(
                re.fullmatch(re.sub(r"\\\{\\\{\w+\\\}\\\}", "(.+)", re.escape(legend)), wanted) for legend in legends
            )


def test_the_dashboards_lead_from_the_overview_to_every_part() -> None:
    links = [link["url"] for panel in panels(boards()["weft-overview"]) for link in panel.get("links", [])]
    found = {url.removeprefix("/d/").partition("?")[0] for url in links}
    assert found == {"weft-router", "weft-encoders", "weft-workers", "weft-transfers"}


def test_times_are_seconds_and_shares_are_percent() -> None:
    """A panel whose only metrics are sums of seconds by seconds is a time or a share, and never a plain number."""
    for _, panel in PANELS:
        names = {name for target in panel["targets"] for name in re.findall(r"weft_\w+", target["expr"])}
        unit = panel["fieldConfig"]["defaults"]["unit"]
        if names and all(name.endswith("_bytes") for name in names):
            assert unit in ("bytes", "percentunit"), panel["title"]
        if names and all(re.search(r"_seconds(_bucket)?$", name) for name in names):
            assert unit == "s", panel["title"]


@pytest.mark.parametrize("query", list(queries()), ids=lambda query: query.name)
def test_an_expression_asks_for_metrics_that_there_are(query: BoardQuery) -> None:
    names = set(re.findall(r"\bweft_\w+", query.expr))
    assert names
    assert names - SERIES == set()
    assert query.expr.count('cluster=~".*"') >= len(names)


def test_promtool_accepts_every_expression(tmp_path: Path) -> None:
    rules = [{"record": f"test:{number}", "expr": query.expr} for number, query in enumerate(queries())]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "boards", "rules": rules}]}))
    command = [prometheus_tool("promtool"), "check", "rules", "--lint=none", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(rules) > 100


def test_a_board_is_written_the_same_way_each_time() -> None:
    for board in BOARDS:
        assert board_json(board) == board_json(board)
        json.loads(board_json(board))

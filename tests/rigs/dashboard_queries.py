"""Reads the committed dashboards as Prometheus sees them: every expression, with the variables filled in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "grafana"
VARIABLES = {"$cluster": ".*", "$namespace": ".*", "$job": ".*", "$instance": ".*"}


class BoardQuery(NamedTuple):
    """A `BoardQuery` is one expression of a panel."""

    board: str
    panel: str
    ref: str
    expr: str
    legend: str
    template: str
    """Is the expression with its variables, as the file has it."""
    is_instant: bool
    """Says that the panel shows the values of one moment, as tables do."""

    @property
    def name(self) -> str:
        return f"{self.board}: {self.panel}: {self.ref}"


def boards() -> dict[str, dict[str, Any]]:
    """Maps the name of each dashboard to its JSON."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the panels of a board, without the heads of its rows."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries(rate_interval: str = "1m") -> Iterator[BoardQuery]:
    """Yields every expression of every board with its variables filled in, as Grafana does it."""
    for name, board in boards().items():
        for panel in panels(board):
            for target in panel["targets"]:
                expr = target["expr"].replace("$__rate_interval", rate_interval)
                for variable, value in VARIABLES.items():
                    expr = expr.replace(variable, value)
                legend, is_instant = target.get("legendFormat", ""), target.get("instant", False)
                yield BoardQuery(name, panel["title"], target["refId"], expr, legend, target["expr"], is_instant)

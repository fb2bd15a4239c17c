"""Describes dashboards, and turns the descriptions into Grafana's JSON.

In a query, `{@}` stands for the labels that the variables of the board select, and `{@,code="ok"}` adds to them. All
variables but the data source select everything by default, also series that do not have the label, so the boards work
on Kubernetes (`namespace`), where Prometheus adds `cluster`, and on one machine with neither. The module knows nothing
of what the queries mean.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

SELECTED = 'cluster=~"$cluster",namespace=~"$namespace",job=~"$job",instance=~"$instance"'
COLUMNS = 24
"""Grafana divides the width of a board into this many columns."""
HEIGHT, STAT_HEIGHT = 8, 4
Kind = Literal["time", "bars", "stat", "table"]
Level = tuple[float, Literal["green", "yellow", "red"]]
"""Is a value and the colour from there on."""


class Query(NamedTuple):
    """A `Query` is an expression of PromQL, and how its series are named."""

    expr: str
    legend: str = ""


class Panel(NamedTuple):
    """A `Panel` shows some queries. `description` says what is shown and what a bad value means."""

    title: str
    description: str
    unit: str
    """Names Grafana's unit, for example `s`, `bytes`, `percentunit` or `short`."""
    queries: Sequence[Query]
    levels: Sequence[Level] = ()
    """Says where values become bad, the least value first. Below the first, a value is green, or red if the first is
    green."""
    kind: Kind = "time"
    width: int = 8
    most: float | None = None
    """Is the end of the axis, where values have one."""


class BoardRow(NamedTuple):
    """A `BoardRow` is a titled part of a board."""

    title: str
    panels: Sequence[Panel]


class Board(NamedTuple):
    """A `Board` is one dashboard. `slug` names its file, and its address in Grafana."""

    slug: str
    title: str
    description: str
    rows: Sequence[BoardRow]


def selected(expr: str) -> str:
    """Returns an expression with the labels of the variables in it."""
    return expr.replace("{@", "{" + SELECTED)


def board_json(board: Board) -> str:
    """Returns a dashboard as Grafana and its provisioning read it."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.slug)
        .description(board.description)
        .tags(["weft"])
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Weft")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["weft"])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name, metric in (
        ("cluster", "weft_build_info"),
        ("namespace", "weft_build_info"),
        ("job", "weft_process_cpu_seconds_total"),
        ("instance", "weft_process_cpu_seconds_total"),
    ):
        made = made.with_variable(_variable(name, metric))
    top = 0
    for row in board.rows:
        made = made.with_row(dashboard.Row(row.title).grid_pos(models.GridPos(x=0, y=top, w=COLUMNS, h=1)))
        top, left, height = top + 1, 0, 0
        for panel in row.panels:
            own = STAT_HEIGHT if panel.kind == "stat" else HEIGHT
            if left + panel.width > COLUMNS:
                top, left, height = top + height, 0, 0
            made = made.with_panel(_panel(panel).grid_pos(models.GridPos(x=left, y=top, w=panel.width, h=own)))
            left, height = left + panel.width, max(height, own)
        top += height
    return json.dumps(_numbered(json.loads(json.dumps(made.build(), cls=JSONEncoder))), indent=1, sort_keys=True) + "\n"


def _numbered(board: dict[str, Any]) -> dict[str, Any]:
    """Gives each panel an id, by which links point at it."""
    for number, panel in enumerate(board["panels"], start=1):
        panel["id"] = number
    return board


def _variable(name: str, metric: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(_datasource())
        .query(f"label_values({metric}, {name})")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )


def _datasource() -> models.DataSourceRef:
    return models.DataSourceRef(type_val="prometheus", uid="${datasource}")


def _panel(panel: Panel) -> Any:
    """Returns the builder of a panel."""
    match panel.kind:
        case "stat":
            made: Any = stat.Panel().graph_mode(common_models.BigValueGraphMode.AREA)
            made = made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        case "table":
            made = table.Panel()
        case kind:
            made = _lines(kind == "bars", panel.most)
    made = made.title(panel.title).description(panel.description).unit(panel.unit).min(0).datasource(_datasource())
    if panel.most is not None:
        made = made.max(panel.most)
    made = made.thresholds(_thresholds(panel.levels))
    for number, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(selected(query.expr)).ref_id(chr(ord("A") + number))
        target = target.legend_format(query.legend) if query.legend else target
        if panel.kind == "table":
            target = target.instant().format(prometheus_models.PromQueryFormat.TABLE)
        made = made.with_target(target)
    return made


def _lines(is_stacked: bool, most: float | None) -> Any:
    legend = common.VizLegendOptions().display_mode(common_models.LegendDisplayMode.TABLE)
    legend = (
        legend.placement(common_models.LegendPlacement.BOTTOM).show_legend(True).calcs(["mean", "max", "lastNotNull"])
    )
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    tooltip = tooltip.sort(common_models.SortOrder.DESCENDING)
    lines = timeseries.Panel().legend(legend).tooltip(tooltip).line_width(1).fill_opacity(60 if is_stacked else 8)
    lines = lines.show_points(common_models.VisibilityMode.NEVER).span_nulls(False)
    lines = lines.thresholds_style(
        common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
    )
    if is_stacked:
        lines = lines.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    return lines


def _thresholds(levels: Sequence[Level]) -> dashboard.ThresholdsConfig:
    first = "red" if levels and levels[0][1] == "green" else "green"
    steps = [models.Threshold(value=None, color=first)]
    steps += [models.Threshold(value=value, color=colour) for value, colour in levels]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)

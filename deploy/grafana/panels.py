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
KIND_TO_HEIGHT = {"time": 9, "bars": 9, "stat": 4, "table": 5}
"""Maps a kind of panel to its height in lines. Nine lines leave room for three series in the legend."""
Kind = Literal["time", "bars", "stat", "table"]
LABEL_TO_COLOURS = {
    "modality": {"text": "blue", "image": "green", "video": "orange", "audio": "purple"},
    "stage": {
        "queue": "blue",
        "prefill": "green",
        "held": "orange",
        "decode_wait": "super-light-blue",
        "decode": "yellow",
        "encode": "purple",
    },
}
"""Maps a label to the colours of its values, so that a modality or a stage looks the same in every panel."""
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
    """Is the end of the axis, where values have one. What is above it is cut off."""
    least: float | None = None
    """Is a value that the axis shows in any case. Without it, values that are all 0 stand on an axis up to 100."""
    empty: str = ""
    """Says what it means that there is no data, where that is no fault."""
    more: str = ""
    """Names the dashboard that shows more of this; the panel links to it."""
    dashed: str = ""
    """Matches the names of series that are drawn as dashed lines, because others are compared with them."""
    red: str = ""
    """Matches the names of series that mean a failure."""
    right: str = ""
    """Matches the names of series that have the axis on the right, because their values are of another size."""


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
            own = KIND_TO_HEIGHT[panel.kind]
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
            made = _table(panel)
        case _:
            made = _lines(panel)
    made = made.title(panel.title).description(panel.description).unit(panel.unit).min(0).datasource(_datasource())
    if panel.most is not None:
        made = made.max(panel.most)
    if panel.empty:
        made = made.no_value(panel.empty)
    if panel.more:
        made = made.links([_link(panel.more)])
    made = made.thresholds(_thresholds(panel.levels))
    for number, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(selected(query.expr)).ref_id(chr(ord("A") + number))
        target = target.legend_format(query.legend) if query.legend else target
        if panel.kind == "table":
            target = target.instant().format(prometheus_models.PromQueryFormat.TABLE)
        made = made.with_target(target)
    return made


def _link(slug: str) -> dashboard.DashboardLink:
    """Returns a link to another dashboard, which keeps the time and the variables."""
    title = slug.replace("-", " ").capitalize()
    link = dashboard.DashboardLink(f"More: {title}").type(models.DashboardLinkType.LINK)
    return link.url(f"/d/{slug}?${{__url_time_range}}&${{__all_variables}}")


def _table(panel: Panel) -> table.Panel:
    """Returns a table of the labels of the series and their values, in a column with the name of the query."""
    columns = {"excludeByName": {"Time": True}, "renameByName": {"Value": panel.queries[0].legend}}
    return table.Panel().with_transformation(models.DataTransformerConfig(id_val="organize", options=columns))


def _lines(panel: Panel) -> timeseries.Panel:
    is_stacked = panel.kind == "bars"
    legend = common.VizLegendOptions().display_mode(common_models.LegendDisplayMode.TABLE)
    legend = legend.placement(common_models.LegendPlacement.BOTTOM).show_legend(True)
    # A legend has room for a few series, so the largest come first.
    legend = legend.calcs(["mean", "max", "lastNotNull"]).sort_by("Max").sort_desc(True)
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    tooltip = tooltip.sort(common_models.SortOrder.DESCENDING)
    lines = timeseries.Panel().legend(legend).tooltip(tooltip).line_width(1).fill_opacity(60 if is_stacked else 0)
    # A rate of few requests has gaps, and a point between two gaps would not be seen as a line.
    lines = lines.show_points(common_models.VisibilityMode.AUTO).span_nulls(False)
    lines = lines.thresholds_style(
        common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
    )
    if panel.least is not None:
        lines = lines.axis_soft_max(panel.least)
    if is_stacked:
        lines = lines.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    return _with_overrides(lines, panel)


def _with_overrides(lines: timeseries.Panel, panel: Panel) -> timeseries.Panel:
    """Gives single series their colours, dashes and axes."""
    for name, colour in _colours(panel.queries).items():
        lines = lines.override_by_name(name, [_fixed(colour)])
    for pattern, value in (
        (panel.red, _fixed("red")),
        (panel.dashed, models.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [6, 6]})),
        (panel.right, models.DynamicConfigValue("custom.axisPlacement", "right")),
    ):
        if pattern:
            lines = lines.override_by_regexp(f"/{pattern}/", [value])
    return lines


def _colours(queries: Sequence[Query]) -> dict[str, str]:
    """Returns the colours of the series that have one of their own, by name."""
    found: dict[str, str] = {}
    for query in queries:
        for label, value_to_colour in LABEL_TO_COLOURS.items():
            mark = f"{{{{{label}}}}}"
            if mark in query.legend:
                found |= {query.legend.replace(mark, value): colour for value, colour in value_to_colour.items()}
    return found


def _fixed(colour: str) -> models.DynamicConfigValue:
    return models.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})


def _thresholds(levels: Sequence[Level]) -> dashboard.ThresholdsConfig:
    first = "red" if levels and levels[0][1] == "green" else "green"
    steps = [models.Threshold(value=None, color=first)]
    steps += [models.Threshold(value=value, color=colour) for value, colour in levels]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)

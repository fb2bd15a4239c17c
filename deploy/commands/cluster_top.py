"""Implements `weft top`: a live view of a cluster in the terminal, with Textual.

It shows the rates of the last seconds, a row for each member, and the requests in flight and the latest ones. A
request can be opened, and its waterfall is the one of `weft trace`. Textual was chosen over rich, which draws but reads
no keys: its tables scroll and select, and its driver lets tests press keys. The module draws what `cluster_view` has
read; a thread reads, so that a slow answer of the cluster never holds up a key.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from rich.console import Group
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static
from textual.worker import get_current_worker

from deploy.commands.cluster_client import ClusterClient, ClusterOptions
from deploy.commands.cluster_status import state_cell
from deploy.commands.cluster_view import IN_FLIGHT, WAITING, ClusterView, MemberRow, Rates, Readings
from deploy.commands.request_waterfall import sections_of
from deploy.commands.terminal import count, duration, may_animate, percent, rate, shown
from fabric.contracts import ConfigError, WeftError

Find = Callable[[str], tuple[Any, str]]
"""Returns the record of a request, or None and the reason why there is none."""


MIN_INTERVAL_S = 0.2


class Column(NamedTuple):
    name: str
    width: int
    is_number: bool = True


MEMBER_COLUMNS = (
    Column("MEMBER", 17, False),
    Column("STATE", 11, False),
    Column("QUEUE", 7),
    Column("RUN", 5),
    Column("WAIT", 5),
    Column("HELD", 5),
    Column("BUSY", 6),
    Column("MEMORY", 7),
    Column("HITS", 6),
    Column("DONE/S", 7),
)
REQUEST_COLUMNS = (
    Column("REQUEST", 29, False),
    Column("CLASS", 6, False),
    Column("STAGE", 17, False),
    Column("AGE", 8),
    Column("TTFT", 8),
    Column("TOKENS", 8),
)
MEMBER_ORDERS: Mapping[str, Callable[[MemberRow, float], Any]] = {
    "name": lambda row, _: (row.kind, row.member_id),
    "queue": lambda row, _: -(row.queue_s or 0.0),
    "work": lambda row, _: -((row.num_active or 0.0) + (row.num_waiting or 0.0)),
    "memory": lambda row, _: -(row.memory_share or 0.0),
    "rate": lambda row, done_per_s: -done_per_s,
}
REQUEST_ORDERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "newest": lambda each: (each["outcome"] != "running", -(each["received_at"] or 0.0)),
    "slowest": lambda each: -(each["first_token_s"] or 0.0),
    "longest": lambda each: -(each["total_s"] or 0.0),
}


def top(arguments: argparse.Namespace) -> int:
    """Shows the view until the user leaves it."""
    if not may_animate(sys.stdout) or not sys.stdin.isatty():
        raise ConfigError("weft top needs a terminal; `weft status` prints the same figures once")
    with ClusterClient(ClusterOptions.of(arguments)) as client:
        readings = Readings(client, time.monotonic, arguments.window)

        def find(request_id: str) -> tuple[Any, str]:
            return client.find(f"/weft/requests/{request_id}", format="json")

        TopView(client.options.url, readings, find, arguments.interval).run()
    return 0


class RecordScreen(Screen[None]):
    """A `RecordScreen` shows one request."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "app.pop_screen", "Back"),
        Binding("r", "load", "Read again"),
    ]

    def __init__(self, request_id: str, find: Find) -> None:
        super().__init__()
        self._request_id, self._find = request_id, find

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(f"Reading the record of {self._request_id} ...", id="record", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()
        self.action_load()

    @work(thread=True, exclusive=True)
    def action_load(self) -> None:
        try:
            record, why_not = self._find(self._request_id)
        except WeftError as error:
            record, why_not = None, error.message
        if not get_current_worker().is_cancelled:
            self.app.call_from_thread(self._show, record, why_not)

    def _show(self, record: Mapping[str, Any] | None, why_not: str) -> None:
        width = max(60, self.size.width - 4)
        found = shown(why_not, "red") if record is None else Group(*sections_of(record, width))
        self.query_one("#record", Static).update(found)


class RequestTable(DataTable[Text]):
    """A `RequestTable` is the table of requests; the footer names its key."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Open request")]


class TopView(App[None]):
    """A `TopView` is the application. `interval_s` is the time between two readings."""

    CSS = """
    #head { height: 3; padding: 0 1; }
    DataTable { padding: 0 1; }
    #members { height: auto; max-height: 45%; }
    #requests { height: 1fr; margin-top: 1; }
    VerticalScroll { padding: 0 1; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "Quit"),
        Binding("p,space", "pause", "Pause"),
        Binding("s", "order_members", "Sort members"),
        Binding("r", "order_requests", "Sort requests"),
    ]

    def __init__(
        self,
        url: str,
        readings: Readings,
        find: Find,
        interval_s: float = 1.0,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self._url, self._readings, self._find = url, readings, find
        self._interval_s = max(MIN_INTERVAL_S, interval_s)
        self._wall_clock = wall_clock
        self._view: ClusterView | None = None
        self._rates: Rates | None = None
        self._is_paused = False
        self._is_reading = False
        self._member_order, self._request_order = next(iter(MEMBER_ORDERS)), next(iter(REQUEST_ORDERS))

    def compose(self) -> ComposeResult:
        yield Static("", id="head", markup=False)
        yield DataTable(id="members", cursor_type="row", cell_padding=0, zebra_stripes=False)
        yield RequestTable(id="requests", cursor_type="row", cell_padding=0, zebra_stripes=False)
        yield Footer()

    def on_mount(self) -> None:
        for name, columns in (("members", MEMBER_COLUMNS), ("requests", REQUEST_COLUMNS)):
            for column in columns:
                self._table(name).add_column(_cell(column, column.name), width=column.width, key=column.name)
        self._table("requests").focus()
        self._draw()
        self.read()
        self.set_interval(self._interval_s, self.read)

    def _table(self, name: str) -> DataTable[Text]:
        return self.query_one(f"#{name}", DataTable)

    # ------------------------------------------------------------ reading

    def read(self) -> None:
        if not self._is_paused:
            self._read_in_thread()

    @work(thread=True, group="reading")
    def _read_in_thread(self) -> None:
        if self._is_reading:
            return
        self._is_reading = True
        try:
            view = self._readings.read()
            rates = self._readings.rates()
        finally:
            self._is_reading = False
        if not get_current_worker().is_cancelled:
            self.call_from_thread(self._take, view, rates)

    def _take(self, view: ClusterView | None, rates: Rates | None) -> None:
        """Takes a new view. If the cluster did not answer, what was seen last stays on the screen."""
        self._view = self._view if view is None else view
        self._rates = rates
        self._draw()

    # ------------------------------------------------------------ drawing

    def _draw(self) -> None:
        self.query_one("#head", Static).update(Text("\n").join(self._head()))
        view = self._view
        done = {} if self._rates is None else self._rates.member_to_done_per_s
        members = () if view is None else view.members
        has_pools = view is not None and view.has_pools
        by_member = MEMBER_ORDERS[self._member_order]
        rows = sorted(members, key=lambda row: by_member(row, done.get(row.member_id, 0.0)))
        self._fill("members", MEMBER_COLUMNS, [(row.member_id, _member_cells(row, done, has_pools)) for row in rows])
        requests = sorted(() if view is None else view.requests, key=REQUEST_ORDERS[self._request_order])
        wall_s = self._wall_clock()
        cells = [(str(each["request_id"]), _request_cells(each, wall_s)) for each in requests]
        self._fill("requests", REQUEST_COLUMNS, cells)

    def _head(self) -> list[Text]:
        view, rates, error = self._view, self._rates, self._readings.error
        first = Text("weft top  ", "bold").append_text(shown(self._url)).append("  ")
        if error is not None:
            first.append("not reachable, retrying", "bold red")
            return [first, shown(error.message, "red"), Text("")]
        if view is None:
            return [first.append("reading ..."), Text(""), Text("")]
        state = str(view.readiness["status"])
        first.append_text(shown(state, "bold green" if view.is_ready else "bold yellow"))
        first.append_text(shown(f"  {view.model or ''}")).append("  paused" if self._is_paused else "", "bold yellow")
        if view.why_partial:
            return [first, shown(view.why_partial, "yellow"), Text("")]
        codes = view.code_to_count()
        num_failed = sum(codes.values()) - codes.get("ok", 0)
        third = f"{count(view.series.total(IN_FLIGHT))} in flight, {count(view.series.total(WAITING))} waiting; "
        third += f"{codes.get('ok', 0):,} answered, {num_failed:,} failed; sorted by {self._member_order}, "
        return [first, Text(_rate_line(rates)), Text(third + self._request_order)]

    def _fill(self, name: str, columns: Sequence[Column], rows: Sequence[tuple[str, Sequence[object]]]) -> None:
        """Fills a table, with the cursor on the row on which it was, if that is still there."""
        table = self._table(name)
        chosen = self._chosen_row(table)
        scrolled_to = table.scroll_y
        table.clear()
        for key, cells in rows:
            table.add_row(*(_cell(column, cell) for column, cell in zip(columns, cells, strict=True)), key=key)
        keys = [key for key, _ in rows]
        if chosen in keys:
            table.move_cursor(row=keys.index(chosen), scroll=False)
        table.scroll_to(y=scrolled_to, animate=False)

    def _chosen_row(self, table: DataTable[Text]) -> str | None:
        if not table.row_count or table.cursor_row >= table.row_count or table.cursor_row == 0:
            return None  # At the top, the cursor stays there, so that new requests are seen.
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value

    # ------------------------------------------------------------ keys

    def action_pause(self) -> None:
        self._is_paused = not self._is_paused
        self._draw()

    def action_order_members(self) -> None:
        self._member_order = _next(MEMBER_ORDERS, self._member_order)
        self._draw()

    def action_order_requests(self) -> None:
        self._request_order = _next(REQUEST_ORDERS, self._request_order)
        self._draw()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        if event.data_table.id == "requests":
            self.push_screen(RecordScreen(str(event.row_key.value), self._find))


def _next(orders: Mapping[str, object], name: str) -> str:
    names = list(orders)
    return names[(names.index(name) + 1) % len(names)]


def _cell(column: Column, value: object) -> Text:
    """Returns a cell that ends one character ahead of the next column."""
    text = value if isinstance(value, Text) else shown(value)
    text.truncate(column.width - 1, overflow="ellipsis")
    if column.is_number:
        text.pad_left(column.width - 1 - text.cell_len)
    return text


def _rate_line(rates: Rates | None) -> str:
    if rates is None:
        return "measuring ..."
    first = f"TTFT p50 {duration(rates.first_token_p50_s)} p99 {duration(rates.first_token_p99_s)}"
    each = (
        f"{rate(rates.requests_per_s)} req/s, {rate(rates.failures_per_s)} failed/s, {rate(rates.tokens_per_s)} tok/s"
    )
    return f"{each}, {first}, ITL {duration(rates.between_tokens_p50_s)} ({rates.seconds:.0f} s)"


def _member_cells(row: MemberRow, done: Mapping[str, float], has_pools: bool) -> tuple[object, ...]:
    return (
        f"{row.member_id} {row.pool}" if has_pools and row.pool else row.member_id,
        state_cell(row),
        duration(row.queue_s),
        count(row.num_active),
        count(row.num_waiting),
        count(row.num_held) if row.kind == "worker" else "",
        percent(row.busy) if row.kind == "encoder" else "",
        percent(row.memory_share),
        percent(row.hit_share),
        rate(done.get(row.member_id)),
    )


def _request_cells(summary: Mapping[str, Any], wall_s: float) -> tuple[object, ...]:
    outcome = str(summary["outcome"])
    is_running = outcome == "running"
    stage = shown(summary.get("stage", "-") if is_running else outcome)
    stage.stylize("green" if is_running else "" if outcome in ("ok", "tokenized") else "red")
    age_s = max(0.0, wall_s - float(summary["received_at"] or wall_s)) if is_running else summary["total_s"]
    tokens = summary["num_completion_tokens"]
    return (
        summary["request_id"],
        summary["modality"],
        stage,
        duration(age_s),
        duration(summary["first_token_s"]),
        f"{count(summary['num_prompt_tokens'])}+{count(tokens)}" if tokens is not None else count(None),
    )

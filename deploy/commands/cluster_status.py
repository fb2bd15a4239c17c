"""Implements `weft status`: says on one screen whether a cluster is ready, what it consists of and what it does.

The exit status is 0 if the cluster is ready and 1 if not, so that scripts can ask. `--wait` asks until it is ready. The
module knows nothing of how the figures are read (`cluster_view`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.commands.cluster_client import ClusterClient, ClusterOptions
from deploy.commands.cluster_view import (
    FIRST_TOKEN,
    IN_FLIGHT,
    WAITING,
    ClusterView,
    MemberRow,
    quantile,
    read_view,
)
from deploy.commands.terminal import console, count, duration, percent, shown, table, write
from fabric.contracts import Unavailable

POLL_S = 0.5
MAX_SHOWN = 10
"""At most this many requests in flight are listed; `--json` has all."""
WORKER_COLUMNS = ("WORKER", "STATE", "QUEUE", "RUN", "WAIT", "HELD", "KV", "HITS", "HOST")
POOL_COLUMNS = ("POOL", "ENGINE")
ENCODER_COLUMNS = ("ENCODER", "STATE", "QUEUE", "BUSY", "ITEMS", "ARENA", "HITS", "HOST")
NUMBERS = ("QUEUE", "RUN", "WAIT", "HELD", "KV", "HITS", "BUSY", "ITEMS", "ARENA", "IN FLIGHT", "AGE", "PROMPT")


def status(arguments: argparse.Namespace) -> int:
    """Prints what the cluster says, and returns 0 if it is ready."""
    with ClusterClient(ClusterOptions.of(arguments)) as client:
        view = _view_within(client, arguments.wait, time.monotonic, time.sleep)
        if arguments.json:
            print(json.dumps(view_as_json(client.options.url, view), indent=2, ensure_ascii=True))
        else:
            show(console(), client.options.url, view, time.time())
    return 0 if view.is_ready else 1


def _view_within(
    client: ClusterClient, wait_s: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> ClusterView:
    """Returns the view of the cluster once it is ready, or the last one when the time is over. Raises Unavailable if
    nothing has answered by then."""
    deadline_s = clock() + wait_s
    while True:
        try:
            view = read_view(client, clock())
            if view.is_ready or clock() >= deadline_s:
                return view
        except Unavailable:
            if clock() >= deadline_s:
                raise
        sleep(POLL_S)


# ------------------------------------------------------------ for machines


def view_as_json(url: str, view: ClusterView) -> dict[str, Any]:
    """Returns the view as JSON values. What is not known is null."""
    figures: dict[str, Any] = {
        "requests_in_flight": view.series.total(IN_FLIGHT),
        "requests_waiting": view.series.total(WAITING),
        "requests_by_code": view.code_to_count(),
        "recent_requests_by_outcome": view.recent_outcomes(),
        "first_token_p50_s": quantile(view.series.buckets(FIRST_TOKEN), 0.5),
        "first_token_p99_s": quantile(view.series.buckets(FIRST_TOKEN), 0.99),
    }
    return {
        "url": url,
        "ready": view.is_ready,
        **view.readiness,
        "model": view.model,
        "version": view.version,
        "partial": view.why_partial or None,
        "routers": [row._asdict() for row in view.routers],
        "workers": [_member_as_json(row) for row in view.of_kind("worker")],
        "encoders": [_member_as_json(row) for row in view.of_kind("encoder")],
        **(dict.fromkeys(figures) if view.why_partial else figures),
        "running": view.running(),
        "routers_without_answer": view.silent,
    }


def _member_as_json(row: MemberRow) -> dict[str, Any]:
    return row._asdict() | {"state": row.state, "memory_share": row.memory_share, "hit_share": row.hit_share}


# ------------------------------------------------------------ for people


def show(output: Console, url: str, view: ClusterView, wall_s: float) -> None:
    """Prints the view. `wall_s` is the present time in seconds since 1970."""
    write(output, _headline(url, view))
    if view.why_partial:
        write(output, shown(f"Only this is known: {view.why_partial}.", "yellow"))
        return
    write(output, f"model {shown(view.model).plain}, version {shown(view.version or 'unknown').plain}")
    for line in [*_request_lines(view), *_refusal_lines(view)]:
        write(output, line)
    tables = [
        table(
            ("ROUTER", "IN FLIGHT", "HOST"),
            ((row.member_id, count(row.num_in_flight), row.host) for row in view.routers),
            NUMBERS,
        ),
        _worker_table(view),
        table(ENCODER_COLUMNS, map(_encoder_cells, view.of_kind("encoder")), NUMBERS),
    ]
    running = view.running()
    rows = [request_cells(each, wall_s) for each in running[:MAX_SHOWN]]
    tables.append(table(("REQUEST", "CLASS", "STAGE", "AGE", "PROMPT"), rows, NUMBERS))
    for made in tables:
        if made.row_count:
            output.file.write("\n")
            write(output, made)
    if len(running) > MAX_SHOWN:
        write(output, f"and {len(running) - MAX_SHOWN} more; --json lists all")
    if view.silent:
        write(output, shown(f"Routers that did not answer: {', '.join(view.silent)}", "yellow"))


def _headline(url: str, view: ClusterView) -> Text:
    state = str(view.readiness["status"])
    line = Text(f"{url} is ")
    if view.is_ready:
        return line.append_text(shown(state, "bold green"))
    line.append_text(shown("waiting for members" if state == "waiting" else state, "bold yellow"))
    missing = [str(each) for each in view.readiness["modalities_without_encoder"]]
    reasons = [] if view.readiness["num_workers"] else ["there is no worker"]
    reasons += [f"no encoder takes {' and '.join(missing)}"] if missing else []
    return line.append_text(shown(f": {', '.join(reasons)}" if reasons else ""))


def _request_lines(view: ClusterView) -> list[Text]:
    codes = view.code_to_count()
    num_ok, num_failed = codes.get("ok", 0), sum(codes.values()) - codes.get("ok", 0)
    in_flight, waiting = view.series.total(IN_FLIGHT), view.series.total(WAITING)
    line = f"requests: {count(in_flight)} in flight, {count(waiting)} of them waiting; {num_ok:,} answered"
    lines = [Text(f"{line}, {num_failed:,} failed since the start")]
    buckets = view.series.buckets(FIRST_TOKEN)
    if (half := quantile(buckets, 0.5)) is not None:
        lines.append(Text(f"first token: {duration(half)} (p50), {duration(quantile(buckets, 0.99))} (p99)"))
    recent = view.recent_outcomes()
    errors = sorted(((code, num) for code, num in recent.items() if code not in ("ok", "tokenized")), key=_most_first)
    if errors:
        listed = ", ".join(f"{code} {num}" for code, num in errors)
        lines.append(shown(f"errors among the latest {sum(recent.values())} requests: {listed}", "red"))
    return lines


def _refusal_lines(view: ClusterView) -> list[Text]:
    """Returns a line for each reason why members refused the last change of the config."""
    lines = []
    for flaw, kind_to_number in view.flaw_to_refusing().items():
        who = ", ".join(f"{number} {kind}{'s' if number > 1 else ''}" for kind, number in kind_to_number.items())
        reason = "; ".join(flaw.splitlines())
        said = f"the last change of the config was refused ({who}), so the former values stay: {reason}"
        lines.append(shown(said, "red"))
    return lines


def _most_first(pair: tuple[str, int]) -> tuple[int, str]:
    return -pair[1], pair[0]


def state_cell(row: MemberRow) -> Text:
    return shown(row.state, {"busy": "green", "no figures": "yellow"}.get(row.state, "dim"))


def _worker_table(view: ClusterView) -> Table:
    """Returns the table of the workers, which tells pools apart if there are several."""
    rows = [(_worker_cells(row), row) for row in view.of_kind("worker")]
    if not view.has_pools:
        return table(WORKER_COLUMNS, (cells for cells, _ in rows), NUMBERS)
    columns = (WORKER_COLUMNS[0], *POOL_COLUMNS, *WORKER_COLUMNS[1:])
    return table(columns, ((cells[0], row.pool, row.engine, *cells[1:]) for cells, row in rows), NUMBERS)


def _worker_cells(row: MemberRow) -> tuple[object, ...]:
    return (
        row.member_id,
        state_cell(row),
        duration(row.queue_s),
        count(row.num_active),
        count(row.num_waiting),
        count(row.num_held),
        percent(row.memory_share),
        percent(row.hit_share),
        row.host,
    )


def _encoder_cells(row: MemberRow) -> tuple[object, ...]:
    return (
        row.member_id,
        state_cell(row),
        duration(row.queue_s),
        percent(row.busy),
        count(row.num_active),
        percent(row.memory_share),
        percent(row.hit_share),
        row.host,
    )


def request_cells(summary: Mapping[str, Any], wall_s: float) -> tuple[object, ...]:
    """Returns what a list of requests in flight shows of one."""
    age_s = max(0.0, wall_s - float(summary["received_at"] or wall_s))
    return (
        summary["request_id"],
        summary["modality"],
        summary.get("stage", "-"),
        duration(age_s),
        count(summary["num_prompt_tokens"]),
    )

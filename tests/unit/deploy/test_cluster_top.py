"""Tests `weft top` without a terminal, by the driver that Textual has for it, and on a pseudo-terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pseudo_terminal import END, ENTER, on_terminal
from router_chats import chat_body
from served_fakes import served_fakes
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from deploy.cli import main
from deploy.commands.cluster_top import TopView
from deploy.commands.cluster_view import ClusterView, MemberRow, Rates, Series
from fabric.contracts import Unavailable

SIZE = (80, 24)
METRICS = """\
# TYPE weft_router_requests counter
weft_router_requests_total{code="ok"} 12
weft_router_requests_total{code="overloaded"} 3
# TYPE weft_router_requests_in_flight gauge
weft_router_requests_in_flight 2
"""


def summary(name: str, **changes: Any) -> dict[str, Any]:
    made = {"request_id": name, "received_at": 100.0, "modality": "text", "outcome": "ok", "stage": "ended"}
    made |= {"first_token_s": 0.1, "total_s": 0.2, "num_prompt_tokens": 5, "num_completion_tokens": 7}
    return made | changes


def view(*requests: dict[str, Any]) -> ClusterView:
    members = (
        MemberRow("encoder-0", "encoder", "h", 1, 0.5, 4, 2, None, 0.75, 10, 100, 1, 4, 9),
        MemberRow("worker-0", "worker", "h", 2, 0.01, 1, 0, 0, None, 90, 100, 3, 4, 50),
        MemberRow("worker-1", "worker", "h", 3),
    )
    readiness = {"status": "ready", "num_workers": 2, "modalities_without_encoder": []}
    return ClusterView(1.0, readiness, "m", "1", (), members, requests, (), Series(METRICS))


class ScriptedReadings:
    """`ScriptedReadings` are what a test says that a cluster says."""

    def __init__(self, shown: ClusterView) -> None:
        self.view: ClusterView | None = shown
        self.error: Unavailable | None = None
        self.num_read = 0

    def read(self) -> ClusterView | None:
        self.num_read += 1
        return None if self.error is not None else self.view

    def rates(self) -> Rates | None:
        return Rates(15.0, 2.5, 0.5, 61.5, 0.15, 0.9, 0.02, {"worker-0": 61.5, "encoder-0": 3.0})


def found(request_id: str) -> tuple[Any, str]:
    record = summary(request_id) | {"router_id": "router-0", "first_token": None, "plans": []}
    return (record, "") if request_id != "req-lost" else (None, "no router has a record of it")


def app_of(*requests: dict[str, Any]) -> tuple[TopView, ScriptedReadings]:
    readings = ScriptedReadings(view(*requests))
    # The test itself says when to read.
    return TopView("http://a:1", readings, found, interval_s=3600.0, wall_clock=lambda: 103.0), readings


def head(app: TopView) -> str:
    return str(app.screen_stack[0].query_one("#head", Static).render())


def rows(app: TopView, name: str) -> list[list[str]]:
    table = app.screen_stack[0].query_one(f"#{name}", DataTable)
    return [[cell.plain.strip() for cell in table.get_row_at(at)] for at in range(table.row_count)]


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await pilot.pause()


async def again(app: TopView, pilot: Pilot[None], readings: ScriptedReadings) -> None:
    """Reads the cluster again and waits until the view shows it."""
    await app.workers.wait_for_complete()
    app.read()
    await app.workers.wait_for_complete()
    await pilot.pause()


async def test_the_first_screen() -> None:
    running = summary("req-b", outcome="running", stage="generating", total_s=None, num_completion_tokens=None)
    app, _ = app_of(summary("req-a"), running, summary("req-c", outcome="overloaded", first_token_s=None))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "ready" in head(app))
        lines = head(app).splitlines()
        assert lines[0] == "weft top  http://a:1  ready  m"
        assert lines[1] == ("2.5 req/s, 0.5 failed/s, 61.5 tok/s, TTFT p50 150 ms p99 900 ms, ITL 20 ms (15 s)")
        assert lines[2] == "2 in flight, 0 waiting; 12 answered, 3 failed; sorted by name, newest".replace("0 w", "- w")
        assert rows(app, "members") == [
            ["encoder-0", "busy", "500 ms", "4", "2", "", "75%", "10%", "25%", "3.0"],
            ["worker-0", "busy", "10 ms", "1", "0", "0", "", "90%", "75%", "61.5"],
            ["worker-1", "no figures", "-", "-", "-", "-", "", "-", "-", "-"],
        ]
        assert rows(app, "requests") == [
            ["req-b", "text", "generating", "3.0 s", "100 ms", "-"],
            ["req-a", "text", "ok", "200 ms", "100 ms", "5+7"],
            ["req-c", "text", "overloaded", "200 ms", "-", "5+7"],
        ]
        for name in ("members", "requests"):
            table = app.query_one(f"#{name}", DataTable)
            assert table.virtual_size.width <= SIZE[0] - 4, "all columns are seen in 80 characters"


async def test_workers_of_several_pools_show_their_pool() -> None:
    app, readings = app_of()
    shown = view()
    pooled = [row._replace(pool=pool) for row, pool in zip(shown.members, ("", "main", "fast"), strict=True)]
    readings.view = shown._replace(members=tuple(pooled))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "ready" in head(app))
        assert [row[0] for row in rows(app, "members")] == ["encoder-0", "worker-0 main", "worker-1 fast"]


async def test_keys_sort_pause_and_quit() -> None:
    app, readings = app_of(summary("req-a"), summary("req-b", first_token_s=0.9, received_at=50.0))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "ready" in head(app))
        orders = {}
        for _ in range(5):
            await pilot.press("s")
            orders[head(app).split("sorted by ")[1].split(",")[0]] = [row[0] for row in rows(app, "members")]
        assert orders["queue"] == ["encoder-0", "worker-0", "worker-1"]
        assert orders["memory"] == ["worker-0", "encoder-0", "worker-1"]
        assert orders["rate"] == ["worker-0", "encoder-0", "worker-1"]
        assert [row[0] for row in rows(app, "requests")] == ["req-a", "req-b"]
        await pilot.press("r")
        assert head(app).endswith("slowest")
        assert [row[0] for row in rows(app, "requests")] == ["req-b", "req-a"]
        await pilot.press("p")
        assert "paused" in head(app)
        before = readings.num_read
        await again(app, pilot, readings)
        assert readings.num_read == before
        await pilot.press("p")
        await again(app, pilot, readings)
        assert readings.num_read > before
        await pilot.press("q")
    assert app.return_code == 0


async def test_a_cluster_that_is_gone_and_comes_back() -> None:
    app, readings = app_of(summary("req-a"))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "ready" in head(app))
        readings.error = Unavailable("nothing answers at http://a:1")
        await again(app, pilot, readings)
        assert head(app).splitlines()[:2] == [
            "weft top  http://a:1  not reachable, retrying",
            "nothing answers at http://a:1",
        ]
        assert len(rows(app, "members")) == 3, "what was seen last stays"
        readings.error = None
        readings.view = view(summary("req-new"))
        await again(app, pilot, readings)
        assert "not reachable" not in head(app)
        assert [row[0] for row in rows(app, "requests")] == ["req-new"]


async def test_a_request_is_opened_and_closed() -> None:
    app, readings = app_of(summary("req-a"), summary("req-lost", received_at=1.0))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "ready" in head(app))
        await pilot.press("down", "enter")
        await until(pilot, lambda: len(app.screen_stack) == 2)
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "no router has a record of it" in str(app.screen.query_one("#record", Static).render())
        await pilot.press("escape")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        assert app.query_one("#requests", DataTable).cursor_row == 1
        readings.view = view(
            summary("req-new", received_at=200.0), summary("req-a"), summary("req-lost", received_at=1.0)
        )
        await again(app, pilot, readings)
        assert app.query_one("#requests", DataTable).cursor_row == 2, "the cursor stays on its request"


async def test_a_cluster_that_tells_little_says_why() -> None:
    app, readings = app_of()
    assert readings.view is not None
    readings.view = readings.view._replace(members=(), why_partial="the cluster asks for a key")
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "ready" in head(app))
        assert head(app).splitlines()[1] == "the cluster asks for a key"


def test_top_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 1
    assert "weft top needs a terminal; `weft status` prints the same figures once" in capsys.readouterr().err


def test_a_real_router_on_a_terminal(tmp_path: Path) -> None:
    import httpx

    with served_fakes(num_workers=2) as fakes:
        fakes.report()
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{fakes.url}/v1/chat/completions", content=chat_body(), headers=headers)
        name = answer.headers["x-weft-request-id"]
        with on_terminal("top", "--url", fakes.url, "--interval", "0.2", home=tmp_path) as terminal:
            wanted = (name, f"{fakes.url}  ready  tiny", "worker-0", "worker-1", "encoder-0", "enter Open request")
            terminal.shows(lambda screen: all(each in screen.replace("⏎", "enter") for each in wanted))
            terminal.send(ENTER)
            terminal.shows("PREDICTED AGAINST ACTUAL")
            terminal.send(END)
            terminal.shows(lambda screen: "ROUTE" in screen and "the router compared 2 workers" in screen)
            terminal.send("q")
            terminal.shows("TOKENS")
            terminal.send("q")
            assert terminal.ended() == 0

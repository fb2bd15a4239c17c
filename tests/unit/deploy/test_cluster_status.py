"""Tests `weft status` against a real router over fake members, and the figures that it computes."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace
from router_chats import chat_body, image, text
from served_fakes import served_fakes

from deploy.cli import main
from deploy.commands import cluster_view
from deploy.commands.cluster_client import ClusterClient, ClusterOptions
from deploy.commands.cluster_view import (
    ENCODER_TO_METRIC,
    ROUTER_METRICS,
    WORKER_TO_METRIC,
    ClusterView,
    MemberRow,
    Readings,
    Series,
    quantile,
    rates_between,
    read_view,
)
from deploy.commands.terminal import console, duration, shown, table, write
from router.observe import RequestFilter
from router.router_config import Tenant
from router.run import new_key

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "docs" / "hooks"))

from reference_tables import metric_rows

ALL = RequestFilter()
Captured = pytest.CaptureFixture[str]


def lines_of(printed: str) -> dict[str, list[str]]:
    """Maps the first word of each line to its other words."""
    return {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.strip()}


def test_a_ready_cluster_on_one_screen(capsys: Captured) -> None:
    with served_fakes(num_workers=2, version="1.2.3") as fakes:
        fakes.report()
        with httpx.Client(base_url=fakes.url) as client:
            for body in (chat_body(), chat_body([image(), text("?")]), chat_body(model="other")):
                client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert main(["status", "--url", fakes.url]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"{fakes.url} is ready\nmodel tiny, version 1.2.3\n")
        assert "requests: 0 in flight, 0 of them waiting; 2 answered, 1 failed since the start" in printed
        assert "errors among the latest 3 requests: model_not_found 1" in printed
        assert "first token: " in printed
        lines = lines_of(printed)
        assert lines["WORKER"] == ["STATE", "QUEUE", "RUN", "WAIT", "HELD", "KV", "HITS", "HOST"]
        assert {"worker-0", "worker-1", "encoder-0"} <= set(lines)
        assert lines["worker-0"] == ["idle", "0", "ms", "0", "0", "0", "7%", "93%", "host-0"]
        assert lines["encoder-0"] == ["idle", "0", "ms", "0%", "0", "92%", "-", "host-0"]
        assert all(line == line.rstrip() for line in printed.splitlines())
        assert "\x1b" not in printed
        assert main(["status", "--url", fakes.url, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["ready"], told["model"], told["num_workers"]) == (True, "tiny", 2)
        assert told["requests_by_code"] == {"ok": 2, "model_not_found": 1}
        assert {row["member_id"] for row in told["workers"]} == {"worker-0", "worker-1"}


def test_requests_in_flight_show_their_stage(capsys: Captured) -> None:
    with served_fakes(num_workers=1) as fakes:
        script = fakes.cluster.workers[0].script
        script.pause_at = 2

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(base_url=fakes.url) as client:
                headers = {"content-type": "application/json"}
                return await client.post("/v1/chat/completions", content=chat_body(), headers=headers)

        asking = asyncio.run_coroutine_threadsafe(ask(), fakes._loop)
        traces = fakes.cluster.service.traces
        while not any(each["stage"] == "generating" for each in fakes.do(lambda: list(traces.latest(ALL)))):
            pass
        assert main(["status", "--url", fakes.url]) == 0
        printed = capsys.readouterr().out
        assert "requests: 1 in flight" in printed
        row = next(words for name, words in lines_of(printed).items() if name.startswith("req-"))
        assert row[:2] == ["text", "generating"]
        fakes.do(script.resume.set)
        assert asking.result(30).status_code == 200


def test_members_that_refused_a_change_of_the_config_are_named_with_the_reason(capsys: Captured) -> None:
    with served_fakes(num_workers=2) as fakes:
        assert main(["status", "--url", fakes.url]) == 0
        assert "refused" not in capsys.readouterr().out
        flaws = {"worker": "logging.level: the value is wrong\nrouter.x: unknown", "encoder": "no such file"}
        refusing = [replace(each, config_flaw=flaws[each.kind]) for each in fakes.cluster.members]
        fakes.do(lambda: fakes.cluster.service.update_members(refusing))
        assert main(["status", "--url", fakes.url]) == 0
        printed = capsys.readouterr().out
        said = "the last change of the config was refused (%s), so the former values stay: %s"
        assert said % ("2 workers", "logging.level: the value is wrong; router.x: unknown") in printed
        assert said % ("1 encoder", "no such file") in printed
        assert main(["status", "--url", fakes.url, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert {row["config_flaw"] for row in told["workers"]} == {flaws["worker"]}


def test_workers_of_several_pools_are_told_apart(capsys: Captured) -> None:
    id_to_pool = {"worker-0": ("main", "weft"), "worker-1": ("fast", "vllm")}
    with served_fakes(num_workers=2) as fakes:
        pooled = [
            replace(each, pool=id_to_pool[each.member_id][0], engine=id_to_pool[each.member_id][1])
            if each.kind == "worker"
            else each
            for each in fakes.cluster.members
        ]
        fakes.do(lambda: fakes.cluster.service.update_members(pooled))
        assert main(["status", "--url", fakes.url]) == 0
        lines = lines_of(capsys.readouterr().out)
        assert lines["WORKER"][:3] == ["POOL", "ENGINE", "STATE"]
        assert {name: tuple(lines[name][:2]) for name in id_to_pool} == id_to_pool
        assert lines["ENCODER"][0] == "STATE"
        assert main(["status", "--url", fakes.url, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert {row["member_id"]: (row["pool"], row["engine"]) for row in told["workers"]} == id_to_pool


def test_a_cluster_that_waits_for_members_is_status_1(capsys: Captured) -> None:
    with served_fakes() as fakes:
        fakes.do(lambda: fakes.cluster.service.update_members([]))
        assert main(["status", "--url", fakes.url]) == 1
        assert "is waiting for members: there is no worker, no encoder takes image" in capsys.readouterr().out
        fakes.do(fakes.cluster.publish)
        assert main(["status", "--url", fakes.url, "--wait", "30"]) == 0


def test_no_cluster_is_status_1(capsys: Captured) -> None:
    assert main(["status", "--url", "http://127.0.0.1:9"]) == 1
    assert "nothing answers at http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize("wait", ["-1", "soon", "inf", "nan"])
def test_a_wait_is_a_time(wait: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["status", f"--wait={wait}"])
    assert "--wait" in capsys.readouterr().err


def test_without_an_operators_key_only_the_readiness_is_known(tmp_path: Path, capsys: Captured) -> None:
    key, line = new_key("shop", None, False)
    boss, boss_line = new_key("-", None, True)
    keys, own = tmp_path / "keys", tmp_path / "own"
    keys.write_text(f"{line}\n{boss_line}\n")
    with served_fakes(tenants=(Tenant(name="shop", key_digests=()),), keys_file=keys) as fakes:
        assert main(["status", "--url", fakes.url]) == 0
        printed = capsys.readouterr().out
        assert "is ready" in printed
        assert "Only this is known: the cluster at" in printed
        assert "asks for a key; name a file with a valid one with --api-key-file FILE" in printed
        own.write_text(key)
        assert main(["status", "--url", fakes.url, "--api-key-file", str(own)]) == 0
        assert "an operator's key opens it" in capsys.readouterr().out
        own.write_text(boss)
        assert main(["status", "--url", fakes.url, "--api-key-file", str(own)]) == 0
        assert "worker-0" in capsys.readouterr().out


# ------------------------------------------------------------ figures


def test_every_metric_that_is_read_exists() -> None:
    there = {row.name for row in metric_rows()}
    assert {*WORKER_TO_METRIC.values(), *ENCODER_TO_METRIC.values(), *ROUTER_METRICS} - there == set()


def test_members_that_show_their_metrics_themselves_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    own = httpx.Response(200, text='weft_worker_num_running{worker="worker-0"} 3.0\n')
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return own

    with monkeypatch.context() as patch:
        real = httpx.Client
        patch.setattr(cluster_view.httpx, "Client", lambda **o: real(transport=httpx.MockTransport(answer), **o))
        texts = cluster_view._of_targets([{"targets": ["10.0.0.7:1", "10.0.0.7:1"], "labels": {}}])
    assert asked == ["http://10.0.0.7:1/metrics"]
    routers = 'weft_router_requests_in_flight{router="router-0"} 2.0\n'
    both = Series(routers, [f"{text}{routers}" for text in texts])
    assert both.total("weft_worker_num_running", worker="worker-0") == 3.0
    assert both.total("weft_router_requests_in_flight") == 2.0, "a node tells of its routers too"
    assert cluster_view._of_targets([{"targets": ["127.0.0.1:9"], "labels": {}}]) == []


def exposition(ok: int, failed: int, tokens: int, buckets: dict[str, int]) -> Series:
    lines = [
        f'weft_router_requests_total{{code="ok"}} {ok}',
        f'weft_router_requests_total{{code="overloaded"}} {failed}',
        f'weft_worker_tokens_generated_total{{worker="w"}} {tokens}',
    ]
    name = "weft_router_time_to_first_token_seconds"
    lines += [f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in buckets.items()]
    types = [
        f"# TYPE {name} histogram",
        "# TYPE weft_router_requests counter",
        "# TYPE weft_worker_tokens_generated counter",
    ]
    return Series("\n".join([types[1], *lines[:2], types[2], lines[2], types[0], *lines[3:]]) + "\n")


def view(at_s: float, ok: int, failed: int, tokens: int, buckets: dict[str, int]) -> ClusterView:
    series = exposition(ok, failed, tokens, buckets)
    row = MemberRow("w", "worker", "host", 1, num_active=0, num_done=float(tokens))
    return ClusterView(at_s, {"status": "ready"}, series=series, members=(row,))


def test_rates_are_what_counters_grew_by() -> None:
    before = view(10.0, 5, 1, 100, {"0.1": 4, "0.2": 5, "+Inf": 5})
    after = view(14.0, 13, 3, 300, {"0.1": 4, "0.2": 13, "+Inf": 13})
    rates = rates_between(before, after)
    assert (rates.seconds, rates.requests_per_s, rates.failures_per_s, rates.tokens_per_s) == (4.0, 2.5, 0.5, 50.0)
    assert rates.first_token_p50_s == pytest.approx(0.15)
    assert rates.first_token_p99_s == pytest.approx(0.199)
    assert rates.between_tokens_p50_s is None
    assert rates.member_to_done_per_s == {"w": 50.0}


def test_counters_that_begin_again_count_from_zero() -> None:
    before = view(10.0, 50, 10, 1000, {"0.1": 60, "+Inf": 60})
    after = view(12.0, 4, 0, 20, {"0.1": 4, "+Inf": 4})
    rates = rates_between(before, after)
    assert (rates.requests_per_s, rates.tokens_per_s) == (2.0, 10.0)
    assert rates.first_token_p50_s == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("buckets", "share", "value"),
    [
        ({}, 0.5, None),
        ({1.0: 0.0, float("inf"): 0.0}, 0.5, None),
        ({1.0: 2.0, 2.0: 4.0, float("inf"): 4.0}, 0.5, 1.0),
        ({1.0: 2.0, 2.0: 4.0, float("inf"): 4.0}, 0.75, 1.5),
        ({1.0: 0.0, float("inf"): 3.0}, 0.5, 1.0),
    ],
)
def test_quantiles_are_those_of_prometheus(buckets: dict[float, float], share: float, value: float | None) -> None:
    assert quantile(buckets, share) == value


def test_the_window_begins_again_when_the_cluster_was_gone() -> None:
    now = [0.0]
    with served_fakes() as fakes:
        client = ClusterClient(ClusterOptions(fakes.url))
        readings = Readings(client, lambda: now[0], window_s=10.0)
        assert readings.read() is not None
        assert readings.rates() is None
        now[0] = 8.0
        readings.read()
        rates = readings.rates()
        assert rates is not None
        assert rates.seconds == 8.0
        now[0] = 14.0
        readings.read()
        rates = readings.rates()
        assert rates is not None
        assert rates.seconds == 6.0
        url = fakes.url
    with client:
        assert readings.read() is None
    assert readings.error is not None
    assert url in readings.error.message
    assert readings.rates() is None


def test_a_view_of_a_cluster() -> None:
    with served_fakes(num_encoders=2) as fakes, ClusterClient(ClusterOptions(fakes.url)) as client:
        fakes.report()
        seen = read_view(client, 3.0)
        assert (seen.at_s, seen.model, seen.is_ready, seen.why_partial) == (3.0, "tiny", True, "")
        assert [row.member_id for row in seen.of_kind("encoder")] == ["encoder-0", "encoder-1"]
        assert all(row.state in ("idle", "busy") for row in seen.members)
        assert {row.memory_size for row in seen.of_kind("worker")} != {None}


# ------------------------------------------------------------ output


def test_what_a_cluster_says_can_not_drive_the_terminal() -> None:
    assert shown("a\x1b[2J\nb\u202ec").plain == "a\\x1b[2J\\nb\\u202ec"


def test_a_pipe_gets_whole_lines() -> None:
    sink = io.StringIO()
    write(console(sink), table(("A", "B"), [("x" * 300, 1), ("y", "[red]z")], numbers=("A",)))
    lines = sink.getvalue().splitlines()
    assert lines[1] == "x" * 300 + "  1"
    assert lines[2] == " " * 299 + "y  [red]z"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "-"), (0.0004, "0 ms"), (0.25, "250 ms"), (2.5, "2.5 s"), (130.0, "2 min"), (7300.0, "2.0 h")],
)
def test_durations(seconds: float | None, said: str) -> None:
    assert duration(seconds) == said

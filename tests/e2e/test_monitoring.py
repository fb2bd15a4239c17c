"""Lets a real Prometheus scrape a real cluster under a load of every kind: its counts are what the load did, and every
expression of a dashboard, of a rule and of an alert evaluates and shows something."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from cluster_process import ClusterProcess, eventually, start_cluster
from dashboard_queries import BoardQuery, queries
from metric_load import MetricLoad, send_load
from prometheus_process import PrometheusProcess, prometheus_of, scraped
from prometheus_tools import prometheus_tool

pytestmark = [pytest.mark.torch, pytest.mark.ray, pytest.mark.nixl]
RATE_S = 20
"""Grafana would choose four scrape intervals; the load is short, so that a longer one sees more of it."""

EMPTY = {
    "weft-speech: .*": "no answer of the load is spoken",
    "weft-workers: Drafts that were right: A": "speculation is off by default",
    "weft-router: Media that were degraded: A": "no encoding fails",
    "weft-router: Failed calls to members: A": "no member fails",
    "weft-router: Waits for room, p90: A": "no request has to wait for room",
    "weft-router: Reading and fetching media, p90: B": "the load has no URLs",
    "weft-router: Token frames not used: A": "no client leaves",
}
"""Maps the queries that may show nothing under this load, as patterns, to the reason."""
UNSEEN = {"weft_router_degraded_total": "no encoding fails"}
"""Maps the metrics in rules that have no series under this load to the reason."""


class Watched(NamedTuple):
    """A `Watched` is a cluster after its load, with the Prometheus that has watched it."""

    cluster: ClusterProcess
    prometheus: PrometheusProcess
    load: MetricLoad
    port: int
    """Is the port of the machine's scrape endpoint."""
    from_s: float
    until_s: float


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def members_of(cluster: ClusterProcess) -> list[dict[str, Any]]:
    """Returns the records of all members, routers included."""
    with cluster.client() as client:
        lists = client.get("/weft/members").json().values()
    return [each for listed in lists if isinstance(listed, list) for each in listed if isinstance(each, dict)]


async def load_of(cluster: ClusterProcess, prometheus: PrometheusProcess) -> MetricLoad:
    """Sends the load twice, with scrapes in between, so that rates see it."""
    load: MetricLoad | None = None
    for _ in range(2):
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
            if load is not None:
                load.client = client
            load = await send_load(client, cluster.model, load)
        num_before = prometheus.num_scrapes()
        await asyncio.to_thread(eventually, lambda: prometheus.num_scrapes() >= num_before + 2)  # noqa: B023
    assert load is not None
    return load


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    prometheus_tool("prometheus")
    port = free_port()
    with (
        start_cluster(network={"metrics_port": port}, workers={"num_blocks": 512}) as cluster,
        prometheus_of(cluster.url, tmp_path_factory.mktemp("prometheus"), free_port()) as prometheus,
    ):
        # A rate needs a sample before the load.
        eventually(lambda: prometheus.num_scrapes() >= 2)
        from_s = time.time()
        load = asyncio.run(load_of(cluster, prometheus))
        num_before = prometheus.num_scrapes()
        eventually(lambda: prometheus.num_scrapes() >= num_before + 4)
        yield Watched(cluster, prometheus, load, port, from_s - 2, time.time())


# ------------------------------------------------------------ counts


def test_counts_are_what_the_load_did(watched: Watched) -> None:
    load, prometheus = watched.load, watched.prometheus
    exchanges: Counter[str] = Counter()
    for (route, status), number in load.exchanges.items():
        exchanges[f"{route} {status}"] += number
    found = prometheus.query(
        'sum by (endpoint, status) (weft_router_http_requests_total{endpoint!~"/health.*|/weft.*"})'
    )
    shown = {f"{each['metric']['endpoint']} {each['metric']['status']}": float(each["value"][1]) for each in found}
    assert shown == dict(exchanges)
    assert prometheus.by("code", "weft_router_requests_total") == dict(load.codes)
    assert prometheus.by("modality", "weft_router_media_items_total") == dict(load.items)
    assert prometheus.by("modality", "weft_router_time_to_first_token_seconds_count") == dict(load.classes)
    for metric, number in (
        ("weft_router_prompt_tokens_total", load.num_prompt),
        ("weft_router_prefix_hit_tokens_total", load.num_cached),
        ("weft_router_completion_tokens_total", load.num_generated),
        ("weft_worker_tokens_generated_total", load.num_generated),
    ):
        assert prometheus.by("", metric) == {"": number} if number else True, metric
    assert prometheus.by("link", "weft_worker_transfers_total").keys() == {"same_host"}


def test_one_target_has_every_member_once(watched: Watched) -> None:
    (target,) = watched.prometheus.ask("targets")["activeTargets"]
    assert target["labels"] == {"cluster": "weft", "instance": f"127.0.0.1:{watched.port}", "job": "weft"}
    assert target["health"] == "up"
    now = scraped(f"http://127.0.0.1:{watched.port}/metrics")
    names = {each["member_id"] for each in members_of(watched.cluster)}
    assert now.by("member", "weft_member_up") == dict.fromkeys(names, 1.0)
    assert now.by("member", "weft_process_open_fds").keys() == names
    assert len(now.values("weft_router_requests_in_flight")) == 1


# ------------------------------------------------------------ dashboards


QUERIES = {query.name: query for query in queries(f"{RATE_S}s")}


def is_listed(query: BoardQuery) -> bool:
    return any(re.fullmatch(pattern, query.name) for pattern in EMPTY)


@pytest.mark.parametrize("name", QUERIES)
def test_a_panel_shows_something(name: str, watched: Watched) -> None:
    query = QUERIES[name]
    found = watched.prometheus.range(query.expr, watched.from_s, watched.until_s, 1)
    numbers = [float(value) for series in found for _, value in series["values"]]
    is_empty = not [each for each in numbers if not math.isnan(each)]
    assert not is_empty or is_listed(query)
    assert not [each for each in numbers if each < 0], "no panel has negative values"


def test_what_may_be_empty_exists() -> None:
    assert [pattern for pattern in EMPTY if not any(re.fullmatch(pattern, name) for name in QUERIES)] == []


def test_a_legend_tells_series_apart(watched: Watched) -> None:
    for query in QUERIES.values():
        found = watched.prometheus.range(query.expr, watched.from_s, watched.until_s, 1)
        labels = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        names = [tuple(series["metric"].get(label, "") for label in sorted(labels)) for series in found]
        assert len(set(names)) == len(names), query.name


# ------------------------------------------------------------ rules and alerts


def test_every_rule_evaluates_and_no_alert_fires(watched: Watched) -> None:
    groups = watched.prometheus.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 30
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules if rule["type"] == "alerting" and rule["state"] == "firing"] == []


def test_rules_ask_for_series_that_are_there(watched: Watched) -> None:
    rules = [rule for group in watched.prometheus.ask("rules")["groups"] for rule in group["rules"]]
    names = {name for rule in rules for name in re.findall(r"\bweft[_:][\w:]+", rule["query"])}
    missing = {name for name in names if not watched.prometheus.query(f'count({{__name__="{name}"}})')}
    assert missing - UNSEEN.keys() == set()
    recorded = {rule["name"] for rule in rules if rule["type"] == "recording"}
    silent = {name for name in recorded if not watched.prometheus.query(f"last_over_time({name}[1m])")}
    assert silent == set(), "a ratio without failures is no series, or 0"


# ------------------------------------------------------------ the endpoint of the machine


def test_another_member_serves_the_machine_when_the_first_is_killed(watched: Watched) -> None:
    """This is the last test of the module, because it ends a member."""
    url = f"http://127.0.0.1:{watched.port}/metrics"
    name_to_pid = {each["member_id"]: each["pid"] for each in members_of(watched.cluster)}
    owner = _owner_of(watched.port)
    assert owner in name_to_pid.values()
    os.kill(owner, signal.SIGKILL)
    eventually(lambda: _answers(url), 30)
    assert _owner_of(watched.port) != owner
    dead = next(name for name, pid in name_to_pid.items() if pid == owner)
    up = scraped(url).by("member", "weft_member_up")
    assert up.get(dead, 0.0) == 0.0
    assert all(up[name] == 1.0 for name in name_to_pid if name != dead)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _owner_of(port: int) -> int | None:
    """Returns the process that listens on a port of the loopback."""
    for process in psutil.process_iter():
        try:
            if any(each.laddr.port == port and each.status == "LISTEN" for each in process.net_connections("tcp")):
                return process.pid
        except psutil.Error:
            continue
    return None

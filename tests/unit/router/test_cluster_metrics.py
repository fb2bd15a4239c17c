"""Tests that a scrape answers with the series of all routers, whichever router it reaches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from operator import attrgetter
from typing import TypeVar, get_type_hints

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

import router.observe.cluster_series
from deploy.testing import LocalHub, LocalPlane
from fabric.contracts import (
    EncodeCost,
    EncoderReport,
    EngineStats,
    FeatureStats,
    LinkStats,
    Member,
    MemberId,
    MetricsQuestion,
    MetricsReply,
    PlaneMessage,
    ProcessStats,
    WorkerReport,
    metrics_of,
)
from fabric.contracts.reported_metrics import ReportedMetric
from router.observe import ClusterMetrics, MemberReports, MembershipSeries, RouterMetrics, report_exposition
from router.observe.router_metrics import written
from router.observe.usage_series import MAX_NAMES

Struct = TypeVar("Struct", bound=msgspec.Struct)
REPORT = WorkerReport(MemberId("worker-0"), 1, 1, (), EngineStats(num_running=3, steps=5), FeatureStats())


class Scraped:
    """A `Scraped` is one router as far as its metrics go."""

    def __init__(self, hub: LocalHub, name: str) -> None:
        self.metrics = RouterMetrics(lambda: 0, lambda: 0)
        self.reports = MemberReports()
        self.metrics.registry.register(self.reports)
        self.plane = LocalPlane(hub, f"local://{name}")
        self.cluster = ClusterMetrics(MemberId(name), self.plane, self.metrics, has_members=True)
        self.member = Member(MemberId(name), "router", self.plane.address, "host", 1)
        self.is_deaf = False
        self.plane.start(self.handle)

    def handle(self, message: PlaneMessage) -> None:
        if isinstance(message, MetricsQuestion | MetricsReply) and not self.is_deaf:
            self.cluster.handle(message)


def routers(number: int) -> list[Scraped]:
    hub = LocalHub()
    made = [Scraped(hub, f"router-{index}") for index in range(number)]
    for each in made:
        each.cluster.update_members([one.member for one in made])
    return made


def samples(text: bytes, name: str) -> dict[str, float]:
    """Returns the values of a metric by router. Fails if the lines of a metric do not stand together."""
    families = [family.name for family in text_string_to_metric_families(text.decode())]
    assert len(families) == len(set(families))
    return {
        sample.labels["router"]: sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == name
    }


async def test_every_router_answers_with_the_series_of_all() -> None:
    made = routers(3)
    for index, each in enumerate(made):
        each.metrics.prompt_tokens.inc(index + 1)
        each.reports.put(REPORT)
    expected = {"router-0": 1.0, "router-1": 2.0, "router-2": 3.0}
    for each in made:
        text = await each.cluster.exposition()
        assert samples(text, "weft_router_prompt_tokens_total") == expected
        assert text.count(b'weft_worker_num_running{worker="worker-0"} 3.0') == 1, "each router has the same reports"
        assert samples(text, "weft_router_num_silent")[each.member.member_id] == 0


async def test_a_router_that_does_not_answer_is_missing_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.observe.cluster_series, "REPLY_S", 0.05)
    first, second, third = routers(3)
    second.is_deaf = True
    text = await first.cluster.exposition()
    assert set(samples(text, "weft_router_prompt_tokens_total")) == {"router-0", "router-2"}
    assert samples(text, "weft_router_num_silent")["router-0"] == 1
    second.is_deaf = False
    assert samples(await first.cluster.exposition(), "weft_router_num_silent")["router-0"] == 0
    assert third.cluster._questions == first.cluster._questions == {}


async def test_scrapes_at_one_time_do_not_mix_their_replies() -> None:
    first, second = routers(2)
    second.metrics.prompt_tokens.inc(7)
    texts = await asyncio.gather(*(first.cluster.exposition() for _ in range(5)))
    for text in texts:
        assert samples(text, "weft_router_prompt_tokens_total") == {"router-0": 0.0, "router-1": 7.0}


def test_a_member_shows_its_own_series_and_no_others() -> None:
    text = report_exposition(REPORT).decode()
    assert 'weft_worker_num_running{worker="worker-0"} 3.0' in text.splitlines()
    assert 'weft_worker_steps_total{worker="worker-0"} 5.0' in text.splitlines()
    assert "weft_encoder_" not in text


async def test_the_series_of_a_router_that_is_alone_have_no_further_label() -> None:
    [alone] = routers(1)
    alone.metrics.prompt_tokens.inc(4)
    assert "weft_router_prompt_tokens_total 4.0" in (await alone.cluster.exposition()).decode().splitlines()


# ------------------------------------------------------------ how large a scrape may become


def num_series(metrics: RouterMetrics) -> int:
    return sum(len(family.samples) for family in metrics.registry.collect())


def test_ten_thousand_tenants_and_keys_do_not_grow_a_scrape_without_bound() -> None:
    metrics = RouterMetrics(lambda: 0, lambda: 0)
    sizes = []
    for number in range(10_000):
        tenant, key = f"t{number}", f"k{number}"
        metrics.observe_admission(tenant, "interactive", "dispatched")
        metrics.observe_charge(tenant, 1, 0.5)
        metrics.usage.observe(tenant, key, 3, 2, 1)
        metrics.usage.observe_media(tenant, key, {"audio": 1.0})
        metrics.usage.observe_encoding(tenant, key, 0.5)
        if number in (2 * MAX_NAMES, 9_999):
            sizes.append(num_series(metrics))
    assert sizes[0] == sizes[1] < 40 * MAX_NAMES, "a counter has two samples"
    value = metrics.registry.get_sample_value
    others = 10_000 - MAX_NAMES
    assert value("weft_router_usage_requests_total", {"tenant": "other", "key": "other"}) == others
    assert value("weft_router_usage_requests_total", {"tenant": "t5", "key": "k5"}) == 1
    assert value("weft_router_tenant_tokens_total", {"tenant": "other"}) == others
    labels = {"tenant": "other", "service_class": "interactive", "outcome": "dispatched"}
    assert value("weft_router_admissions_total", labels) == others
    assert value("weft_router_usage_prompt_tokens_total", {"tenant": "other", "key": "other"}) == 3 * others
    labels = {"tenant": "other", "key": "other", "modality": "audio"}
    assert value("weft_router_usage_media_seconds_total", labels) == others
    assert value("weft_router_usage_encoder_seconds_total", {"tenant": "other", "key": "other"}) == 0.5 * others


def test_members_that_come_and_go_leave_no_series() -> None:
    reports, membership = MemberReports(), MembershipSeries({"worker": 2})
    for number in range(10_000):
        name = MemberId(f"worker-{number}")
        reports.put(WorkerReport(name, 1, 1, (), EngineStats(), FeatureStats(), links=(LinkStats("tcp", 1),)))
        reports.remove(MemberId(f"worker-{number - 1}"))
        membership.update_members([Member(name, "worker", "x", "h", 1, config_flaw="no such key")])
    shown = {sample.labels.get("worker") for family in reports.collect() for sample in family.samples}
    assert shown == {"worker-9999", None}
    numbers = {
        (sample.name, sample.labels["kind"]): sample.value
        for family in membership.collect()
        for sample in family.samples
    }
    assert numbers["weft_router_members", "worker"] == 1
    assert numbers["weft_router_members_expected", "worker"] == 2
    assert numbers["weft_router_members_refusing_config", "worker"] == 1
    assert numbers["weft_router_members_refusing_config", "router"] == 0
    assert numbers["weft_router_members", "encoder"] == numbers["weft_router_members_expected", "encoder"] == 0


async def test_a_router_tells_its_own_process_and_its_build() -> None:
    [alone] = routers(1)
    alone.reports.own_process = MemberId("router-0"), lambda: ProcessStats(1.5, 4096, 7)
    alone.reports.put(REPORT)
    alone.metrics.begin("demo", ["image"])
    text = alone.metrics.exposition(None, has_members=True).decode().splitlines()
    assert 'weft_process_cpu_seconds_total{kind="router",member="router-0"} 1.5' in text
    assert 'weft_process_resident_memory_bytes{kind="router",member="router-0"} 4096.0' in text
    assert 'weft_process_open_fds{kind="worker",member="worker-0"} 0.0' in text
    assert any(line.startswith('weft_build_info{model="demo",python="') and line.endswith(" 1.0") for line in text)
    assert not any("_created" in line for line in text)
    own = alone.cluster.own_exposition().decode()
    assert 'kind="worker"' not in own, "a worker tells its own process itself"
    assert 'weft_process_open_fds{kind="router",member="router-0"} 7.0' in own


def test_a_member_tells_its_links_and_its_process() -> None:
    links = (LinkStats("rdma", 2, 300, 0.5, 1, 1, 600.0),)
    text = report_exposition(msgspec.structs.replace(REPORT, links=links, process=ProcessStats(2.0, 1, 1))).decode()
    labels = '{link="rdma",worker="worker-0"}'
    for name, shown in {"s": 2.0, "_bytes": 300.0, "_seconds": 0.5, "_failures": 1.0, "s_staged": 1.0}.items():
        assert f"weft_worker_transfer{name}_total{labels} {shown}" in text.splitlines()
    assert f"weft_worker_transfer_bytes_per_second{labels} 600.0" in text.splitlines()
    assert 'weft_process_cpu_seconds_total{kind="worker",member="worker-0"} 2.0' in text.splitlines()


async def test_a_scrape_of_200_members_has_all_of_them() -> None:
    """Prints what a scrape takes: on one core, 5 ms of the event loop and 18 ms of another thread for 200 members."""
    [alone] = routers(1)
    seconds = {}
    for number in range(200):
        name = MemberId(f"worker-{number}")
        alone.reports.put(WorkerReport(name, 1, 1, (), EngineStats(), FeatureStats()))
        if number in (0, 199):
            began_s = time.perf_counter()
            families = list(alone.metrics.families(None, has_members=True))
            collected_s = time.perf_counter()
            text = written(families)
            seconds[number + 1] = collected_s - began_s, time.perf_counter() - collected_s
    assert text == (await alone.cluster.exposition())
    print(f"{len(text)} bytes for 200 members; seconds by number: {seconds}")
    assert text.count(b"weft_worker_num_running{") == 200


# ------------------------------------------------------------ every field of a report


def numbered(struct: type[Struct], numbers: Iterator[int], **others: object) -> Struct:
    """Returns a struct in which each number that declares a metric differs from all others."""
    values = dict(others)
    for field, hint in get_type_hints(struct, include_extras=True).items():
        bare = get_type_hints(struct)[field]
        if field in values:
            continue
        if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
            values[field] = numbered(bare, numbers)
        elif any(isinstance(each, ReportedMetric) for each in getattr(hint, "__metadata__", ())):
            values[field] = bare(next(numbers))
    return struct(**values)


def expected_lines(struct: Struct, labels: str) -> list[str]:
    """Returns the lines of an exposition that the fields of a struct stand for."""
    return [
        f"{metric.name}{'_total' if metric.kind == 'counter' else ''}{{{labels}}} {float(attrgetter(path)(struct))}"
        for path, metric in metrics_of(type(struct))
    ]


def test_every_field_of_a_report_is_shown_by_the_metric_that_it_declares() -> None:
    """Each field has a value of its own, so a metric that shows another field fails."""
    numbers = iter(range(1000, 2000))
    link = numbered(LinkStats, numbers, link="rdma")
    cost = numbered(EncodeCost, numbers, modality="image")
    worker = numbered(WorkerReport, numbers, worker_id="m", epoch=1, seq=1, acknowledged=(), links=(link,))
    encoder = numbered(EncoderReport, numbers, encoder_id="m", epoch=1, seq=1, acknowledged=(), costs=(cost,))
    for report, kind, inner in ((worker, "worker", (link, 'link="rdma",')), (encoder, "encoder", (cost, ""))):
        struct, label = inner
        lines = report_exposition(report).decode().splitlines()
        wanted = expected_lines(report, f'{kind}="m"')
        wanted += expected_lines(report.process, f'kind="{kind}",member="m"')
        wanted += expected_lines(struct, f'{label}{kind}="m"' if label else 'encoder="m",modality="image"')
        assert len(wanted) > 40
        assert sorted(set(wanted) - set(lines)) == []
        assert sum(not line.startswith("#") for line in lines) == len(wanted)

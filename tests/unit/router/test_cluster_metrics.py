"""Tests that a scrape answers with the series of all routers, whichever router it reaches."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

import router.observe.router_metrics
from deploy.testing import LocalHub, LocalPlane
from fabric.contracts import (
    EngineStats,
    FeatureStats,
    Member,
    MemberId,
    MetricsQuestion,
    MetricsReply,
    PlaneMessage,
    WorkerReport,
)
from router.observe import ClusterMetrics, RouterMetrics, report_exposition

REPORT = WorkerReport(MemberId("worker-0"), 1, 1, (), EngineStats(num_running=3, steps=5), FeatureStats())


class Scraped:
    """A `Scraped` is one router as far as its metrics go."""

    def __init__(self, hub: LocalHub, name: str) -> None:
        self.metrics = RouterMetrics(lambda: 0, lambda: 0)
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
        each.metrics.reports.put(REPORT)
    expected = {"router-0": 1.0, "router-1": 2.0, "router-2": 3.0}
    for each in made:
        text = await each.cluster.exposition()
        assert samples(text, "weft_router_prompt_tokens_total") == expected
        assert text.count(b'weft_worker_num_running{worker="worker-0"} 3.0') == 1, "each router has the same reports"
        assert samples(text, "weft_router_num_silent")[each.member.member_id] == 0


async def test_a_router_that_does_not_answer_is_missing_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.observe.router_metrics, "REPLY_S", 0.05)
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

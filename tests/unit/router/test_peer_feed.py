"""Tests the exchange of news between routers: who gets them, when, and what is made of them."""

from __future__ import annotations

import asyncio
import random

import pytest

import router.peer_feed
from deploy.testing import LocalHub, LocalPlane, ManualClock, settled
from fabric.contracts import AttemptId, KvScheme, Member, MemberId, PlaneMessage, RequestId, RouterNews
from modalities.family import ModelShape
from router.peer_feed import PeerFeed
from router.planning import ClusterState, RouteQuery

SHAPE = ModelShape(
    hidden_size=1024, num_levels=1, num_layers=4, num_kv_heads=4, head_dim=64, vocab_size=1000, max_model_len=8192
)
WORKER = Member(MemberId("w0"), "worker", "address-w0", "h-0", 1, kv_scheme=KvScheme("weft", 16))


class Fed:
    """A `Fed` is one router as far as its peer feed goes."""

    def __init__(self, hub: LocalHub, name: str) -> None:
        self.clock = ManualClock()
        self.cluster = ClusterState(SHAPE, 16, random.Random(1))
        self.plane = LocalPlane(hub, f"local://{name}")
        self.feed = PeerFeed(MemberId(name), self.plane, self.cluster, self.clock)
        self.member = Member(MemberId(name), "router", self.plane.address, "h-0", 1)
        self.received: list[RouterNews] = []
        self.plane.start(self.handle)

    def handle(self, message: PlaneMessage) -> None:
        assert isinstance(message, RouterNews)
        self.received.append(message)
        self.feed.handle(message)

    def update_members(self, members: list[Member]) -> None:
        self.cluster.update_members(members)
        self.feed.update_members(members)

    def dispatch(self, name: str) -> AttemptId:
        attempt_id = AttemptId(RequestId(name), 0)
        request = RouteQuery(attempt_id, 600, {}, (), (), 2048)
        self.cluster.note_dispatched(request, self.cluster.plan(request, self.clock.now()), self.clock.now())
        return attempt_id

    @property
    def num_open(self) -> int:
        return int(self.cluster.columns(self.clock.now()).workers.num_open.sum())


def routers(number: int) -> list[Fed]:
    hub = LocalHub()
    made = [Fed(hub, f"router-{index}") for index in range(number)]
    for each in made:
        each.update_members([WORKER, *(one.member for one in made)])
    return made


async def test_all_other_routers_learn_of_a_dispatch_and_of_its_first_token() -> None:
    first, second, third = routers(3)
    attempt_id = first.dispatch("a")
    await settled(lambda: len(second.received) == len(third.received) == 1)
    assert [each.num_open for each in (first, second, third)] == [1, 1, 1]
    assert first.received == [], "a router knows its own dispatches"
    first.cluster.note_first_token(attempt_id, first.clock.now())
    await settled(lambda: len(second.received) == len(third.received) == 2)
    assert [each.received[1].computed[0].request_id for each in (second, third)] == ["a", "a"]
    first.cluster.note_ended(attempt_id, first.clock.now())
    await settled(lambda: len(second.received) == len(third.received) == 3)
    assert [each.num_open for each in (first, second, third)] == [0, 0, 0]


async def test_news_within_the_interval_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.peer_feed, "NEWS_INTERVAL_S", 0.02)
    first, second = routers(2)
    first.dispatch("a")
    await settled(lambda: len(second.received) == 1)
    for name in "bcd":
        first.dispatch(name)
        await asyncio.sleep(0)
    await settled(lambda: len(second.received) == 2)
    assert [len(each.dispatched) for each in second.received] == [1, 3]
    assert [each.seq for each in second.received] == [1, 2]


async def test_a_router_that_becomes_alone_collects_nothing() -> None:
    first, second = routers(2)
    first.update_members([WORKER, first.member])
    attempt_id = first.dispatch("a")
    first.cluster.note_first_token(attempt_id, 1.0)
    assert first.cluster.news.take(first.member.member_id, 1.0) is None
    first.update_members([WORKER, first.member, second.member])
    first.dispatch("b")
    await settled(lambda: len(second.received) == 1)
    assert [each.request_id for each in second.received[0].dispatched] == ["b"]

"""Tests that the record of a request is found whichever router is asked, over two routers and one message plane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import httpx
from router_chats import chat_body, image, text

from deploy.testing import FakeCluster, fake_cluster, settled
from deploy.testing.fake_clusters import NoProber
from fabric.contracts import Member, MemberId, PlaneMessage, RequestId, SystemClock, TraceQuestion, TraceReply
from fabric.transport import LocalPlane
from modalities.registry import REGISTRY
from router.edge import create_app
from router.observe import RequestFilter, TraceRing, TraceSearch
from router.prompt import PromptBuilder
from router.run import Pools
from router.service import RouterService

FIRST, SECOND = MemberId("router-0"), MemberId("router-1")


def member(router_id: MemberId, plane: LocalPlane) -> Member:
    return Member(router_id, "router", plane.address, "host-0", 1)


class Pair(NamedTuple):
    cluster: FakeCluster
    first: httpx.AsyncClient
    second: httpx.AsyncClient


@asynccontextmanager
async def two_routers() -> AsyncIterator[Pair]:
    """Yields clients of two routers of one cluster."""
    async with fake_cluster() as cluster:
        config, plane = cluster.service.config, LocalPlane(cluster.hub, "local://second")
        prompt_builder = PromptBuilder(config, cluster.service.family, cluster.codec, REGISTRY, NoProber())
        pools = Pools(cluster.pools, cluster.pools)
        other = RouterService(SECOND, config, prompt_builder, plane, pools, SystemClock())
        await other.start()
        routers = [member(FIRST, cluster.plane), member(SECOND, plane)]
        for service in (cluster.service, other):
            service.update_members([*cluster.members, *routers])
        async with client_of(cluster.service) as first, client_of(other) as second:
            yield Pair(cluster, first, second)
        await other.stop()
        plane.close()


def client_of(service: RouterService) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(service)), base_url="http://weft")


async def ask(client: httpx.AsyncClient, content: object = "hello") -> str:
    answer = await client.post("/v1/chat/completions", content=chat_body(content))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def test_a_request_is_found_whichever_router_is_asked() -> None:
    async with two_routers() as (_, first, second):
        ran_on_first, ran_on_second = await ask(first, [image(), text("?")]), await ask(second)
        for name, router_id in ((ran_on_first, FIRST), (ran_on_second, SECOND)):
            records = [(await client.get(f"/weft/requests/{name}")).json() for client in (first, second)]
            assert records[0] == records[1]
            assert records[0]["router_id"] == router_id
        page = await first.get(f"/weft/requests/{ran_on_second}.html")
        assert SECOND in page.text


async def test_the_lists_of_all_routers_are_merged_by_time() -> None:
    async with two_routers() as (_, first, second):
        names = [await ask(client) for client in (first, second, first, second, second)]
        expected = [name.removeprefix("chatcmpl-") for name in reversed(names)]
        for client in (first, second):
            listed = (await client.get("/weft/requests")).json()["requests"]
            assert [each["request_id"] for each in listed] == expected
            three = (await client.get("/weft/requests", params={"limit": 3})).json()["requests"]
            assert [each["request_id"] for each in three] == expected[:3]


async def test_a_request_that_no_router_knows_is_not_found_at_once() -> None:
    async with two_routers() as (_, first, _):
        missing = await first.get("/weft/requests/req-unknown")
        assert missing.status_code == 404
        message = missing.json()["error"]["message"]
        assert "`req-unknown`" in message
        assert "none of the 2 routers" in message
        assert "no answer" not in message


async def test_a_silent_router_is_named_and_delays_the_answer_only() -> None:
    async with two_routers() as (cluster, first, _):
        plane = LocalPlane(cluster.hub, "local://frozen")  # Its messages are never handled.
        cluster.service.search._limit_s = 0.01
        cluster.service.update_members([*cluster.members, member(MemberId("router-9"), plane)])
        mine = await ask(first)
        assert (await first.get(f"/weft/requests/{mine}")).status_code == 200
        listed = (await first.get("/weft/requests")).json()
        assert listed["routers_without_answer"] == ["router-9"]
        assert [each["request_id"] for each in listed["requests"]] == [mine.removeprefix("chatcmpl-")]
        missing = (await first.get("/weft/requests/req-unknown")).json()["error"]["message"]
        assert missing.endswith("no answer came from router-9")
        page = await first.get("/weft/requests?format=html")
        assert "router-9" in page.text
        plane.close()


# ---------------------------------------------------------------- These tests cover one search, without a router.


class Wires:
    """`Wires` hold what a search sends, and bring messages to it."""

    def __init__(self, *others: MemberId) -> None:
        self.sent: list[tuple[str, PlaneMessage]] = []
        self.is_open = True
        self.search = TraceSearch(FIRST, "local://a", TraceRing(4), self._send, limit_s=60.0)
        self.tell(*others)

    def tell(self, *others: MemberId) -> set[str]:
        """Tells the search which other routers there are, besides its own and a worker."""
        members = [Member(each, "router", f"local://{each}", "host-0", 1) for each in (FIRST, *others)]
        return self.search.update_members([*members, Member(MemberId("worker-0"), "worker", "local://w", "host-0", 1)])

    def _send(self, address: str, message: PlaneMessage) -> bool:
        self.sent.append((address, message))
        return self.is_open

    def reply(self, router_id: MemberId, records: bytes, number: int | None = None) -> None:
        if number is None:
            (_, question) = self.sent[-1]
            assert isinstance(question, TraceQuestion)
            number = question.number
        self.search.handle(TraceReply(router_id, number, records))


async def test_the_first_router_that_knows_the_request_ends_the_search() -> None:
    wires = Wires(SECOND, MemberId("router-2"))
    search = asyncio.ensure_future(wires.search.find("req-1"))
    await settled(lambda: len(wires.sent) == 2)
    assert {address for address, _ in wires.sent} == {"local://router-1", "local://router-2"}
    wires.reply(SECOND, b"[]")
    await asyncio.sleep(0)
    assert not search.done()
    wires.reply(MemberId("router-2"), b'[{"request_id":"req-1"}]')
    assert (await search).records == [{"request_id": "req-1"}]
    assert wires.search._waiting == {}


async def test_replies_to_other_questions_and_late_ones_are_dropped() -> None:
    wires = Wires(SECOND)
    search = asyncio.ensure_future(wires.search.find("req-1"))
    await settled(lambda: len(wires.sent) == 1)
    wires.reply(SECOND, b'[{"request_id":"other"}]', number=999)
    wires.reply(MemberId("router-7"), b'[{"request_id":"other"}]')
    wires.reply(SECOND, b"[]")
    wires.reply(SECOND, b'[{"request_id":"late"}]')
    assert (await search).records == []
    wires.reply(SECOND, b'[{"request_id":"too late"}]')


async def test_a_router_that_leaves_ends_the_questions_to_it() -> None:
    wires = Wires(SECOND)
    search = asyncio.ensure_future(wires.search.latest(RequestFilter()))
    await settled(lambda: len(wires.sent) == 1)
    assert wires.tell() == {"local://router-1"}
    found = await search
    assert (found.records, found.silent) == ([], (SECOND,))


async def test_a_router_that_can_not_be_reached_counts_as_silent() -> None:
    wires = Wires(SECOND)
    wires.is_open = False
    found = await wires.search.find("req-1")
    assert (found.asked, found.silent) == ((SECOND,), (SECOND,))


async def test_a_cancelled_search_leaves_nothing_behind() -> None:
    wires = Wires(SECOND)
    search = asyncio.ensure_future(wires.search.find("req-1"))
    await settled(lambda: len(wires.sent) == 1)
    search.cancel()
    await asyncio.gather(search, return_exceptions=True)
    assert wires.search._waiting == {}


async def test_a_question_is_answered_to_the_router_that_asks() -> None:
    wires = Wires()
    wires.search.handle(TraceQuestion(SECOND, "local://b", 5, RequestId("req-unknown")))
    wires.search.handle(TraceQuestion(SECOND, "local://b", 6, RequestId(""), 10))
    replies = [("local://b", TraceReply(FIRST, number, b"[]")) for number in (5, 6)]
    assert wires.sent == replies


async def test_a_reply_that_is_no_list_of_records_counts_as_silence() -> None:
    for records in (b"\xff", b"{}", b"[7]"):
        wires = Wires(SECOND)
        search = asyncio.ensure_future(wires.search.find("req-1"))
        await settled(lambda wires=wires: len(wires.sent) == 1)
        wires.reply(SECOND, records)
        found = await search
        assert (found.records, found.silent) == ([], (SECOND,))

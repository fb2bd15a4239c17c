"""Tests what a list of requests says of those that run: their stage, and their first token."""

from __future__ import annotations

import asyncio

import pytest
from edge_client import served
from router_chats import chat_body

from deploy.testing import ManualClock, settled
from fabric.contracts import MemberId, RequestId, TraceEvent
from router.observe.traces import EVENT_TO_STAGE, RequestTrace

ROUTER = MemberId("router-0")


@pytest.mark.parametrize(
    ("names", "stage"),
    [
        ([], "reading"),
        (["received"], "reading"),
        (["received", "fetched"], "reading"),
        (["received", "read"], "prompting"),
        (["received", "read", "prompted"], "planning"),
        (["prompted", "waiting"], "waiting"),
        (["prompted", "waiting", "waited"], "planning"),
        (["prompted", "waiting", "waited", "admission"], "planning"),
        (["waited", "planned"], "dispatched"),
        (["waited", "planned", "dispatched", "charged"], "dispatched"),
        (["planned", "first_token"], "generating"),
        (["planned", "generate_failed"], "planning"),
        (["planned", "generate_failed", "planned"], "dispatched"),
        (["first_token", "finished"], "ended"),
        (["planned", "aborted"], "ended"),
    ],
)
def test_the_latest_event_of_the_router_tells_the_stage(names: list[str], stage: str) -> None:
    trace = RequestTrace(RequestId("req-1"), ROUTER, ManualClock(), 100)
    for name in names:
        trace.add(name)
    trace._extend([TraceEvent(0.0, MemberId("worker-0"), "finished", {})])
    assert trace.stage == trace.summary()["stage"] == stage
    assert stage in EVENT_TO_STAGE.values()


def test_a_request_that_runs_shows_when_its_first_token_came() -> None:
    clock = ManualClock()
    trace = RequestTrace(RequestId("req-1"), ROUTER, clock, 100)
    trace.add("received")
    assert trace.summary()["first_token_s"] is None
    clock.advance(0.25)
    trace.add("first_token", attempt=0, choice=0)
    clock.advance(1.0)
    assert trace.summary()["first_token_s"] == 0.25


async def test_the_list_and_the_members_over_http() -> None:
    async with served(num_workers=1) as (cluster, client):
        script = cluster.workers[0].script
        script.pause_at = 2
        asking = asyncio.create_task(client.post("/v1/chat/completions", content=chat_body()))
        await settled(lambda: any(trace.stage == "generating" for trace in cluster.service.traces._traces.values()))
        [running] = (await client.get("/weft/requests", params={"outcome": "running"})).json()["requests"]
        assert (running["stage"], running["total_s"]) == ("generating", None)
        assert running["first_token_s"] > 0
        script.resume.set()
        assert (await asking).status_code == 200
        [ended] = (await client.get("/weft/requests")).json()["requests"]
        assert (ended["stage"], ended["outcome"]) == ("ended", "ok")
        listed = (await client.get("/weft/members")).json()
        assert set(listed) == {"version", "members", "routers"}
        assert {each["kind"] for each in listed["members"]} == {"worker", "encoder"}

"""Tests that a request goes to workers that can take it, where workers of other pools can't: embeddings, speech,
adapters, and prompts that are longer than a pool's context."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from edge_client import served
from router_chats import chat_body

from deploy.testing import TINY_MODEL, FakeCluster, fake_cluster, settled
from fabric.contracts import ADAPTERS, EMBEDDINGS, SPEECH
from router.edge import create_app
from router.router_config import SpeechSettings

NUM_ASKED = 6


def publish(cluster: FakeCluster, **limits: object) -> None:
    """Tells the router that the first worker has these limits and all others have none."""
    limited = cluster.workers[0].member_id
    cluster.service.update_members(
        [msgspec.structs.replace(each, **limits) if each.member_id == limited else each for each in cluster.members]
    )


def num_requests(cluster: FakeCluster) -> list[int]:
    return [len(worker.requests) for worker in cluster.workers]


def embedding_body(content: str) -> bytes:
    return json.dumps({"model": TINY_MODEL, "input": content}).encode()


async def test_embeddings_go_to_a_worker_that_gives_them() -> None:
    async with served(embeddings="last", num_workers=2) as (cluster, client):
        publish(cluster, lacks=(EMBEDDINGS,))
        for number in range(NUM_ASKED):
            response = await client.post("/v1/embeddings", content=embedding_body(f"words {number}"))
            assert response.status_code == 200, response.text
        assert num_requests(cluster) == [0, NUM_ASKED]
        answers = [client.post("/v1/chat/completions", content=chat_body(f"hi {n}")) for n in range(NUM_ASKED)]
        assert {each.status_code for each in await asyncio.gather(*answers)} == {200}
        assert num_requests(cluster)[0] > 0, "what it can do, it does"


async def test_an_embedding_waits_for_a_worker_that_gives_it() -> None:
    async with served(embeddings="last", capacity_wait_s=30.0) as (cluster, client):
        publish(cluster, lacks=(EMBEDDINGS,))
        asked = asyncio.create_task(client.post("/v1/embeddings", content=embedding_body("words")))
        await settled(lambda: cluster.service.admission.num_in_flight == 1)
        cluster.add_worker()
        publish(cluster, lacks=(EMBEDDINGS,))
        assert (await asked).status_code == 200
        assert num_requests(cluster) == [0, 1]


async def test_without_such_a_worker_the_answer_is_503_when_the_wait_is_over() -> None:
    async with served(embeddings="last", capacity_wait_s=0.05) as (cluster, client):
        publish(cluster, lacks=(EMBEDDINGS,))
        response = await client.post("/v1/embeddings", content=embedding_body("words"))
        assert response.status_code == 503
        message = response.json()["error"]["message"]
        assert message.startswith("no worker that can take the request is available, and none came within")
        assert num_requests(cluster) == [0]


@contextlib.asynccontextmanager
async def speaking(**options: Any) -> AsyncIterator[tuple[FakeCluster, httpx.AsyncClient]]:
    """Runs a cluster that speaks, whose first worker does not."""
    async with fake_cluster(speech=SpeechSettings(("anna",), 24_000), **options) as cluster:
        cluster.add_stage(1, "talker", is_last=False)
        cluster.add_stage(2, "code2wav", is_last=True)
        publish(cluster, lacks=(SPEECH,))
        transport = httpx.ASGITransport(create_app(cluster.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://weft") as client:
            yield cluster, client


def spoken_body(content: str, **fields: object) -> bytes:
    return chat_body(content, modalities=["text", "audio"], **fields)


async def test_spoken_answers_go_to_a_worker_that_can_hand_over_its_rows() -> None:
    async with speaking(num_workers=2) as (cluster, client):
        for number in range(NUM_ASKED):
            response = await client.post("/v1/chat/completions", content=spoken_body(f"say {number}"))
            assert response.status_code == 200, response.text
        assert num_requests(cluster) == [0, NUM_ASKED]


async def test_a_spoken_answer_waits_in_the_queue_for_such_a_worker() -> None:
    """It waits for a worker, and not for a stage, although workers are there. So its deadline counts."""
    async with speaking(capacity_wait_s=30.0) as (cluster, client):
        late = spoken_body("say it", weft={"ttft_deadline_ms": 50})
        refused = await client.post("/v1/chat/completions", content=late)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "deadline_out_of_reach")
        asked = asyncio.create_task(client.post("/v1/chat/completions", content=spoken_body("say it")))
        await settled(lambda: cluster.service.picture()["num_waiting"] == 1)
        cluster.add_worker()
        publish(cluster, lacks=(SPEECH,))
        assert (await asked).status_code == 200
        assert num_requests(cluster) == [0, 1]


async def test_an_adapter_is_computed_by_a_worker_that_has_it() -> None:
    async with served(adapters={"poet": "/adapters/poet"}, num_workers=2) as (cluster, client):
        publish(cluster, lacks=(ADAPTERS,))
        for number in range(NUM_ASKED):
            response = await client.post("/v1/chat/completions", content=chat_body(f"hi {number}", model="poet"))
            assert response.status_code == 200, response.text
        assert num_requests(cluster) == [0, NUM_ASKED]
        assert {each.adapter for each in cluster.workers[1].requests} == {"poet"}


@pytest.mark.parametrize(("limit", "expected"), [(8, [0, NUM_ASKED]), (2048, None)])
async def test_a_long_prompt_goes_to_a_worker_that_takes_it(limit: int, expected: Any) -> None:
    async with served(num_workers=2) as (cluster, client):
        publish(cluster, max_context_tokens=limit)
        answers = [
            client.post("/v1/chat/completions", content=chat_body(f"{number} words of some length"))
            for number in range(NUM_ASKED)
        ]
        assert {each.status_code for each in await asyncio.gather(*answers)} == {200}
        if expected is None:
            assert num_requests(cluster)[0] > 0, "the prompts are shorter than its context"
        else:
            assert num_requests(cluster) == expected

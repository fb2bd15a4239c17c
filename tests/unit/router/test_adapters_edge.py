"""Tests how clients ask for LoRA adapters, over fake members: every route takes the name of an adapter where it takes
that of the model, the worker hears it, and the answer repeats it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from edge_client import events, served
from router_chats import chat_body, image, text

from deploy.testing import TINY_MODEL
from fabric.contracts import WorkerLost

ADAPTERS = {"poet": "s3://bucket/poet@v1", "org/clerk": "/adapters/clerk"}
CHAT = "/v1/chat/completions"
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "hello"}]}),
    ("/v1/completions", {"prompt": "hello"}),
    ("/v1/responses", {"input": "hello"}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("name", ["poet", "org/clerk", TINY_MODEL])
async def test_the_worker_hears_the_adapter_and_the_answer_repeats_it(
    path: str, body: dict[str, Any], name: str
) -> None:
    async with served(adapters=ADAPTERS) as (cluster, client):
        whole = await client.post(path, json=body | {"model": name})
        streamed = await client.post(path, json=body | {"model": name, "stream": True})
        assert (whole.status_code, whole.json()["model"]) == (200, name)
        if path != "/v1/responses":
            assert {event["model"] for event in events(streamed.text) if event != "[DONE]"} == {name}
        asked = [request.adapter for request in cluster.workers[0].requests]
        assert asked == ["" if name == TINY_MODEL else name] * 2


async def test_the_list_of_models_has_the_adapters() -> None:
    async with served(adapters=ADAPTERS) as (_, client):
        model, poet, clerk = (await client.get("/v1/models")).json()["data"]
        assert model["id"] == TINY_MODEL
        assert "parent" not in model
        assert poet == model | {"id": "poet", "root": "s3://bucket/poet@v1", "parent": TINY_MODEL}
        assert (clerk["root"], clerk["parent"]) == ("/adapters/clerk", TINY_MODEL)
        assert (await client.get("/v1/models/org/clerk")).json() == clerk
        assert (await client.get("/v1/models/org/clerk/")).status_code == 404
        missing = await client.get("/v1/models/singer")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(("path", "body"), [*BODIES, ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})])
async def test_an_unknown_name_is_answered_with_those_that_are_served(path: str, body: dict[str, Any]) -> None:
    async with served(adapters=ADAPTERS) as (_, client):
        answer = await client.post(path, json=body | {"model": "singer"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        served_names = f"`{TINY_MODEL}`, `poet`, `org/clerk`"
        assert error["message"] == f"the model `singer` does not exist; this server serves {served_names}"


async def test_an_error_names_the_first_of_many_adapters() -> None:
    async with served(adapters={f"a{number:03}": "/a" for number in range(200)}) as (_, client):
        message = (await client.post(CHAT, content=chat_body(model="singer"))).json()["error"]["message"]
        assert "`a006`, and 193 more (`GET /v1/models`)" in message
        assert "a007" not in message


async def test_other_routes_take_the_name() -> None:
    async with served(adapters=ADAPTERS) as (_, client):
        plain = await client.post("/tokenize", json={"prompt": "aé"})
        named = await client.post("/tokenize", json={"prompt": "aé", "model": "poet"})
        assert named.json() == plain.json()
        assert (await client.post("/detokenize", json={"tokens": [97], "model": "poet"})).json() == {"prompt": "a"}
        refused = await client.post("/v1/embeddings", json={"input": "a", "model": "poet"})
        assert refused.status_code == 404
        assert refused.json()["error"]["message"].startswith("the model `poet` serves no embeddings")


async def test_a_form_and_a_spoken_text_take_the_name_as_far_as_the_model_goes() -> None:
    async with served(adapters=ADAPTERS) as (_, client):
        for name, status in (("poet", 400), ("singer", 404)):
            heard = await client.post("/v1/audio/transcriptions", files={"file": b"RIFF"}, data={"model": name})
            spoken = await client.post("/v1/audio/speech", json={"model": name, "input": "a", "voice": "x"})
            assert (heard.status_code, spoken.status_code) == (status, status)


async def test_adapters_share_features_and_no_block() -> None:
    """The second request goes to the worker that has the prompt, but finds none of its blocks there."""
    content = [text("a long beginning of the prompt " * 4), image(), text("?")]
    async with served(adapters=ADAPTERS) as (cluster, client):
        cached = []
        for name in (TINY_MODEL, "poet", "org/clerk", "poet", TINY_MODEL):
            usage = (await client.post(CHAT, content=chat_body(content, model=name))).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached[:3] == [0, 0, 0]
        assert cached[3] == cached[4] > 100
        assert len(set(cluster.mm_hashes())) == 1
        (worker,) = cluster.workers
        assert len({request.media[0].mm_hash for request in worker.requests}) == 1


async def test_a_moved_request_keeps_its_adapter() -> None:
    async with served(adapters=ADAPTERS, num_workers=2) as (cluster, client):
        for worker in cluster.workers:
            worker.script.die_at, worker.script.error = 2, WorkerLost("it has died")
        await client.post(CHAT, content=chat_body(model="poet"))
        attempts = [request for worker in cluster.workers for request in worker.requests]
        assert {request.attempt for request in attempts} >= {0, 1}
        assert {request.adapter for request in attempts} == {"poet"}


async def test_the_record_and_the_document_name_the_adapter() -> None:
    async with served(adapters=ADAPTERS) as (_, client):
        answer = await client.post(CHAT, content=chat_body(model="poet"))
        record = (await client.get(f"/weft/requests/{answer.json()['id']}")).json()
        assert record["model"] == "poet"
        document = (await client.get("/openapi.json")).json()
        listed = document["paths"]["/v1/models"]["get"]["description"]
        assert listed == "There is one model, and these adapters of it: poet, org/clerk."
        assert json.dumps(document["components"]["schemas"]["Model"]).count("parent") == 1

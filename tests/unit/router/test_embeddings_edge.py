"""Tests embeddings and the log-probabilities of prompts over fake members."""

from __future__ import annotations

import asyncio
import base64
import json

import numpy as np
import pytest
from edge_client import served
from router_chats import chat_body, image

from deploy.testing import TINY_MODEL, reply_outputs, settled

EMBEDDINGS = "/v1/embeddings"
COMPLETIONS = "/v1/completions"


def embedding_body(content: object = "hello", **fields: object) -> bytes:
    return json.dumps({"model": TINY_MODEL, "input": content} | fields).encode()


async def test_each_input_has_an_embedding_in_its_place() -> None:
    async with served(embeddings="last", num_workers=2) as (cluster, client):
        body = (await client.post(EMBEDDINGS, content=embedding_body([[97], [98, 99], [100, 101, 102]]))).json()
        assert (body["object"], body["model"]) == ("list", TINY_MODEL)
        assert [entry["index"] for entry in body["data"]] == [0, 1, 2]
        requests = [request for worker in cluster.workers for request in worker.requests]
        wanted = {request.token_ids: reply_outputs(request)[0] for request in requests}
        prompts = [(97,), (98, 99), (100, 101, 102)]
        for entry, prompt in zip(body["data"], prompts, strict=True):
            assert entry["object"] == "embedding"
            assert entry["embedding"] == np.frombuffer(wanted[prompt], "<f4").tolist()
        assert body["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
        assert {request.stop.max_tokens for request in requests} == {0}
        assert {request.prompt_outputs.pooling for request in requests} == {"last"}


async def test_base64_holds_the_same_numbers() -> None:
    async with served(embeddings="mean") as (cluster, client):
        whole = (await client.post(EMBEDDINGS, content=embedding_body())).json()["data"][0]["embedding"]
        packed = await client.post(EMBEDDINGS, content=embedding_body(encoding_format="base64"))
        data = base64.b64decode(packed.json()["data"][0]["embedding"])
        assert np.frombuffer(data, "<f4").tolist() == whole
        assert cluster.workers[0].requests[0].prompt_outputs.pooling == "mean"


async def test_more_inputs_than_places_take_their_turns() -> None:
    async with served(embeddings="last", max_in_flight=16) as (cluster, client):
        inputs = [f"input {number}" for number in range(100)]
        body = (await client.post(EMBEDDINGS, content=embedding_body(inputs))).json()
        assert len(body["data"]) == 100
        prompts = sorted(request.token_ids for request in cluster.workers[0].requests)
        assert prompts == sorted(tuple(each.encode()) for each in inputs)


async def test_a_conversation_with_media_is_embedded_whole() -> None:
    async with served(embeddings="last") as (cluster, client):
        messages = [{"role": "user", "content": [image(), {"type": "text", "text": "?"}]}]
        body = json.dumps({"model": TINY_MODEL, "messages": messages, "normalize": False})
        answer = (await client.post(EMBEDDINGS, content=body)).json()
        (request,) = cluster.workers[0].requests
        assert [item.modality for item in request.media] == ["image"]
        assert not request.prompt_outputs.is_normalised
        assert len(answer["data"]) == 1


async def test_a_cluster_without_embeddings_says_so() -> None:
    async with served() as (_, client):
        refused = await client.post(EMBEDDINGS, content=embedding_body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert "serves no embeddings" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [""]}, "input.0"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": [[97], [262]]}, "input.1"),
        ({"input": [[97], ["a"]]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": None}, "input"),
        ({"input": "a", "messages": []}, "input"),
        ({"input": "a", "dimensions": 7}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "b" * 3000}, "input"),
    ],
)
async def test_bad_requests_for_embeddings_are_named(fields: dict[str, object], param: str) -> None:
    async with served(embeddings="last") as (cluster, client):
        response = await client.post(EMBEDDINGS, content=json.dumps({"model": TINY_MODEL} | fields))
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert cluster.service.admission.num_in_flight == 0


async def test_the_input_that_is_refused_is_named_beyond_those_that_are_computed_at_once() -> None:
    async with served(embeddings="last") as (_, client):
        refused = await client.post(EMBEDDINGS, content=embedding_body(["a"] * 40 + [""]))
        error = refused.json()["error"]
        assert error["param"] == "input.40"
        assert error["message"].startswith("`input.40` is empty, and the model needs at least one token")


# ---------------------------------------------------------------- These tests cover log-probabilities of prompts.


async def test_a_chat_shows_the_log_probabilities_of_its_prompt() -> None:
    async with served() as (cluster, client):
        body = (await client.post("/v1/chat/completions", content=chat_body(prompt_logprobs=2))).json()
        (request,) = cluster.workers[0].requests
        _, scores = reply_outputs(request)
        assert scores is not None
        first, *entries = body["prompt_logprobs"]
        assert first is None
        assert len(entries) == len(request.token_ids) - 1
        for entry, token in zip(entries, scores.tokens(), strict=True):
            shown = entry[str(token.token_id)]
            assert shown["rank"] == token.rank
            assert shown["logprob"] == pytest.approx(token.logprobs.logprob)


async def test_an_echoed_prompt_has_log_probabilities_too() -> None:
    async with served() as (cluster, client):
        fields = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}
        body = (await client.post(COMPLETIONS, content=json.dumps({"model": TINY_MODEL} | fields))).json()
        (request,) = cluster.workers[0].requests
        _, scores = reply_outputs(request)
        assert scores is not None
        assert request.stop.max_tokens == 0
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["a", "b", "c"]
        assert logprobs["text_offset"] == [0, 1, 2]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:] == pytest.approx([each.logprobs.logprob for each in scores.tokens()])
        assert logprobs["top_logprobs"][0] is None
        assert body["usage"]["completion_tokens"] == 0


async def test_generated_tokens_follow_the_echoed_ones() -> None:
    async with served() as (cluster, client):
        cluster.workers[0].script.reply = "xy"
        fields = {"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 5}
        body = (await client.post(COMPLETIONS, content=json.dumps({"model": TINY_MODEL} | fields))).json()
        logprobs = body["choices"][0]["logprobs"]
        assert body["choices"][0]["text"] == "abxy"
        assert logprobs["tokens"][:4] == ["a", "b", "x", "y"]
        assert logprobs["text_offset"][:4] == [0, 1, 2, 3]
        assert logprobs["top_logprobs"] is None


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/chat/completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "stream"),
        (COMPLETIONS, {"prompt": "a", "echo": True, "max_tokens": 0, "n": 2}, "n"),
    ],
)
async def test_what_can_not_be_scored_is_named(path: str, fields: dict[str, object], param: str) -> None:
    async with served() as (_, client):
        response = await client.post(path, content=json.dumps(json.loads(chat_body()) | fields))
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_drain_lets_embeddings_finish() -> None:
    async with served(embeddings="last") as (cluster, client):
        inputs = [f"input {number}" for number in range(40)]
        running = asyncio.create_task(client.post(EMBEDDINGS, content=embedding_body(inputs)))
        await settled(lambda: len(cluster.workers[0].requests) > 0)
        assert await cluster.service.drain(20) == 0
        assert len((await running).json()["data"]) == 40

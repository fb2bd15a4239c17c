"""Tests `/tokenize`, `/detokenize` and the hints for wrong paths."""

from __future__ import annotations

import json

import pytest
from edge_client import served
from router_chats import image

from deploy.testing import TINY_MODEL


async def test_a_prompt_becomes_its_tokens() -> None:
    async with served() as (_, client):
        body = (await client.post("/tokenize", content=json.dumps({"prompt": "aé", "return_token_strs": True}))).json()
        assert body["tokens"] == list("aé".encode())
        assert (body["count"], body["max_model_len"]) == (3, 2048)
        assert len(body["token_strs"]) == 3
        assert body["token_strs"][0] == "a"


async def test_an_empty_prompt_has_no_tokens() -> None:
    async with served() as (cluster, client):
        answer = await client.post("/tokenize", content=json.dumps({"prompt": "", "return_token_strs": True}))
        assert answer.status_code == 200
        assert answer.json() == {"count": 0, "max_model_len": 2048, "tokens": [], "token_strs": []}
        assert cluster.service.admission.num_in_flight == 0


async def test_messages_become_the_tokens_of_the_whole_prompt() -> None:
    async with served() as (cluster, client):
        messages = [{"role": "user", "content": [image(), {"type": "text", "text": "?"}]}]
        body = (await client.post("/tokenize", content=json.dumps({"model": TINY_MODEL, "messages": messages}))).json()
        assert body["token_strs"] is None
        await client.post("/v1/chat/completions", content=json.dumps({"model": TINY_MODEL, "messages": messages}))
        assert tuple(body["tokens"]) == cluster.workers[0].requests[0].token_ids
        bare = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
        tokens = (await client.post("/tokenize", content=json.dumps(bare))).json()["tokens"]
        assert cluster.codec.decode(tokens, skip_special_tokens=False) == "<|turn|>user\nx<|end|>"


async def test_tokens_become_their_text() -> None:
    async with served() as (_, client):
        body = {"model": TINY_MODEL, "tokens": [97, 259, 98]}
        assert (await client.post("/detokenize", content=json.dumps(body))).json() == {"prompt": "a<|end|>b"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt"),
        ("/tokenize", {"messages": [{"role": "king"}]}, 400, "messages.0.role"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
async def test_bad_requests_for_tokens_are_named(path: str, body: object, status: int, param: str) -> None:
    async with served() as (_, client):
        response = await client.post(path, content=json.dumps(body))
        assert (response.status_code, response.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("POST", "/v1/tokenize", "this server has no `POST /v1/tokenize`; the path is /tokenize"),
        ("GET", "/v1/openapi.json", "this server has no `GET /v1/openapi.json`; the path is /openapi.json"),
        ("GET", "/", "this server has no `GET /`; /docs lists what it has"),
        ("POST", "/v1/images/edits", "this server has no `POST /v1/images/edits`; /docs lists what it has"),
        ("GET", "/v1/chat/completions", "`/v1/chat/completions` takes POST, not GET"),
        ("DELETE", "/v1/models/a", "`/v1/models/a` takes GET, HEAD, not DELETE"),
    ],
)
async def test_what_the_server_does_not_have_is_answered_with_what_it_has(method: str, path: str, message: str) -> None:
    async with served() as (_, client):
        response = await client.request(method, path)
        assert response.status_code == (405 if "takes" in message else 404)
        assert response.json()["error"]["message"] == message
        assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/v1/chat/completions/", "/v1/chat/completions"),
        ("POST", "/chat/completions/", "/v1/chat/completions"),
        ("POST", "/v1/tokenize/", "/tokenize"),
        ("GET", "/health/", "/health"),
        ("GET", "/docs//", "/docs"),
        ("GET", "/v1/models/", "/v1/models"),
        ("GET", "/models/a", "/v1/models/a"),
        ("GET", f"/v1/models/{TINY_MODEL}/", f"/v1/models/{TINY_MODEL}"),
    ],
)
async def test_a_path_with_a_slash_at_its_end_is_answered_with_the_path_that_is_meant(
    method: str, path: str, meant: str
) -> None:
    async with served() as (_, client):
        response = await client.request(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
        assert response.json()["error"]["message"] == f"this server has no `{method} {path}`; the path is {meant}"


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/responses", "/models"])
async def test_a_path_without_the_version_is_answered_with_a_hint(path: str) -> None:
    async with served() as (_, client):
        response = await client.post(path, content=b"{}")
        assert response.status_code == 404
        assert response.json()["error"]["message"] == f"this server has no `POST {path}`; the path is /v1{path}"


@pytest.mark.parametrize("tokens", [[-1], [2**32], [10**30], [262]])
async def test_ids_that_are_no_tokens_are_refused(tokens: list[int]) -> None:
    async with served() as (_, client):
        response = await client.post("/detokenize", content=json.dumps({"tokens": tokens}))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens")


async def test_more_ids_than_the_context_has_are_refused() -> None:
    async with served(max_model_len=64) as (_, client):
        response = await client.post("/detokenize", content=json.dumps({"tokens": [1] * 65}))
        assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_tokenizing_counts_as_a_request_with_media_does() -> None:
    async with served(max_in_flight=1) as (_, client):
        messages = [{"role": "user", "content": [image()]}]
        body = json.dumps({"model": TINY_MODEL, "messages": messages})
        assert (await client.post("/tokenize", content=body)).status_code == 200

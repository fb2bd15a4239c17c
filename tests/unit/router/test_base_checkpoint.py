"""Tests what a checkpoint without a chat template serves: texts, and no conversations."""

from __future__ import annotations

import pytest
from edge_client import served

from deploy.testing import TINY_MODEL, TinyFamily, tiny_codec

TURN = {"role": "user", "content": "hi"}
MESSAGE = "the model has no chat template, so it takes no conversations; send a text to /v1/completions"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": [TURN]}, "messages"),
        ("/v1/chat/completions", {"messages": [TURN], "tools": [{"type": "function", "function": {"name": "f"}}]}, ""),
        ("/v1/responses", {"input": "hi"}, "input"),
        ("/v1/embeddings", {"messages": [TURN]}, "messages"),
        ("/tokenize", {"messages": [TURN]}, "messages"),
    ],
)
async def test_conversations_are_refused_with_the_reason(path: str, fields: dict[str, object], param: str) -> None:
    async with served(model=(TinyFamily(), tiny_codec("")), embeddings="last") as (cluster, client):
        answer = await client.post(path, json={"model": TINY_MODEL} | fields)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"] == MESSAGE
        assert not param or error["param"] == param
        assert not cluster.workers[0].requests


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": [104, 105]}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [104, 105]}),
    ],
)
async def test_texts_are_served(path: str, fields: dict[str, object]) -> None:
    async with served(model=(TinyFamily(), tiny_codec("")), embeddings="last") as (_, client):
        answer = await client.post(path, json={"model": TINY_MODEL} | fields)
        assert answer.status_code == 200, answer.text

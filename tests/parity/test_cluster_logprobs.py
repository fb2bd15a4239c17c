"""Compares `logprobs` and `top_logprobs` from the HTTP API of a cluster in this process with transformers' own
logits."""

from __future__ import annotations

import json
from typing import Any

import cluster_in_process
import httpx
import pytest
import torch
from cluster_in_process import body, serving

from deploy.demo.build import demo_checkpoint

pytestmark = pytest.mark.torch
TOLERANCE = 2e-4


def with_logprobs(fields: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": 5} | fields


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    return await cluster_in_process.ask(client, **with_logprobs(fields))


async def chunks(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post("/v1/chat/completions", json=body(stream=True, **with_logprobs(fields)))
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

    return Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(demo_checkpoint(), dtype=torch.float32).eval()


def log_softmax_of(reference: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Returns `(len(tokens), vocab)`: the model's log probabilities at each position where a token was sampled."""
    ids = torch.tensor([prompt + tokens])
    with torch.inference_mode():
        logits = reference(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].float()
    return logits[len(prompt) - 1 : -1].log_softmax(dim=-1)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.7, "top_k": 20, "n": 2},
        {"temperature": 0.5, "repetition_penalty": 1.5, "presence_penalty": 1, "logit_bias": {"300": 50, "20": -100}},
    ],
    ids=["greedy", "sampled", "penalised"],
)
async def test_they_are_the_models_before_anything_changed_them(fields: dict[str, Any], reference: Any) -> None:
    async with serving(max_step_tokens=16) as (cluster, client):
        answer = await ask(client, **fields)
        bytes_of = cluster.router.token_bytes
        for choice in answer["choices"]:
            tokens, content = choice["token_ids"], choice["logprobs"]["content"]
            expected = log_softmax_of(reference, answer["prompt_token_ids"], tokens)
            assert len(content) == len(tokens)
            for row, token, entry in zip(expected, tokens, content, strict=True):
                assert bytes(entry["bytes"]) == bytes_of(token)
                assert entry["token"] == bytes_of(token).decode(errors="replace")
                assert entry["logprob"] == pytest.approx(float(row[token]), abs=TOLERANCE)
                best = row.topk(5)
                got = [each["logprob"] for each in entry["top_logprobs"]]
                assert got == pytest.approx(best.values.tolist(), abs=TOLERANCE)
                assert got == sorted(got, reverse=True)
                if fields["temperature"] == 0:
                    assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]
        assert answer["usage"]["completion_tokens"] == sum(len(each["token_ids"]) for each in answer["choices"])


async def test_a_stream_carries_each_entry_once_and_a_stop_string_cuts_both_alike() -> None:
    async with serving() as (_, client):
        whole = await ask(client)
        text = whole["choices"][0]["message"]["content"]
        for fields in ({}, {"stop": [text[3:6]]}):
            whole = await ask(client, **fields)
            streamed = [chunk["choices"][0] for chunk in await chunks(client, **fields)]
            entries = [entry for choice in streamed if choice["logprobs"] for entry in choice["logprobs"]["content"]]
            expected = whole["choices"][0]["logprobs"]["content"]
            assert [entry["bytes"] for entry in entries] == [entry["bytes"] for entry in expected]
            assert [entry["logprob"] for entry in entries] == pytest.approx([entry["logprob"] for entry in expected])
            assert len(entries) == whole["usage"]["completion_tokens"]


async def test_without_top_logprobs_the_lists_are_empty_and_without_logprobs_there_is_none() -> None:
    async with serving() as (_, client):
        plain = await ask(client, top_logprobs=None)
        num_tokens = plain["usage"]["completion_tokens"]
        assert num_tokens > 1
        assert [entry["top_logprobs"] for entry in plain["choices"][0]["logprobs"]["content"]] == [[]] * num_tokens
        silent = await ask(client, logprobs=None, top_logprobs=None)
        assert silent["choices"][0]["logprobs"] is None
        assert all(
            each["choices"][0]["logprobs"] is None for each in await chunks(client, logprobs=False, top_logprobs=0)
        )

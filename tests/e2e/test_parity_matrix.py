"""Checks, token for token and at every chunk size, that router, encoder and worker generate what `transformers`
generates."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from chat_media import image_part, user
from reference_model import Comparison, ReferenceModel

from deploy.config import ClusterConfig
from deploy.demo.build import demo_checkpoint
from deploy.testing import in_process_cluster

pytestmark = pytest.mark.torch

MAX_TOKENS = 12
PROMPTS: list[list[dict[str, Any]]] = [
    user("Hello there, how are you today?"),
    [{"role": "system", "content": "Answer with one word."}, *user("What can you do?")],
    user("What is in this picture?", image_part(1)),
    user(image_part(2, width=160, height=96), "Describe it."),
    user("Compare", image_part(3), "with", image_part(4, width=64, height=128), "and say which is round."),
    [*user(image_part(5), "What colour is it?"), {"role": "assistant", "content": "Blue."}, *user("And the ground?")],
]


@pytest.fixture(scope="module")
def reference() -> ReferenceModel:
    return ReferenceModel(demo_checkpoint())


@pytest.fixture(scope="module")
def comparison() -> Iterator[Comparison]:
    counted = Comparison()
    yield counted
    counted.finish()


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("max_step_tokens", [1, 3, 16, 64, 4096])
async def test_greedy_tokens_equal_transformers(
    max_step_tokens: int, prefix_cache: bool, reference: ReferenceModel, comparison: Comparison
) -> None:
    workers = {"replicas": 1, "max_step_tokens": max_step_tokens, "prefix_cache": prefix_cache, "num_blocks": 512}
    config = ClusterConfig.model_validate({"workers": workers, "encoders": {"decode_processes": 0}})
    async with in_process_cluster(config) as (_, client):

        async def ask(index: int) -> None:
            body = {
                "model": "weft-demo",
                "messages": PROMPTS[index],
                "temperature": 0,
                "max_tokens": MAX_TOKENS,
                "return_token_ids": True,
            }
            response = await client.post("/v1/chat/completions", json=body)
            answer = response.json()
            assert response.status_code == 200, answer
            expected = reference.answer(PROMPTS[index], MAX_TOKENS)
            tokens = answer["choices"][0]["token_ids"]
            comparison.check(expected, answer["prompt_token_ids"], tokens, f"prompt {index}, chunk {max_step_tokens}")
            assert answer["usage"]["prompt_tokens"] == len(expected.prompt_ids)
            assert answer["usage"]["completion_tokens"] == len(tokens)

        await asyncio.gather(*[ask(index) for index in range(len(PROMPTS))])
        await asyncio.gather(*[ask(index) for index in reversed(range(len(PROMPTS)))])

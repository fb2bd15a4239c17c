"""Tests sampling parameters through the whole cluster. They are compared with transformers where it has them, and with
the expected effect otherwise."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from cluster_in_process import ask, serving

from deploy.demo.build import demo_checkpoint

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

    return Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(demo_checkpoint(), dtype=torch.float32).eval()


@pytest.mark.parametrize("max_step_tokens", [5, 512])
async def test_greedy_with_a_repetition_penalty_says_what_transformers_says(
    max_step_tokens: int, reference: Any
) -> None:
    async with serving(max_step_tokens=max_step_tokens) as (_, client):
        for penalty in (0.8, 1.05, 1.6):
            answer = await ask(client, temperature=0, repetition_penalty=penalty, max_tokens=24)
            prompt = torch.tensor([answer["prompt_token_ids"]])
            with torch.inference_mode():
                expected = reference.generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=False,
                    max_new_tokens=24,
                    repetition_penalty=penalty,
                )
            assert answer["choices"][0]["token_ids"] == expected[0, prompt.shape[1] :].tolist()


async def test_penalties_and_bias_do_what_they_say() -> None:
    async with serving() as (_, client):
        fields = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
        plain = (await ask(client, **fields))["choices"][0]["token_ids"]
        banned = (await ask(client, **fields, logit_bias={str(plain[0]): -100}))["choices"][0]["token_ids"]
        assert plain[0] not in banned
        loved = (await ask(client, **fields, logit_bias={"300": 100}))["choices"][0]["token_ids"]
        assert loved == [300] * 30
        torn = await ask(client, **fields, logit_bias={"300": 100, "301": 99}, frequency_penalty=2)
        assert torn["choices"][0]["token_ids"].count(301) > 10


async def test_what_was_generated_counts_on_after_preemption() -> None:
    fields = {"frequency_penalty": 1.1, "repetition_penalty": 1.3, "min_p": 0.01, "max_tokens": 48, "ignore_eos": True}
    answers = []
    for workers in ({"num_blocks": 34, "block_size": 8, "prefix_cache": False}, {"num_blocks": 256}):
        async with serving(**workers) as (cluster, client):
            calls = [ask(client, seed=seed, **fields) for seed in range(8)]
            answers.append([each["choices"][0]["token_ids"] for each in await asyncio.gather(*calls)])
            (worker,) = cluster.workers.services.values()
            assert (worker.report().engine.num_preemptions > 0) == (workers["num_blocks"] == 34)
    assert answers[0] == answers[1]

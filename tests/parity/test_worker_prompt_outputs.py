"""Compares embeddings and log-probabilities of prompts with those of one whole forward pass of transformers: at any
size of chunks, with a warm prefix cache, after preemption, beside other requests, and with pictures in the prompt."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import numpy as np
import pytest
import torch
from worker_rig import Prompt, Rig, loaded, prompt, reference, rig

from fabric.contracts import GenerateRequest, GenerateResult, PromptOutputs, SamplingParams, StopConditions
from llm_workers.worker_config import Speculation

pytestmark = pytest.mark.torch

TEXT = ("Describe the weather on a long and windy day by the sea.",)
ONE = ("Look at this: ", 1, " What is in the picture?")
SEVERAL = ("First ", 2, " then ", 3, " and last ", 1, " - compare them.")
NUM_TOP = 5
NOTHING = StopConditions(max_tokens=0)


@functools.cache
def whole(of: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the last hidden states `(num_tokens, hidden)` and the log-probabilities `(num_tokens, vocab)` of one
    plain forward pass."""
    media = {}
    if of.inputs:
        media["pixel_values"] = torch.from_numpy(np.concatenate([unit.pixels for unit in of.inputs]))
        media["image_grid_thw"] = torch.tensor([unit.grid for unit in of.inputs])
    thinker = loaded().reference
    seen: list[torch.Tensor] = []
    hook = thinker.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.inference_mode():
        ids = torch.tensor([of.token_ids])
        logits = thinker(input_ids=ids, attention_mask=torch.ones_like(ids), **media).logits
    hook.remove()
    return seen[0][0].float(), logits[0].float().log_softmax(dim=-1)


def expected_embedding(of: Prompt, wanted: PromptOutputs) -> np.ndarray:
    hidden = whole(of)[0].double()
    pooled = hidden[-1] if wanted.pooling == "last" else hidden.mean(dim=0)
    return (pooled / pooled.norm() if wanted.is_normalised else pooled).numpy()


def check_embedding(result: GenerateResult, of: Prompt, wanted: PromptOutputs) -> None:
    assert result.error is None
    assert [(one.finish_reason, one.num_tokens) for one in result.choices] == [("length", 0)]
    found, expected = np.frombuffer(result.embedding, "<f4"), expected_embedding(of, wanted)
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max(), rtol=1e-4)


def check_logprobs(result: GenerateResult, of: Prompt, num_top: int = NUM_TOP) -> None:
    assert result.error is None
    assert result.prompt_logprobs is not None
    scored, raw = list(result.prompt_logprobs.tokens()), whole(of)[1]
    assert [one.token_id for one in scored] == list(of.token_ids[1:])
    for position, one in enumerate(scored):
        row = raw[position]
        assert one.logprobs.logprob == pytest.approx(float(row[one.token_id]), abs=2e-3)
        nearby = (row - row[one.token_id]).abs() < 2e-3
        least_rank = 1 + int(((row > row[one.token_id]) & ~nearby).sum())
        assert least_rank <= one.rank <= least_rank + int(nearby.sum())
        values = [value for _, value in one.logprobs.top]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(row.topk(num_top).values.tolist(), abs=2e-3)
        assert [float(row[token_id]) for token_id, _ in one.logprobs.top] == pytest.approx(values, abs=2e-3)


def embedding_request(r: Rig, of: Prompt, wanted: PromptOutputs, **changes: Any) -> GenerateRequest:
    return r.request(of, prompt_outputs=wanted, stop=NOTHING, **changes)


@pytest.mark.parametrize("max_step_tokens", [1, 7, 4096])
@pytest.mark.parametrize("parts", [TEXT, SEVERAL], ids=["text", "pictures"])
async def test_embeddings_at_every_chunk_size(parts: tuple[str | int, ...], max_step_tokens: int) -> None:
    of = prompt(*parts)
    async with rig(max_step_tokens=max_step_tokens) as r:
        for wanted in (PromptOutputs("mean"), PromptOutputs("last"), PromptOutputs("mean", is_normalised=False)):
            request = embedding_request(r, of, wanted)
            result = await r.run(request, of)
            check_embedding(result, of, wanted)
            assert result.prompt_logprobs is None
            assert r.tokens(request) == []
        await r.assert_idle()


@pytest.mark.parametrize("max_step_tokens", [1, 7, 4096])
@pytest.mark.parametrize("parts", [TEXT, ONE], ids=["text", "picture"])
async def test_log_probabilities_at_every_chunk_size(parts: tuple[str | int, ...], max_step_tokens: int) -> None:
    """The request also generates, and its tokens are those of a request that wants nothing of its prompt."""
    of = prompt(*parts)
    async with rig(max_step_tokens=max_step_tokens) as r:
        request = r.request(of, 6, prompt_outputs=PromptOutputs(num_top_logprobs=NUM_TOP))
        result = await r.run(request, of)
        check_logprobs(result, of)
        assert result.embedding == b""
        assert r.tokens(request) == reference(of, 6)[0]
        await r.assert_idle()


async def test_more_rows_than_are_scored_at_once_and_no_top() -> None:
    of = prompt("word " * 100)
    assert len(of.token_ids) > 64
    async with rig(max_step_tokens=4096) as r:
        request = r.request(of, stop=NOTHING, prompt_outputs=PromptOutputs(num_top_logprobs=0))
        result = await r.run(request, of)
        assert result.prompt_logprobs is not None
        raw = whole(of)[1]
        expected = [float(raw[at, token_id]) for at, token_id in enumerate(of.token_ids[1:])]
        scored = list(result.prompt_logprobs.tokens())
        assert [one.logprobs.logprob for one in scored] == pytest.approx(expected, abs=2e-3)
        assert {one.logprobs.top for one in scored} == {()}


async def test_a_warm_cache_serves_the_last_token_and_not_the_whole_prompt() -> None:
    of = prompt(*ONE)
    block_size = 4
    async with rig(block_size=block_size) as r:
        cold = embedding_request(r, of, PromptOutputs("mean"))
        check_embedding(await r.run(cold, of), of, PromptOutputs("mean"))
        last = await r.service.generate(embedding_request(r, of, PromptOutputs("last"), dispatched_items=()))
        check_embedding(last, of, PromptOutputs("last"))
        assert last.num_cached_tokens >= len(of.token_ids) - block_size, "the first request filled the cache"
        mean = await r.run(embedding_request(r, of, PromptOutputs("mean")), of)
        check_embedding(mean, of, PromptOutputs("mean"))
        assert mean.num_cached_tokens == 0
        scored = await r.run(r.request(of, 2, prompt_outputs=PromptOutputs(num_top_logprobs=NUM_TOP)), of)
        check_logprobs(scored, of)
        assert scored.num_cached_tokens == 0
        await r.assert_idle()


@pytest.mark.parametrize("max_step_tokens", [11, 4096])
async def test_beside_each_other_and_beside_requests_that_generate(max_step_tokens: int) -> None:
    prompts = [prompt(*parts) for parts in (TEXT, ONE, SEVERAL, TEXT, ONE, ("Shape?",))]
    mean, last, scores = PromptOutputs("mean"), PromptOutputs("last"), PromptOutputs(num_top_logprobs=NUM_TOP)
    async with rig(max_step_tokens=max_step_tokens, num_blocks=128, block_size=8) as r:
        requests = [
            r.request(prompts[0], 12),
            embedding_request(r, prompts[1], mean),
            r.request(prompts[2], 3, prompt_outputs=scores),
            embedding_request(r, prompts[3], last),
            r.request(prompts[4], 12),
            embedding_request(r, prompts[5], PromptOutputs("mean", num_top_logprobs=NUM_TOP)),
        ]
        runs = [r.run(request, of) for request, of in zip(requests, prompts, strict=True)]
        results = await asyncio.gather(*runs)
        check_embedding(results[1], prompts[1], mean)
        check_logprobs(results[2], prompts[2])
        check_embedding(results[3], prompts[3], last)
        check_embedding(results[5], prompts[5], mean)
        check_logprobs(results[5], prompts[5])
        for index in (0, 4):
            assert r.tokens(requests[index]) == reference(prompts[index], 12)[0]
            assert (results[index].embedding, results[index].prompt_logprobs) == (b"", None)
        await r.assert_idle()


@pytest.mark.parametrize("wanted", [PromptOutputs("mean"), PromptOutputs("mean", num_top_logprobs=NUM_TOP)])
async def test_a_preempted_prompt_is_read_again_from_its_beginning(wanted: PromptOutputs) -> None:
    """The younger prompt waits in its middle for a picture while the older one takes its blocks."""
    older, younger = prompt(*SEVERAL), prompt("Look at this: ", 4, " What is in the picture?")
    async with rig(num_blocks=13, block_size=8, max_step_tokens=16) as r:
        second = embedding_request(r, younger, wanted, age=(9.0, "younger"))
        first = r.request(older, 12, age=(1.0, "older"))
        second_call = asyncio.ensure_future(r.service.generate(second))
        await r.until(lambda: r.service.report().engine.num_at_doorstep == 1)
        results = [await r.run(first, older)]
        r.publish(second, younger, 0)
        results.append(await second_call)
        assert [result.error for result in results] == [None, None]
        assert "preempted" in [event.name for event in results[1].trace]
        check_embedding(results[1], younger, wanted)
        if wanted.num_top_logprobs:
            check_logprobs(results[1], younger)
        await r.assert_idle()


async def test_choices_share_the_scores_of_their_prompt() -> None:
    of = prompt(*TEXT)
    async with rig(max_step_tokens=16) as r:
        request = r.request(
            of,
            4,
            num_choices=3,
            sampling=SamplingParams(temperature=1.0, seed=5),
            prompt_outputs=PromptOutputs(num_top_logprobs=NUM_TOP),
        )
        result = await r.run(request, of)
        check_logprobs(result, of)
        assert len(result.choices) == 3


async def test_guessed_tokens_and_scores_of_prompts_go_together() -> None:
    of = prompt("one two one two one two one two one two")
    async with rig(max_step_tokens=16, speculation=Speculation(4, 1, 3)) as r:
        request = r.request(of, 12, prompt_outputs=PromptOutputs(num_top_logprobs=NUM_TOP))
        result = await r.run(request, of)
        check_logprobs(result, of)
        assert r.tokens(request) == reference(of, 12)[0]

"""Tests prompt lookup through the real worker: no output differs from that of a worker that does not guess.

Greedy sampling is compared with transformers. Random sampling, penalties, log-probabilities, `min_tokens` and stops are
compared with the same worker without drafts. Requests with a grammar are answered as before, without any drafts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher
from test_worker_parity import assert_parity
from worker_rig import GREEDY, Prompt, loaded, prompt, rig

from fabric.contracts import SamplingParams, StopConditions, TokenFrames, WorkerReport
from llm_workers.sampling import GrammarCompiler
from llm_workers.worker_config import Speculation

pytestmark = pytest.mark.torch

NUM_TOKENS = 24
EAGER = Speculation(5, 1, 3)
"""One token that agrees is enough to make a guess, so there are many guesses, and many of them are wrong."""
ECHO = ("one two three one two three one two three one two",)
PROMPTS = [prompt(*ECHO), prompt("Look: ", 1, " and again: ", 1, " What is it?"), prompt("Say a b a b a b.")]
WARM = SamplingParams(temperature=0.7, top_k=20, seed=11)
"""Samples from few tokens: with thousands of equal ones, one draw in a thousand would lie within rounding of another
token."""
THREE = SamplingParams(temperature=2.0, seed=5, logit_bias=((300, 50.0), (301, 50.0), (302, 50.0)))
"""The sampler only ever draws three tokens, so guesses are often right."""
PENALISED = SamplingParams(
    temperature=0.0, repetition_penalty=1.05, presence_penalty=0.02, frequency_penalty=0.05, num_top_logprobs=3
)
LONG = StopConditions(NUM_TOKENS, ignore_eos=True)


async def answers(
    requests_of: Sequence[tuple[Prompt, dict[str, Any]]], **config: Any
) -> tuple[list[Any], WorkerReport]:
    """Returns tokens, log-probabilities and finish reason of every choice of every request, and the worker's last
    report."""
    async with rig(**config) as r:
        requests = [(r.request(of, **changes), of) for of, changes in requests_of]
        results = await asyncio.gather(*(r.run(request, of) for request, of in requests))
        assert [result.error for result in results] == [None] * len(results)
        await r.assert_idle()
        frames = [frame for message in r.router.of(TokenFrames) for frame in message.frames]
        found = []
        for request, _ in requests:
            for choice in range(request.num_choices):
                mine = [frame for frame in frames if (frame.request_id, frame.choice) == (request.request_id, choice)]
                logprobs = [each for frame in mine for each in frame.logprobs]
                found.append((r.tokens(request, choice), logprobs, mine[-1].finish_reason))
        return found, r.service.report()


@pytest.mark.parametrize("max_step_tokens", [4, 4096])
async def test_greedy_tokens_equal_transformers(max_step_tokens: int) -> None:
    """One case has so small a budget that drafts are cut. In the pool, sequences preempt each other."""
    config = {"max_step_tokens": max_step_tokens, "block_size": 4, "num_blocks": 64, "speculation": EAGER}
    found, report = await answers([(of, {"num_tokens": NUM_TOKENS}) for of in PROMPTS], **config)
    for of, (tokens, _, _) in zip(PROMPTS, found, strict=True):
        assert assert_parity(tokens, of, NUM_TOKENS) == 0
    assert report.engine.drafts_proposed > report.engine.drafts_accepted > 0
    if max_step_tokens == 4096:
        assert report.engine.steps < report.engine.tokens_generated


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": WARM, "stop": LONG},
        {"sampling": THREE, "stop": LONG},
        {"sampling": WARM, "stop": LONG, "num_choices": 3},
        {"sampling": PENALISED, "stop": LONG},
        {"sampling": GREEDY, "stop": StopConditions(NUM_TOKENS, (), tuple(range(0, 4000, 3)), min_tokens=15)},
    ],
    ids=["drawn", "three", "choices", "penalties", "min_tokens"],
)
async def test_nothing_depends_on_drafts(changes: dict[str, Any]) -> None:
    requests = [(of, changes) for of in PROMPTS]
    plain, _ = await answers(requests)
    guessed, report = await answers(requests, speculation=EAGER)
    assert report.engine.drafts_proposed > 0
    assert [(tokens, reason) for tokens, _, reason in guessed] == [(tokens, reason) for tokens, _, reason in plain]
    for (_, ours, _), (_, theirs, _) in zip(guessed, plain, strict=True):
        assert [each.logprob for each in ours] == pytest.approx([each.logprob for each in theirs], abs=1e-4)
        for one, other in zip(ours, theirs, strict=True):
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


async def test_the_end_may_lie_inside_an_accepted_run() -> None:
    """Makes every position of the answer the last one, by count and by id."""
    of = PROMPTS[0]
    ((whole, _, _),), report = await answers([(of, {"stop": LONG, "sampling": THREE})], speculation=EAGER)
    assert report.engine.drafts_accepted > 3
    counts = [(of, {"stop": StopConditions(n, ignore_eos=True), "sampling": THREE}) for n in range(1, NUM_TOKENS)]
    ids = [
        (of, {"stop": StopConditions(NUM_TOKENS, (), (token,)), "sampling": THREE}) for token in dict.fromkeys(whole)
    ]
    found, _ = await answers(counts + ids, speculation=EAGER)
    cuts = [*range(1, NUM_TOKENS), *(whole.index(token) + 1 for token in dict.fromkeys(whole))]
    assert [tokens for tokens, _, _ in found] == [whole[:cut] for cut in cuts]


async def test_a_grammar_is_followed_without_guessing() -> None:
    async with rig(speculation=EAGER) as r:
        r.service._grammars = GrammarCompiler(loaded().codec, loaded().family.shape.vocab_size)
        grammar = LLMatcher.grammar_from_regex("(ab){8}")
        request = r.request(PROMPTS[2], NUM_TOKENS, sampling=SamplingParams(temperature=0.0, grammar=grammar))
        assert (await r.run(request, PROMPTS[2])).error is None
        assert loaded().codec.decode(r.tokens(request)[:-1]) == "ab" * 8
        assert r.service.report().engine.drafts_proposed == 0

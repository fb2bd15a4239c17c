"""Tests the definition of correct: greedy tokens through the worker equal transformers' own, token for token.

A difference passes only where the reference's two best logits lie within 1e-4. The tests count and print such cases.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from worker_rig import Prompt, prompt, reference, rig

from fabric.contracts import FeatureNeeded

NEAR_TIE = 1e-4
CHUNKS = [1, 3, 16, 64, 4096]
NUM_TOKENS = 12

TEXT = ("Describe the weather on a long and windy day by the sea.",)
ONE = ("Look at this: ", 1, " What is in the picture?")
SEVERAL = ("First ", 2, " then ", 3, " and last ", 1, " - compare them.")


def assert_parity(tokens: list[int], of: Prompt, num_tokens: int = NUM_TOKENS) -> int:
    """Returns 1 for a sequence that differs from the reference after a near tie, and 0 for an equal one. Fails on any
    other difference."""
    expected, margins = reference(of, num_tokens)
    assert len(tokens) == len(expected)
    for index, (ours, theirs) in enumerate(zip(tokens, expected, strict=True)):
        if ours != theirs:
            assert margins[index] <= NEAR_TIE, f"token {index}: {ours} instead of {theirs}, margin {margins[index]}"
            print(f"near tie at token {index}: margin {margins[index]:.1e}")
            return 1
    return 0


@pytest.mark.parametrize("is_prefix_cache_enabled", [True, False])
@pytest.mark.parametrize("max_step_tokens", CHUNKS)
@pytest.mark.parametrize("parts", [TEXT, ONE, SEVERAL], ids=["text", "one", "several"])
async def test_one_request_at_every_chunk_size(
    parts: tuple[str | int, ...], max_step_tokens: int, is_prefix_cache_enabled: bool
) -> None:
    of = prompt(*parts)
    async with rig(max_step_tokens=max_step_tokens, is_prefix_cache_enabled=is_prefix_cache_enabled) as r:
        request = r.request(of, NUM_TOKENS)
        result = await r.run(request, of)
        assert result.error is None
        num_tokens = len(r.tokens(request))
        reason = "length" if num_tokens == NUM_TOKENS else "stop"
        assert [(choice.finish_reason, choice.num_tokens) for choice in result.choices] == [(reason, num_tokens)]
        assert assert_parity(r.tokens(request), of) == 0
        await r.assert_idle()
        prefills = [event.detail for event in result.trace if event.name == "prefill"]
        assert [p["start"] for p in prefills] == [0, *(p["end"] for p in prefills[:-1])]
        assert prefills[-1]["end"] == result.num_prompt_tokens == len(of.token_ids)
        assert all(p["end"] - p["start"] <= max_step_tokens for p in prefills)


@pytest.mark.parametrize("max_step_tokens", [3, 16, 4096])
@pytest.mark.parametrize("is_prefix_cache_enabled", [True, False])
async def test_a_mixed_batch_with_features_late_and_in_any_order(
    max_step_tokens: int, is_prefix_cache_enabled: bool
) -> None:
    rng = random.Random(max_step_tokens)
    prompts = [prompt(*parts) for parts in (TEXT, ONE, SEVERAL, (5, "Shape?"), ("Colour of ", 2, "?"), SEVERAL)]
    config = {"max_step_tokens": max_step_tokens, "is_prefix_cache_enabled": is_prefix_cache_enabled}
    async with rig(**config, num_blocks=128, block_size=8) as r:
        requests = [r.request(of, NUM_TOKENS) for of in prompts]
        runs = []
        for request, of in zip(requests, prompts, strict=True):
            items = rng.sample(range(len(of.media)), len(of.media))
            runs.append(r.run(request, of, [(rng.randrange(8), index) for index in items]))
        results = await asyncio.gather(*runs)
        assert [result.error for result in results] == [None] * len(prompts)
        num_ties = sum(assert_parity(r.tokens(request), of) for request, of in zip(requests, prompts, strict=True))
        print(f"{num_ties} of {len(prompts)} sequences left the reference at a near tie")
        assert num_ties == 0
        await r.assert_idle()
        assert len(r.releases) == sum(len(of.media) for of in prompts)


async def test_a_preempted_sequence_goes_on_as_if_nothing_had_been() -> None:
    """The younger sequence decodes into blocks that the older one needs when its late pictures have arrived."""
    older, younger = prompt(*SEVERAL), prompt("Look at this: ", 4, " What is in the picture?")
    num_tokens = 48
    async with rig(num_blocks=14, block_size=8, is_prefix_cache_enabled=False) as r:
        first, second = r.request(older, NUM_TOKENS), r.request(younger, num_tokens)
        r.router.on_needed = lambda message: r.publish(second, younger, 0)
        calls = [asyncio.ensure_future(r.service.generate(first))]
        await r.until(lambda: r.service.report().engine.num_at_doorstep == 1)
        calls.append(asyncio.ensure_future(r.service.generate(second)))
        r.publish(second, younger, 0)
        await r.until(lambda: len(r.tokens(second)) >= 10)
        for index in range(3):
            r.publish(first, older, index)
        results = await asyncio.gather(*calls)
        assert [result.error for result in results] == [None, None]
        assert "preempted" in [event.name for event in results[1].trace]
        assert [needed.reason for needed in r.router.needed] == ["preempted"]
        assert assert_parity(r.tokens(first), older) + assert_parity(r.tokens(second), younger, num_tokens) == 0
        await r.assert_idle()
        assert r.service.report().engine.num_preemptions == 1


async def test_an_inbox_with_room_for_one_feature_serves_many() -> None:
    prompts = [prompt(*SEVERAL), prompt(*ONE), prompt(4, 5, "Which is larger?")]
    rows = max(item.num_tokens for of in prompts for item in of.media)
    one_feature = 3 * rows * 128 * 4 + 256
    async with rig(inbox_bytes=one_feature, max_step_tokens=32) as r:
        by_id = {}

        def again(message: FeatureNeeded) -> None:
            request, of = by_id[message.request_id]
            for index, item in enumerate(of.media):
                if item.unit_keys()[0] in message.units:
                    r.publish(request, of, index)

        r.router.on_needed = again
        by_id.update({(request := r.request(of, 6)).request_id: (request, of) for of in prompts})
        runs = [r.run(request, of, [(1, i) for i in reversed(range(len(of.media)))]) for request, of in by_id.values()]
        results = await asyncio.gather(*runs)
        assert [result.error for result in results] == [None] * len(prompts)
        assert sum(assert_parity(r.tokens(request), of, 6) for request, of in by_id.values()) == 0
        await r.assert_idle()


async def test_prefix_cache_knows_pictures_apart() -> None:
    """The text before another picture hits the cache, but the picture's blocks do not. All blocks of the same picture
    hit."""
    parts = ("A rather long text that stands in front of the picture and fills some blocks. ", 1, " And after it?")
    first, other = prompt(*parts), prompt(*(2 if part == 1 else part for part in parts))
    span = first.placeholders[0]
    block_size = 4
    async with rig(block_size=block_size) as r:
        requests = [r.request(first, NUM_TOKENS), r.request(other, NUM_TOKENS)]
        cold = await r.run(requests[0], first)
        assert cold.num_cached_tokens == 0
        swapped = await r.run(requests[1], other)
        assert swapped.num_cached_tokens == span.offset // block_size * block_size > 0
        assert not r.router.needed

        covered = r.request(first, NUM_TOKENS, dispatched_items=())
        warm = await r.service.generate(covered)
        assert warm.num_cached_tokens >= len(first.token_ids) - block_size
        assert warm.num_cached_tokens >= span.end
        assert next(event.detail["units"] for event in warm.trace if event.name == "admitted") == []
        assert not r.router.needed
        for request, of in ((requests[0], first), (requests[1], other), (covered, first)):
            assert assert_parity(r.tokens(request), of) == 0
        await r.assert_idle()

"""Tests several choices of one request: the prompt is computed once, and its last block is shared and copied before a
choice writes to it.

With greedy sampling, every choice equals what transformers generates. With random sampling, it is the same whether or
not a block had to be copied.
"""

from __future__ import annotations

import asyncio

import pytest
from test_worker_parity import assert_parity
from worker_rig import prompt, rig

from fabric.contracts import SamplingParams, StopConditions
from llm_workers.worker_config import Speculation

pytestmark = pytest.mark.torch

NUM_TOKENS = 12
OF = prompt("Look: ", 1, " and ", 2, " Which one is it?")
DRAWN = SamplingParams(temperature=0.8, top_k=20, seed=5)


@pytest.mark.parametrize("is_prefix_cache_enabled", [True, False])
@pytest.mark.parametrize("num_drafts", [0, 3])
async def test_every_choice_equals_transformers_and_the_prompt_is_computed_once(
    is_prefix_cache_enabled: bool, num_drafts: int
) -> None:
    block_size = next(size for size in (16, 8, 5) if len(OF.token_ids) % size > 1)
    config = {"is_prefix_cache_enabled": is_prefix_cache_enabled, "speculation": Speculation(num_drafts, 1, 3)}
    async with rig(block_size=block_size, max_step_tokens=16, **config) as r:
        request = r.request(OF, NUM_TOKENS, num_choices=3)
        result = await r.run(request, OF, [(2, 1), (2, 0)])
        assert result.error is None
        for choice in range(3):
            assert assert_parity(r.tokens(request, choice), OF) == 0
        assert r.service.report().engine.prompt_tokens_computed == len(OF.token_ids) + 2
        await r.assert_idle()


async def test_a_copied_block_holds_what_the_shared_one_held() -> None:
    """Compares block sizes. Blocks of one token are never copied."""
    found = []
    for block_size, num_blocks in ((1, 400), (16, 40), (16, 9)):
        async with rig(block_size=block_size, num_blocks=num_blocks) as r:
            stop = StopConditions(NUM_TOKENS, ignore_eos=True)
            request = r.request(OF, sampling=DRAWN, stop=stop, num_choices=4)
            r.router.on_needed = lambda message, r=r, request=request: [
                r.publish(request, OF, index)
                for index, item in enumerate(OF.media)
                if item.unit_keys()[0] in message.units
            ]
            result = await asyncio.wait_for(r.run(request, OF), 60)
            assert result.error is None
            found.append([r.tokens(request, choice) for choice in range(4)])
            await r.assert_idle()
    assert found[0] == found[1] == found[2]
    assert len({tuple(tokens) for tokens in found[0]}) == 4

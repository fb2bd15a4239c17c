"""Checks over many seeds that some request always advances: with two workers and two encoders, arenas and inboxes that
hold hardly more than one feature, KV pools for hardly more than one request, several choices, drafts, and the prefix
cache on and off.

It does the same as `test_progress_together`, with plain random numbers. The error of a failing history names its seed;
`history(seed)` repeats it.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from paged_fake import EOS
from scheduling_prompts import BEGINNINGS, PICTURES, TEXTS, build
from test_progress_together import LARGEST, serve

from fabric.contracts import GenerateRequest, MemberId, RequestId, SamplingParams, StopConditions
from llm_workers.worker_config import Speculation, WorkerConfig

NUM_HISTORIES = 400
NUM_PARTS = 4


def history(seed: int) -> None:
    rng = random.Random(seed)
    plan = []
    for number in range(rng.randint(2, 4)):
        request = make_request(rng, number)
        encoders = [rng.randrange(2) for _ in request.media]
        plan.append((request, rng.randrange(2), encoders, rng.randrange(4)))
    config = WorkerConfig(
        block_size=4,
        num_blocks=rng.randint(15, 24),
        max_step_tokens=rng.randint(1, 24),
        max_sequences=4,
        unit_wait_s=1e6,
        is_prefix_cache_enabled=rng.random() < 0.7,
        speculation=Speculation(rng.choice((0, 0, 3)), 1, 3),
    )
    arenas, inboxes = ((rng.randint(LARGEST, 2 * LARGEST), rng.randint(LARGEST, 2 * LARGEST)) for _ in range(2))
    asyncio.run(serve(plan, arenas, inboxes, config))


def make_request(rng: random.Random, number: int) -> GenerateRequest:
    parts = (*rng.choice(BEGINNINGS), *rng.choices((*TEXTS, *PICTURES), k=rng.randrange(3)))
    token_ids, runs, media = build(parts)
    name = f"req-{number}"
    return GenerateRequest(
        request_id=RequestId(name),
        attempt=0,
        router_id=MemberId("router"),
        router_address="local://router",
        token_ids=token_ids,
        placeholders=runs,
        media=media,
        sampling=SamplingParams(seed=number),
        stop=StopConditions(rng.randint(1, 6), eos_token_ids=(EOS,)),
        age=(float(rng.randrange(4)), name),
        num_choices=rng.choice((1, 1, 2, 3)),
        dispatched_items=tuple(item.index for item in media if rng.random() < 0.75),
        priority=rng.choice((0, 0, 1, -1)),
    )


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_request_ends(part: int) -> None:
    for seed in range(part, NUM_HISTORIES, NUM_PARTS):
        try:
            history(seed)
        except Exception as error:
            raise AssertionError(f"history {seed} fails") from error

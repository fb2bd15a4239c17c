"""Checks that some request always advances, with several encoders and workers whose arenas, inboxes and KV pools each
hold hardly more than one request needs. Under every assignment, each request ends with the tokens that unlimited memory
gives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_fake import EOS, reference_tokens
from scheduling_prompts import PICTURES, Segment, build, segments
from together_world import MAX_MODEL_LEN, SPEC, World

from fabric.contracts import GenerateRequest, MemberId, RequestId, SamplingParams, StopConditions
from llm_workers.worker_config import WorkerConfig

SLOT_BYTES = {rows: 64 + SPEC.nbytes(rows) for rows in {rows for units in PICTURES.values() for rows in units}}
LARGEST = max(SLOT_BYTES.values())


@st.composite
def plans(draw: st.DrawFn) -> list[tuple[GenerateRequest, int, list[int], int]]:
    """Draws a list of `(request, worker, an encoder for each of its media, rounds to wait before the next request)`."""
    made = []
    for number in range(draw(st.integers(2, 6))):
        token_ids, runs, media = build(draw(segments))
        name = f"req-{number}"
        request = GenerateRequest(
            request_id=RequestId(name),
            attempt=0,
            router_id=MemberId("router"),
            router_address="local://router",
            token_ids=token_ids,
            placeholders=runs,
            media=media,
            sampling=SamplingParams(seed=number),
            stop=StopConditions(draw(st.integers(1, 6)), eos_token_ids=(EOS,)),
            age=(float(draw(st.integers(0, 3))), name),
            num_choices=draw(st.integers(1, 2)),
            dispatched_items=tuple(item.index for item in media if draw(st.integers(0, 3))),
            priority=draw(st.sampled_from((0, 0, 1, -1))),
        )
        encoders = draw(st.lists(st.integers(0, 1), min_size=len(media), max_size=len(media)))
        made.append((request, draw(st.integers(0, 1)), encoders, draw(st.integers(0, 3))))
    return made


async def serve(
    plan: list[tuple[GenerateRequest, int, list[int], int]],
    arenas: tuple[int, int],
    inboxes: tuple[int, int],
    config: WorkerConfig,
) -> World:
    max_total = min(MAX_MODEL_LEN, config.num_blocks * config.block_size + 1)
    world = World(arenas, inboxes, config)
    for request, worker, encoders, num_rounds in plan:
        world.begin(request, worker, encoders)
        for _ in range(num_rounds):
            await world.round()
    await world.finish(patience=8, max_stalls=40)
    for request, *_ in plan:
        for choice in range(request.num_choices):
            expected, _ = reference_tokens(request, choice, max_total)
            assert world.tokens[request.request_id, choice] == expected
    await world.close()
    return world


@settings(deadline=None, max_examples=30)
@given(
    plan=plans(),
    arenas=st.tuples(st.integers(LARGEST, 2 * LARGEST), st.integers(LARGEST, 2 * LARGEST)),
    inboxes=st.tuples(st.integers(LARGEST, 2 * LARGEST), st.integers(LARGEST, 2 * LARGEST)),
    num_blocks=st.integers(15, 24),
    step_tokens=st.integers(1, 24),
)
def test_every_request_ends(
    plan: list[tuple[GenerateRequest, int, list[int], int]],
    arenas: tuple[int, int],
    inboxes: tuple[int, int],
    num_blocks: int,
    step_tokens: int,
) -> None:
    config = WorkerConfig(
        block_size=4, num_blocks=num_blocks, max_step_tokens=step_tokens, max_sequences=4, unit_wait_s=1e6
    )
    world = asyncio.run(serve(plan, arenas, inboxes, config))
    assert {name for name, _ in world.tokens} == {request.request_id for request, *_ in plan}


def request_of(parts: Sequence[Segment], num_choices: int) -> GenerateRequest:
    token_ids, runs, media = build(parts)
    return GenerateRequest(
        request_id=RequestId("req"),
        attempt=0,
        router_id=MemberId("router"),
        router_address="local://router",
        token_ids=token_ids,
        placeholders=runs,
        media=media,
        sampling=SamplingParams(seed=3),
        stop=StopConditions(2, eos_token_ids=(EOS,)),
        age=(0.0, "req"),
        num_choices=num_choices,
        dispatched_items=tuple(item.index for item in media),
    )


CONFIG = WorkerConfig(block_size=4, num_blocks=20, max_step_tokens=8, max_sequences=4, unit_wait_s=1e6)


def test_choices_that_wait_for_a_sibling_keep_no_picture_from_it() -> None:
    """The inbox holds one of two pictures: the first must make room once the sibling that computes the prompt has
    passed it, and must not stay for the siblings that will find its blocks."""
    world = asyncio.run(serve([(request_of((2, "a1", 1, "b2"), 2), 0, [0, 1], 0)], [LARGEST] * 2, [LARGEST], CONFIG))
    assert world.num_stalls == 0


@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_picture_that_comes_again_makes_room_for_one_between(num_choices: int) -> None:
    request = request_of(("b2", 1, "a1", 1, "b2"), num_choices)
    world = asyncio.run(serve([(request, 0, [0, 1, 0], 0)], [LARGEST] * 2, [LARGEST], CONFIG))
    assert world.num_stalls == 0

"""Tests a worker's budget: the bytes that are allocated, and what can never be served."""

from __future__ import annotations

import pytest

from fabric.transport.feature_channel import SlotMemory
from llm_workers.scheduling import (
    SCORED_AT_ONCE,
    LargestItem,
    arena_room,
    feature_bytes,
    shortfalls,
    worker_bytes,
)
from llm_workers.scheduling.pool_sizes import MIN_TEXT_TOKENS, slot_bytes
from llm_workers.worker_config import Speculation, WorkerConfig
from modalities.family import ModelShape

SHAPE = ModelShape(
    hidden_size=64, num_levels=4, num_layers=3, num_kv_heads=2, head_dim=16, vocab_size=200, max_model_len=4096
)
PICTURE = LargestItem("image", num_tokens=100, max_unit_tokens=100, cost=400)
ENOUGH = 10**6


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_kv_is_keys_and_values_of_every_layer(dtype: str, itemsize: int) -> None:
    taken = worker_bytes(SHAPE, WorkerConfig(num_blocks=10, block_size=8), 5000, dtype)
    assert taken.kv == 3 * 2 * 80 * 2 * 16 * itemsize
    assert taken.inbox == 5000
    assert feature_bytes(SHAPE, 100, dtype) == 4 * 100 * 64 * itemsize


def test_the_workspace_grows_with_what_a_step_holds() -> None:
    small = worker_bytes(SHAPE, WorkerConfig(max_step_tokens=100), ENOUGH, "float32").workspace
    longer = worker_bytes(SHAPE, WorkerConfig(max_step_tokens=200), ENOUGH, "float32").workspace
    context = min(SHAPE.max_model_len, 1024 * 16)
    assert longer - small == 100 * 64 * 4 * (16 + 2 * 4) + 100 * context * 4
    guessing = WorkerConfig(max_step_tokens=1000, max_sequences=80, speculation=Speculation(4))
    plain, few = (WorkerConfig(max_step_tokens=1000, max_sequences=number) for number in (80, 10))
    taken = [worker_bytes(SHAPE, config, ENOUGH, "float32").workspace for config in (few, plain, guessing)]
    row = 3 * SHAPE.vocab_size * 4
    assert taken[2] - taken[1] == 4 * 80 * row, "every guess has a row of logits"
    assert taken[1] - taken[0] == (80 - SCORED_AT_ONCE) * row, "the rows of a prompt take more than those of few draws"


@pytest.mark.parametrize("payload", [1, 63, 64, 65, 1000])
def test_a_slot_counts_what_the_arena_counts(payload: int) -> None:
    memory = SlotMemory(4096)
    memory.reserve(payload)
    assert memory.usage().used_bytes == slot_bytes(payload)
    assert arena_room(4096, payload) == 4096 // slot_bytes(payload)


def blocks(count: int, **more: object) -> WorkerConfig:
    return WorkerConfig(num_blocks=count, block_size=4, **more)


def test_the_smallest_pool_that_is_enough() -> None:
    needed = (100 + MIN_TEXT_TOKENS) // 4
    assert shortfalls(SHAPE, blocks(needed), ENOUGH, "float32", [PICTURE]) == []
    (problem,) = shortfalls(SHAPE, blocks(needed - 1), ENOUGH, "float32", [PICTURE])
    assert f"num_blocks must be at least {needed}" in problem


def test_the_smallest_inbox_that_is_enough() -> None:
    needed = slot_bytes(feature_bytes(SHAPE, 100, "bfloat16"))
    assert shortfalls(SHAPE, blocks(64), needed, "bfloat16", [PICTURE]) == []
    (problem,) = shortfalls(SHAPE, blocks(64), needed - 1, "bfloat16", [PICTURE])
    assert problem.startswith(f"workers: inbox_bytes is {needed - 1}, but one feature of the largest image")
    SlotMemory(needed).reserve(feature_bytes(SHAPE, 100, "bfloat16"))


def test_what_the_context_can_not_hold_needs_no_room() -> None:
    short = SHAPE._replace(max_model_len=41)
    needed = slot_bytes(feature_bytes(short, 40, "float32"))
    assert shortfalls(short, blocks(10), needed, "float32", [PICTURE]) == []
    blocks_problem, _ = shortfalls(short, blocks(9), needed - 1, "float32", [PICTURE])
    assert "the largest image takes 100 tokens, and 40 with its text; num_blocks must be at least 10" in blocks_problem


def test_units_travel_alone_and_text_needs_nothing() -> None:
    film = LargestItem("video", num_tokens=100, max_unit_tokens=10, cost=400)
    assert shortfalls(SHAPE, blocks(64), slot_bytes(feature_bytes(SHAPE, 10, "float32")), "float32", [film]) == []
    assert shortfalls(SHAPE, blocks(1), 64, "float32", []) == []

"""Tests what a recorded decode step reads: buffers filled from a step's rows, with copies of the first row in place of
missing rows."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_workers.compute import PagedKV, SequenceRows, with_graphs
from llm_workers.compute.cuda_graphs import SIZES, DecodeInputs, GraphedModel, graph_size

PAGE, MAX_BLOCKS, NUM_BLOCKS = 8, 5, 40
KV = PagedKV(1, NUM_BLOCKS, PAGE, (1, 4), torch.bfloat16, torch.device("cpu"))


def rows_of(contexts: list[int], seed: int) -> list[SequenceRows]:
    free = np.random.default_rng(seed).permutation(NUM_BLOCKS)
    rows = []
    for at, context in enumerate(contexts):
        needed = -(-context // PAGE)
        rows.append(SequenceRows(at, context - 1, 1, free[:needed].astype(np.int64)))
        free = free[needed:]
    return rows


@settings(deadline=None, max_examples=40)
@given(contexts=st.lists(st.integers(1, PAGE * MAX_BLOCKS), min_size=1, max_size=7), seed=st.integers(0, 99))
def test_buffers_say_where_everything_lies(contexts: list[int], seed: int) -> None:
    rows = rows_of(contexts, seed)
    inputs = DecodeInputs(KV, 8, MAX_BLOCKS)
    inputs.load(rows_of([PAGE * MAX_BLOCKS] * 3, seed + 1))  # These are the remains of an earlier step.
    inputs.load(rows)
    tails = inputs.tails.view(8, PAGE)
    for place in range(8):
        row = rows[place] if place < len(rows) else rows[0]
        (slot,) = KV.slots(row.block_ids, row.context - 1, row.context)
        end = -(-row.context // PAGE) * PAGE
        assert inputs.write[place] == slot
        assert inputs.contexts[place] == row.context
        assert set(tails[place].tolist()) == set(KV.slots(row.block_ids, row.context - 1, end).tolist())
        table = inputs.table[place].tolist()
        assert table[: len(row.block_ids)] == row.block_ids.tolist()
        assert set(table) == set(row.block_ids.tolist()), "another sequence's page would be read"


def test_only_steps_of_single_tokens_have_a_size() -> None:
    rows = rows_of([3, 9, 20], 0)
    assert graph_size(rows) == 4
    assert graph_size(rows * 8) == 24
    assert graph_size([*rows, SequenceRows(3, 0, 2, np.zeros(1, dtype=np.int64))]) is None
    assert graph_size(rows[:1] * (SIZES[-1] + 1)) is None


def test_without_a_device_the_model_stays_what_it_is() -> None:
    model = object()
    assert with_graphs(model, KV, 100) is model
    assert not isinstance(model, GraphedModel)

"""Compares every attention backend with attention written out, on pages in any order, for any mix of rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.contracts import ConfigError
from llm_workers.compute import PagedKV, SequenceRows, select_backend
from llm_workers.compute.attention import MIN_BUCKET_TOKENS, buckets, groups

NUM_BLOCKS, BLOCK_SIZE, HEAD_DIM = 160, 4, 8
CASES = [("sdpa", "cpu", torch.float32), ("sdpa", "cpu", torch.bfloat16)]
if torch.cuda.is_available():
    CASES += [("sdpa", "cuda", torch.float32), ("sdpa", "cuda", torch.bfloat16), ("varlen", "cuda", torch.bfloat16)]


def attend_written_out(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scaling: float
) -> torch.Tensor:
    """Computes the attention of one sequence in float64. `q` has shape (n, heads, dim), `keys` and `values` have shape
    (context, kv_heads, dim)."""
    group = q.shape[1] // keys.shape[1]
    q, keys, values = q.double(), keys.double().repeat_interleave(group, 1), values.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scaling
    seen = (
        torch.arange(keys.shape[0], device=q.device)[None]
        <= torch.arange(start, start + len(q), device=q.device)[:, None]
    )
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values)


def run_case(
    backend_name: str,
    device: str,
    dtype: torch.dtype,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor, PagedKV, list[SequenceRows], list[torch.Tensor]]:
    """Runs one step. `lengths` holds (start, num_tokens) per sequence. Returns the result of the backend and the one
    written out, both in packed order, and the pages, rows, and new keys and values."""
    torch.manual_seed(seed)
    num_heads, num_kv_heads = heads
    device = torch.device(device)
    kv = PagedKV(2, NUM_BLOCKS, BLOCK_SIZE, (num_kv_heads, HEAD_DIM), dtype, device)
    free = np.random.default_rng(seed).permutation(NUM_BLOCKS)
    for pages in kv.layer(1):
        pages.fill_(float("nan"))  # Values that a former owner left must have no effect.
    rows, contexts, at = [], [], 0
    for start, num_tokens in lengths:
        needed = -(-(start + num_tokens) // BLOCK_SIZE)
        block_ids, free = free[:needed].astype(np.int64), free[needed:]
        row = SequenceRows(at, start, num_tokens, block_ids)
        context = torch.randn(2, row.context, num_kv_heads, HEAD_DIM, device=device).to(dtype)
        slots = torch.from_numpy(kv.slots(block_ids, 0, start)).to(device)
        for pages, values in zip(kv.layer(1), context, strict=True):
            pages[slots] = values[:start]
        rows.append(row)
        contexts.append(context)
        at += num_tokens
    q = torch.randn(at, num_heads, HEAD_DIM, device=device).to(dtype)
    new = [torch.cat([context[i, row.start :] for row, context in zip(rows, contexts, strict=True)]) for i in (0, 1)]
    ours = select_backend(backend_name, kv)(kv, rows).attend(1, q, new[0], new[1], 0.3)
    expected = [
        attend_written_out(q[row.at : row.at + row.num_tokens], context[0], context[1], row.start, 0.3)
        for row, context in zip(rows, contexts, strict=True)
    ]
    assert not any(pages.any() for pages in kv.layer(0)), "another layer was written"
    return ours.double(), torch.cat(expected), kv, rows, new


@pytest.mark.parametrize(("backend", "device", "dtype"), CASES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@settings(deadline=None, max_examples=12)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 1, 2, 3, 9, 33])), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
def test_a_mixed_batch_attends_as_written_out(
    backend: str, device: str, dtype: torch.dtype, heads: tuple[int, int], lengths: list[tuple[int, int]], seed: int
) -> None:
    ours, expected, kv, rows, new = run_case(backend, device, dtype, lengths, heads, seed)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)
    written = torch.cat([torch.from_numpy(kv.slots(row.block_ids, row.start, row.context)) for row in rows]).to(
        kv.device
    )
    for pages, tokens in zip(kv.layer(1), new, strict=True):
        assert torch.equal(pages[written], tokens)


def test_nan_of_one_sequence_does_not_reach_another() -> None:
    kv = PagedKV(1, 64, BLOCK_SIZE, (1, HEAD_DIM), torch.float32, torch.device("cpu"))
    rows = [SequenceRows(0, 0, 1, np.array([3])), SequenceRows(1, 59, 1, np.arange(4, 19))]
    q, k, v = (torch.randn(2, 1, HEAD_DIM) for _ in range(3))
    for tensor in (q, k, v):
        tensor[1] = float("nan")
    out = select_backend("sdpa", kv)(kv, rows).attend(0, q, k, v, 1.0)
    assert torch.equal(out[0], v[0])
    assert torch.isnan(out[1]).all()


def test_buckets_bound_padding_to_a_factor_of_two() -> None:
    rows = [
        SequenceRows(at, context - 1, 1, np.arange(1))
        for at, context in enumerate([1, 5, 64, 65, 127, 128, 300, 1000, 63])
    ]
    grouped = buckets(rows)
    assert sorted(row.at for group in grouped for row in group) == list(range(len(rows)))
    for group in grouped:
        shortest = max(min(row.context for row in group), MIN_BUCKET_TOKENS)
        assert max(row.context for row in group) <= 2 * shortest


def test_a_backend_that_cannot_run_is_refused() -> None:
    kv = PagedKV(1, 2, BLOCK_SIZE, (1, HEAD_DIM), torch.float32, torch.device("cpu"))
    with pytest.raises(ConfigError, match="varlen"):
        select_backend("varlen", kv)
    with pytest.raises(ConfigError, match="triton"):
        select_backend("triton", kv)


@given(contexts=st.lists(st.integers(1, 400), max_size=40), max_tokens=st.integers(0, 3000))
def test_groups_hold_every_row_once_within_their_size(contexts: list[int], max_tokens: int) -> None:
    rows = [SequenceRows(at, context - 1, 1, np.zeros(1, dtype=np.int64)) for at, context in enumerate(contexts)]
    cut = groups(rows, max_tokens)
    assert sorted(row.at for group in cut for row in group) == list(range(len(rows)))
    for group in cut:
        assert len(group) == 1 or len(group) * max(row.context for row in group) <= max_tokens
    for group, following in itertools.pairwise(cut):
        assert (len(group) + 1) * following[0].context > max_tokens, "the next row had room"

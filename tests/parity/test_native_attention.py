"""Compares attention in C with attention written out, on pages in any order whose unwritten slots hold NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric import c_library
from llm_workers.compute import PagedKV, SequenceRows, native_attention
from llm_workers.compute.attention import SdpaStep
from llm_workers.compute.native_attention import NativeChunks, NativeDecode, is_native, is_native_for_chunks
from llm_workers.compute.paged_kv import StepRows

NUM_BLOCKS = 120


def pages_of(heads: tuple[int, int], block_size: int = 16, dtype: torch.dtype = torch.bfloat16) -> PagedKV:
    kv = PagedKV(2, NUM_BLOCKS, block_size, heads, dtype, torch.device("cpu"))
    for pages in kv.layer(1):
        pages.fill_(float("nan"))
    return kv


needs_native = pytest.mark.skipif(not is_native(pages_of((1, 32))), reason="no compiler, or no AVX512-BF16")
DTYPES = [
    pytest.param(torch.bfloat16, marks=needs_native, id="bfloat16"),
    pytest.param(
        torch.float32,
        marks=pytest.mark.skipif(not is_native(pages_of((1, 32), dtype=torch.float32)), reason="no compiler"),
        id="float32",
    ),
]
DTYPE_TO_TOLERANCE = {torch.bfloat16: {"atol": 4e-3, "rtol": 1e-2}, torch.float32: {"atol": 3e-5, "rtol": 1e-5}}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 32), (8, 2, 64), (14, 2, 96), (11, 1, 128)])
@settings(deadline=None, max_examples=15)
@given(
    contexts=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    block_size=st.sampled_from([16, 32]),
    num_threads=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_as_written_out(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    contexts: list[int],
    block_size: int,
    num_threads: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    kv = pages_of((num_kv_heads, head_dim), block_size, dtype)
    free, rows, expected = np.random.default_rng(seed).permutation(NUM_BLOCKS), [], []
    queries = (torch.randn(len(contexts), num_heads, head_dim) * 2).to(dtype)
    for at, context in enumerate(contexts):
        needed = -(-context // block_size)
        row = SequenceRows(at, context - 1, 1, free[:needed].astype(np.int64))
        free = free[needed:]
        keys, values = torch.randn(2, context, num_kv_heads, head_dim).to(dtype)
        slots = torch.from_numpy(kv.slots(row.block_ids, 0, context))
        for pages, written in zip(kv.layer(1), (keys, values), strict=True):
            pages[slots] = written
        group = num_heads // num_kv_heads
        keys, values = (each.double().repeat_interleave(group, dim=1) for each in (keys, values))
        weights = (torch.einsum("hd,khd->hk", queries[at].double(), keys) * 0.2).softmax(dim=-1)
        expected.append(torch.einsum("hk,khd->hd", weights, values))
        rows.append(row)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        ours = NativeDecode(kv, StepRows(rows).singles()).attend(1, queries, 0.2)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(ours.double(), torch.stack(expected), **DTYPE_TO_TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(4, 4, 32), (8, 2, 64), (14, 2, 96), (11, 1, 128), (96, 1, 32), (2, 1, 256)],
)
@settings(deadline=None, max_examples=15)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 300), st.integers(2, 200)), min_size=1, max_size=3),
    block_size=st.sampled_from([16, 48]),
    num_threads=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_chunks_as_written_out(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    sizes: list[tuple[int, int]],
    block_size: int,
    num_threads: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    kv = pages_of((num_kv_heads, head_dim), block_size, dtype)
    # Token 0 belongs to a row that decodes.
    free, rows, num_tokens = np.random.default_rng(seed).permutation(NUM_BLOCKS), [], 1
    for start, size in sizes:
        needed = -(-(start + size) // block_size)
        rows.append(SequenceRows(num_tokens, start, size, free[:needed].astype(np.int64)))
        free, num_tokens = free[needed:], num_tokens + size
    packed = (torch.randn(num_tokens, num_heads + num_kv_heads, head_dim) * 2).to(dtype)
    queries, expected = packed[:, :num_heads], torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float64)
    for row in rows:
        keys, values = torch.randn(2, row.context, num_kv_heads, head_dim).to(dtype)
        slots = torch.from_numpy(kv.slots(row.block_ids, 0, row.context))
        for pages, written in zip(kv.layer(1), (keys, values), strict=True):
            pages[slots] = written
        group = num_heads // num_kv_heads
        keys, values = (each.double().repeat_interleave(group, dim=1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries[row.at : row.at + row.num_tokens].double(), keys) * 0.2
        is_seen = torch.arange(row.context) <= torch.arange(row.start, row.context)[:, None]
        weights = scores.masked_fill(~is_seen, float("-inf")).softmax(dim=-1)
        expected[row.at : row.at + row.num_tokens] = torch.einsum("hqk,khd->qhd", weights, values)
    ours = torch.zeros(num_tokens, num_heads, head_dim, dtype=dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        NativeChunks(kv, rows).attend(1, queries, ours, 0.2)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(ours.double(), expected, **DTYPE_TO_TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_chunk", [True, False], ids=["chunk", "decode"])
@pytest.mark.parametrize("of", [0, 1], ids=["key", "value"])
def test_a_nan_shows_in_the_last_row_and_in_no_neighbours(of: int, is_chunk: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kv, rows = (
        pages_of((2, 64), dtype=dtype),
        [SequenceRows(0, 0, 150, np.arange(10)), SequenceRows(150, 0, 150, np.arange(20, 30))],
    )
    for pages in kv.layer(1):
        pages.copy_(torch.randn_like(pages))
    kv.layer(1)[of][5, 1, 7] = float("nan")
    queries = torch.randn(300, 2, 64).to(dtype)
    if is_chunk:
        out = torch.zeros_like(queries)
        NativeChunks(kv, rows).attend(1, queries, out, 0.2)
        first, second = out[149], out[150:]
    else:
        singles = StepRows([SequenceRows(at, 149, 1, row.block_ids) for at, row in enumerate(rows)]).singles()
        first, second = NativeDecode(kv, singles).attend(1, queries[:2].contiguous(), 0.2)
    assert not first[1].isfinite().any() if of == 0 else not first[1].isfinite().all()
    assert second.isfinite().all()


@pytest.mark.parametrize("size", [0.0, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_any_size_make_weights(dtype: torch.dtype, size: float) -> None:
    """The sizes give weights to all tokens alike, to some, and to one alone; a score of -inf gives no weight. The last
    token of a chunk gets the same result as a row that decodes at its position."""
    torch.manual_seed(0)
    kv, row = pages_of((1, 32), dtype=dtype), SequenceRows(0, 99, 1, np.arange(7))
    keys, values = (torch.randn(100, 1, 32) * size).to(dtype), torch.randn(100, 1, 32).to(dtype)
    keys[17, 0, 3] = float("-inf")
    for pages, written in zip(kv.layer(1), (keys, values), strict=True):
        pages[:100] = written
    query = torch.randn(1, 1, 32).abs().to(dtype)
    ours = NativeDecode(kv, StepRows([row]).singles()).attend(1, query, 0.2)
    weights = ((query[0].double() @ keys[:, 0].double().T) * 0.2).softmax(dim=-1)
    chunk = torch.zeros(9, 1, 32, dtype=dtype)
    NativeChunks(kv, [SequenceRows(0, 91, 9, np.arange(7))]).attend(1, query.expand(9, 1, 32).contiguous(), chunk, 0.2)
    for found in (ours[0], chunk[8]):
        torch.testing.assert_close(found.double(), weights @ values[:, 0].double(), **DTYPE_TO_TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_gives_the_same_either_way(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    results = []
    for is_on in (True, False):
        torch.manual_seed(0)
        kv = pages_of((2, 64), dtype=dtype)
        free = torch.randperm(NUM_BLOCKS).numpy()
        rows = [
            SequenceRows(0, 30, 1, free[:2]),
            SequenceRows(1, 0, 20, free[2:4]),
            SequenceRows(21, 90, 1, free[4:10]),
            SequenceRows(22, 7, 1, free[10:11]),
        ]
        for pages in kv.layer(1):
            pages.normal_()
        q, k, v = torch.randn(23, 8, 64).to(dtype), *torch.randn(2, 23, 2, 64).to(dtype)
        with monkeypatch.context() as patched:
            if not is_on:
                patched.setattr(native_attention, "_library", lambda _: None)
            results.append(SdpaStep(kv, rows).attend(1, q, k, v, 0.125))
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else DTYPE_TO_TOLERANCE[dtype]
    torch.testing.assert_close(*results, **tolerance)


def test_other_pages_go_by_torch() -> None:
    assert not is_native(pages_of((1, 32), dtype=torch.float16))
    for dtype in (torch.bfloat16, torch.float32):
        assert not is_native(pages_of((1, 24), dtype=dtype))
        assert not is_native(pages_of((1, 32), block_size=8, dtype=dtype))
    for dtype in (torch.bfloat16, torch.float32):
        assert not is_native_for_chunks(pages_of((1, 288), dtype=dtype), 1)
        assert not is_native_for_chunks(pages_of((1, 32), dtype=dtype), 97)


def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_library.shutil, "which", lambda _: None)
    native_attention._library.cache_clear()
    try:
        assert not is_native(pages_of((1, 32)))
        assert not is_native(pages_of((1, 32), dtype=torch.float32))
    finally:
        native_attention._library.cache_clear()

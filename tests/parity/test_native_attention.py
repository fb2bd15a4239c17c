"""Attention in C against attention written out, on pages in any order whose unwritten slots hold NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric import c_library
from llm_workers import native_attention
from llm_workers.attention_sdpa import SdpaStep
from llm_workers.native_attention import NativeDecode, is_native
from llm_workers.paged_kv import PagedKV, Rows, StepRows

NUM_BLOCKS = 120


def pages_of(heads: tuple[int, int], block_size: int = 16, dtype: torch.dtype = torch.bfloat16) -> PagedKV:
    kv = PagedKV(2, NUM_BLOCKS, block_size, heads, dtype, torch.device("cpu"))
    for pages in kv.layer(1):
        pages.fill_(float("nan"))
    return kv


needs_native = pytest.mark.skipif(not is_native(pages_of((1, 32))), reason="no compiler, or no AVX512-BF16")


@needs_native
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 32), (8, 2, 64), (14, 2, 96), (11, 1, 128)])
@settings(deadline=None, max_examples=15)
@given(
    contexts=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    block_size=st.sampled_from([16, 32]),
    num_threads=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_as_written_out(num_heads, num_kv_heads, head_dim, contexts, block_size, num_threads, seed) -> None:
    torch.manual_seed(seed)
    kv = pages_of((num_kv_heads, head_dim), block_size)
    free, rows, expected = np.random.default_rng(seed).permutation(NUM_BLOCKS), [], []
    queries = (torch.randn(len(contexts), num_heads, head_dim) * 2).bfloat16()
    for at, context in enumerate(contexts):
        needed = -(-context // block_size)
        row = Rows(at, context - 1, 1, free[:needed].astype(np.int64))
        free = free[needed:]
        keys, values = torch.randn(2, context, num_kv_heads, head_dim).bfloat16()
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
    torch.testing.assert_close(ours.double(), torch.stack(expected), atol=4e-3, rtol=1e-2)


@needs_native
def test_a_step_gives_the_same_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for is_on in (True, False):
        torch.manual_seed(0)
        kv = pages_of((2, 64))
        free = torch.randperm(NUM_BLOCKS).numpy()
        rows = [
            Rows(0, 30, 1, free[:2]),
            Rows(1, 0, 20, free[2:4]),
            Rows(21, 90, 1, free[4:10]),
            Rows(22, 7, 1, free[10:11]),
        ]
        for pages in kv.layer(1):
            pages.normal_()
        q, k, v = torch.randn(23, 8, 64).bfloat16(), *torch.randn(2, 23, 2, 64).bfloat16()
        with monkeypatch.context() as patched:
            if not is_on:
                patched.setattr(native_attention, "_library", lambda: None)
            results.append(SdpaStep(kv, rows).attend(1, q, k, v, 0.125))
    torch.testing.assert_close(results[0], results[1], atol=2e-2, rtol=2e-2)


def test_other_pages_go_by_torch() -> None:
    assert not is_native(pages_of((1, 32), dtype=torch.float32))
    assert not is_native(pages_of((1, 24)))
    assert not is_native(pages_of((1, 32), block_size=8))


def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_library.shutil, "which", lambda _: None)
    native_attention._library.cache_clear()
    try:
        assert not is_native(pages_of((1, 32)))
    finally:
        native_attention._library.cache_clear()

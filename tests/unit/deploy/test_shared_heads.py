"""Tests which numbers of ranks a model's KV heads permit. The tests import no torch."""

from __future__ import annotations

import pytest

from deploy.worker_pools import check_shares
from fabric.contracts import ConfigError
from llm_workers.scheduling import kv_heads
from modalities.family import ModelShape

SHAPE = ModelShape(8, 1, 2, num_kv_heads=6, head_dim=16, vocab_size=9, max_model_len=99)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_heads_are_shared_evenly(num_ranks: int) -> None:
    check_shares(SHAPE, num_ranks)
    assert kv_heads(SHAPE, num_ranks) == (6 // num_ranks, 16)


@pytest.mark.parametrize("num_ranks", [4, 5, 12])
def test_heads_that_would_be_split_are_refused(num_ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel is {num_ranks}"):
        check_shares(SHAPE, num_ranks)

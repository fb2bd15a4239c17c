"""Compares log-probabilities with sorting in Python, including equal values at the edge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_workers.sampling.step_sampling import token_logprobs

pytestmark = pytest.mark.torch
VOCAB = 17


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, VOCAB - 1), st.integers(0, 20)), min_size=1, max_size=5),
    st.integers(1, 40),
    st.integers(0, 10_000),
)
def test_rows_are_ordered_by_probability_then_by_id(rows: list[tuple[int, int]], num_levels: int, seed: int) -> None:
    """Few levels make many equal values."""
    levels = np.random.default_rng(seed).integers(0, num_levels, (len(rows), VOCAB)).astype(np.float32)
    raw = torch.from_numpy(levels).log_softmax(dim=-1)
    got = token_logprobs(raw, [token for token, _ in rows], [count for _, count in rows])
    for row, (token, count), scored in zip(raw.tolist(), rows, got, strict=True):
        ordered = sorted(enumerate(row), key=lambda pair: (-pair[1], pair[0]))
        assert scored.logprob == row[token]
        assert scored.top == tuple(ordered[:count])


def test_a_row_that_failed_has_a_value_all_the_same() -> None:
    """The row's token is -1. This function does not end the row's sequence; the engine does."""
    raw = torch.full((1, VOCAB), float("nan"))
    (scored,) = token_logprobs(raw, [-1], [2])
    assert scored.logprob != scored.logprob

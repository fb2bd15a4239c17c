"""Compares the masks of a batch with masks that are applied one bit at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_workers.sampling.step_sampling import Guided, apply_masks

pytestmark = pytest.mark.torch


class Allows:
    """Serves as a guide that allows a set of tokens."""

    def __init__(self, tokens: Sequence[int], is_whole: bool = True) -> None:
        self.tokens, self.is_whole = tokens, is_whole

    def fork(self) -> Allows:
        return self

    def advance(self, token_ids: Sequence[int]) -> None:
        raise AssertionError("a mask changes no guide")

    def write_mask(self, words: npt.NDArray[np.int32]) -> bool:
        words[:] = 0
        for token in self.tokens:
            words[token // 32] |= np.uint32(1 << token % 32).astype(np.int32)
        return self.is_whole


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([31, 32, 33, 100]), st.integers(1, 5), st.data())
def test_bits_that_are_not_set_become_minus_infinity(vocab: int, num_rows: int, data: st.DataObject) -> None:
    logits = torch.randn(num_rows, vocab)
    before = logits.clone()
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True))
    sets = [data.draw(st.sets(st.integers(0, vocab - 1))) for _ in rows]
    is_whole = [data.draw(st.booleans()) for _ in rows]
    guided = [Guided(row, Allows(*given)) for row, *given in zip(rows, sets, is_whole, strict=True)]
    assert apply_masks(logits, guided) == [row for row, whole in zip(rows, is_whole, strict=True) if not whole]
    for row in range(num_rows):
        kept = sets[rows.index(row)] if row in rows else range(vocab)
        expected = [before[row, token].item() if token in kept else float("-inf") for token in range(vocab)]
        assert logits[row].tolist() == expected

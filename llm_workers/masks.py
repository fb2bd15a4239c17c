"""Sets the logits of tokens that a grammar forbids to -inf, for all rows at once. This module knows nothing of
grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from llm_workers.scheduling.guidance import Guide

WORD_BITS = 32


class Guided(NamedTuple):
    """A `Guided` is a row of the logits and the guide of its sequence."""

    row: int
    guide: Guide


def apply_masks(logits: torch.Tensor, guided: Sequence[Guided]) -> list[int]:
    """Changes `logits` with shape `(n, vocab)` in place; the guides do not advance. Returns the rows whose grammar is
    broken; tokens drawn from these rows have no meaning."""
    if not guided:
        return []
    words = np.zeros((len(guided), -(-logits.shape[-1] // WORD_BITS)), dtype="<i4")
    broken = [row for place, (row, guide) in enumerate(guided) if not guide.write_mask(words[place])]
    packed = torch.from_numpy(words.view(np.uint8)).to(logits.device)
    bits = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1
    is_forbidden = bits.view(len(guided), -1)[:, : logits.shape[-1]] == 0
    at = torch.tensor([row for row, _ in guided], device=logits.device)
    logits.index_copy_(0, at, logits.index_select(0, at).masked_fill_(is_forbidden, float("-inf")))
    return broken

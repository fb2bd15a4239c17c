"""Defines the sizes that a step's packed tokens are rounded up to, where oneDNN multiplies.

oneDNN builds each product's program for one number of rows, at the first use of that number (measured: a step of a new
size takes half as long again), and keeps about a thousand programs. So steps come in a hundred sizes, which are on
average 3 % above what the steps need. This module knows nothing of models.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

_STEPS = ((64, 1), (128, 8), (256, 16), (512, 32))
_LARGEST_STEP = 64


def rounded_size(num_tokens: int) -> int:
    """Returns the rounded size: at least `num_tokens`, and above it by less than an eighth."""
    step = next((step for most, step in _STEPS if num_tokens <= most), _LARGEST_STEP)
    return -(-num_tokens // step) * step


def pad_step(embeddings: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `embeddings` `(num_tokens, hidden)` and `positions` `(num_axes, num_tokens)` with rows of zeros
    appended."""
    extra = rounded_size(len(embeddings)) - len(embeddings)
    if not extra:
        return embeddings, positions
    return pad(embeddings, (0, 0, 0, extra)), pad(positions, (0, extra))

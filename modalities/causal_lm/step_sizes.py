"""Sizes that a step's packed tokens are rounded up to, where oneDNN multiplies.

It makes each product's program for one number of rows, at the first use of that number (measured: a step of a new size
takes half as long again), and keeps about a thousand. So steps come in a hundred sizes, 3 % above what they need on
average. Knows nothing of models.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

_STEPS = ((64, 1), (128, 8), (256, 16), (512, 32))
_LARGEST_STEP = 64


def rounded_size(num_tokens: int) -> int:
    """At least `num_tokens`, by less than an eighth."""
    step = next((step for most, step in _STEPS if num_tokens <= most), _LARGEST_STEP)
    return -(-num_tokens // step) * step


def pad_step(embeddings: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`embeddings` `(num_tokens, hidden)` and `positions` `(num_axes, num_tokens)`, with rows of zeros behind."""
    extra = rounded_size(len(embeddings)) - len(embeddings)
    if not extra:
        return embeddings, positions
    return pad(embeddings, (0, 0, 0, extra)), pad(positions, (0, extra))

"""Computes attention within segments of packed rows, called by transformers' own attention modules.

A tower's layers receive all rows in one sequence and the keyword `segments`: a row sees only the rows of its own
segment. Segments of equal length are computed together. This module knows nothing of particular models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fabric.errors import ConfigError

ATTENTION_NAME = "weft_segments"


class Segments:
    """Holds the lengths of consecutive segments, and the indexes of the rows of all segments of equal length."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = list(lengths)
        starts = torch.tensor([0, *self.lengths]).cumsum(0)
        counts = torch.tensor(self.lengths)
        self.groups: list[torch.Tensor] = [
            (starts[:-1][counts == length][:, None] + torch.arange(length)).to(device)
            for length in sorted(set(self.lengths))
        ]
        """Holds the indexes of rows, one tensor for each length. Each is int64 and has shape
        `(num_segments, length)`."""
        self.whole = torch.tensor([0, sum(self.lengths)])
        """Holds the bounds of all rows as one sequence, for modules that would otherwise cut the rows themselves."""


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    segments: Segments | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Computes the attention within each segment; transformers' attention modules call this function.

    `query` has shape `(1, num_heads, num_rows, head_dim)`, the result `(1, num_rows, num_heads, head_dim)`. Raises
    ConfigError if `segments` is missing."""
    if segments is None:
        raise ConfigError("the segmented attention was called without its segments")
    packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    out = torch.empty_like(packed[0])
    for rows in segments.groups:
        q, k, v = (tensor[rows].transpose(1, 2) for tensor in packed)
        out[rows] = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2)
    return out[None], None


def register_attention() -> str:
    """Registers `attend` with transformers for this process and returns its name. The function is idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attend)
    return ATTENTION_NAME

"""Attention within segments of packed rows, under transformers' own attention modules.

A tower's layers are called with all rows in one sequence and the keyword `segments`: rows of a segment see each other
and nobody else. Segments of one length are attended to together. Knows no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fabric.errors import ConfigError

ATTENTION_NAME = "weft_segments"


class Segments:
    """Lengths of segments that follow each other, and where the rows of equally long ones stand."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = list(lengths)
        starts = torch.tensor([0, *self.lengths]).cumsum(0)
        counts = torch.tensor(self.lengths)
        self.groups: list[torch.Tensor] = [
            (starts[:-1][counts == length][:, None] + torch.arange(length)).to(device)
            for length in sorted(set(self.lengths))
        ]
        """int64 `(num_segments, length)` each: indexes of rows."""
        self.whole = torch.tensor([0, sum(self.lengths)])
        """As one sequence, for modules that would cut it themselves."""


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
    """The function that transformers' attention modules call: `query` `(1, num_heads, num_rows, head_dim)` ->
    `(1, num_rows, num_heads, head_dim)`."""
    if segments is None:
        raise ConfigError("the segmented attention was called without its segments")
    packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    out = torch.empty_like(packed[0])
    for rows in segments.groups:
        q, k, v = (tensor[rows].transpose(1, 2) for tensor in packed)
        out[rows] = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2)
    return out[None], None


def register_attention() -> str:
    """Makes the function known to transformers, for this process; returns its name. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attend)
    return ATTENTION_NAME

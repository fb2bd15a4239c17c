"""Rows of a video's unit that stay, as `modalities.video_rows` counts them. Torch."""

from __future__ import annotations

import torch

from modalities.video_rows import StepRows


def thinned(steps: torch.Tensor, rows: StepRows) -> torch.Tensor:
    """`(num_levels, num_steps, num_rows, hidden)` -> `(num_levels, num_tokens, hidden)`: of each step some rows, then
    means over several steps, the last over those that are left."""
    if len(rows.kept) < steps.shape[2]:
        steps = steps[:, :, list(rows.kept)]
    if rows.num_pooled > 1:
        steps = torch.stack([group.mean(dim=1) for group in steps.split(rows.num_pooled, dim=1)], dim=1)
    return steps.flatten(1, 2)

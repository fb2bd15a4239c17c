"""Selects and averages the feature rows of a video's unit, as `VideoRows` of `modalities.media.frame_sampling` counts
them. It imports torch, and knows nothing of models."""

from __future__ import annotations

import numpy as np
import torch

from modalities.device_copies import to_device
from modalities.media import VideoRows


def thinned(steps: torch.Tensor, rows: VideoRows) -> torch.Tensor:
    """Returns features `(num_levels, num_tokens, hidden)` for `(num_levels, num_steps, num_rows, hidden)`. It keeps
    some rows of each step, and then averages them over groups of several steps. The last group has the steps that
    remain."""
    if len(rows.kept) < steps.shape[2]:
        steps = steps.index_select(2, to_device(np.array(rows.kept), steps.device))
    if rows.num_pooled > 1:
        steps = torch.stack([group.mean(dim=1) for group in steps.split(rows.num_pooled, dim=1)], dim=1)
    return steps.flatten(1, 2)

"""Computes on the host what a vision tower would compute from the grids of a batch: positions, segments, windows, and
the weights of its position embeddings.

The towers of transformers compute these tables from grids on the device, and wait for it several times. They take
finished tables as keywords instead. `tower_tables` computes them with transformers' own functions, from grids that the
host knows, and copies each to the device without a wait. The module knows nothing of requests and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from modalities.device_copies import to_device
from modalities.packed_attention import Segments


def tower_tables(tower: Any, grids: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """Returns the keywords for a call of `tower`, a vision tower of the Qwen families, on pictures and videos of these
    grids (patches in time, height and width). They include the `segments` of `modalities.packed_attention`: each
    picture, or temporal patch of a video, is a segment, and so is each window in a tower with windows."""
    device, merge = tower.device, tower.spatial_merge_size
    grid = torch.tensor(grids)
    whole = Segments([height * width for steps, height, width in grids for _ in range(steps)], device)
    tables = {
        "position_ids": to_device(get_vision_position_ids(grid, merge), device),
        "cu_seqlens": whole.bounds,
        "max_seqlen": whole.max_length,
        "segments": (whole,),
    }
    if hasattr(tower, "window_size"):
        order, bounds = get_vision_window_index(grid, merge, tower.window_size, tower.patch_size)
        windows = Segments(bounds.diff().tolist(), device)
        tables |= {
            "window_index": to_device(order, device),
            "cu_window_seqlens": windows.bounds,
            "max_window_seqlen": windows.max_length,
            "segments": (whole, windows),
        }
    if hasattr(tower, "num_grid_per_side"):
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        tables |= {"interp_indices": to_device(indices, device), "interp_weights": to_device(weights, device)}
    return tables

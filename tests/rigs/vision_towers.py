"""Builds the vision towers of the Qwen families with tiny sizes, and computes their features.

It knows nothing of checkpoints and of encoders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from family_rows_qwen_vl import VISION2, VISION3, VISION25
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniVisionEncoder,
    Qwen2_5OmniVisionEncoderConfig,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLVisionConfig,
)
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel, Qwen2VLVisionConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeVisionEncoder,
    Qwen3OmniMoeVisionEncoderConfig,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionConfig, Qwen3VLVisionModel

from modalities.families.qwen_vl.tower_tables import tower_tables

WIDE = {"hidden_size": 128, "intermediate_size": 192}
"""Sets two heads of 64 and widths that are multiples of 64, as large towers have. Products, norms and rotary positions
then run in C where the C code can be compiled."""
TOWERS = {
    "qwen2-vl": (Qwen2VisionTransformerPretrainedModel, Qwen2VLVisionConfig, VISION2),
    "qwen2.5-vl": (Qwen2_5_VisionTransformerPretrainedModel, Qwen2_5_VLVisionConfig, VISION25),
    "qwen2.5-vl wide": (Qwen2_5_VisionTransformerPretrainedModel, Qwen2_5_VLVisionConfig, VISION25 | WIDE),
    "qwen2.5-omni": (Qwen2_5OmniVisionEncoder, Qwen2_5OmniVisionEncoderConfig, VISION25),
    "qwen3-vl": (Qwen3VLVisionModel, Qwen3VLVisionConfig, VISION3),
    "qwen3-vl wide": (Qwen3VLVisionModel, Qwen3VLVisionConfig, VISION3 | WIDE),
    "qwen3-omni": (Qwen3OmniMoeVisionEncoder, Qwen3OmniMoeVisionEncoderConfig, VISION3),
}
GRIDS = [(1, 4, 6), (3, 8, 10), (1, 16, 4), (1, 2, 2)]
"""Holds the grids of two pictures, a video and the smallest picture: patches in time, height and width. With windows of
4 x 4 patches, the edges cut off some windows."""


def tower_of(name: str, dtype: torch.dtype) -> Any:
    """Returns the tower of transformers, with weights large enough for every part to have an effect."""
    kind, config_kind, sizes = TOWERS[name]
    config = config_kind(**sizes)
    config._attn_implementation = "sdpa"
    torch.manual_seed(3)
    tower = kind(config)
    for parameter in tower.parameters():
        spread = 1.5 * parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.25
        parameter.data = (torch.randn_like(parameter) * spread).to(dtype)
    return tower.to(dtype).eval()


def features_of(
    tower: Any, grids: Sequence[tuple[int, int, int]], dtype: torch.dtype, *, has_tables: bool = False
) -> torch.Tensor:
    """Returns every level that the tower computes, `(num_levels, num_tokens, hidden)`. With `has_tables`, the tower
    gets the tables of `tower_tables`, which it needs if its attention is packed; otherwise it computes its own."""
    width = 3 * tower.config.temporal_patch_size * tower.config.patch_size**2
    grid = torch.tensor(list(grids))
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randn((int(grid.prod(-1).sum()), width), generator=generator).bfloat16().to(dtype)
    with torch.inference_mode():
        tables = tower_tables(tower, grids) if has_tables else {}
        output = tower(pixels, grid_thw=grid, return_dict=True, **tables)
    return torch.stack([output.pooler_output, *(getattr(output, "deepstack_features", None) or ())])

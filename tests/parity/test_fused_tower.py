"""Tests that vision blocks with few large operations compute the same features as the operations they replace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from family_rows_qwen_vl import VISION2, VISION3, VISION25
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
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

from modalities.families.causal_lm.projection import NativeProjection
from modalities.families.qwen_vl.towers import FusedVisionBlock, attend_within, fused_tower

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


def features_of(tower: Any, grids: list[tuple[int, int, int]], dtype: torch.dtype) -> torch.Tensor:
    """Returns every level that the tower computes, `(num_levels, num_tokens, hidden)`."""
    width = 3 * tower.config.temporal_patch_size * tower.config.patch_size**2
    grid = torch.tensor(grids)
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randn((int(grid.prod(-1).sum()), width), generator=generator).bfloat16().to(dtype)
    with torch.inference_mode():
        output = tower(pixels, grid_thw=grid, return_dict=True)
    return torch.stack([output.pooler_output, *(getattr(output, "deepstack_features", None) or ())])


@pytest.mark.parametrize("name", TOWERS)
def test_the_same_features_in_single_precision(name: str) -> None:
    tower = tower_of(name, torch.float32)
    expected = features_of(copy.deepcopy(tower), GRIDS, torch.float32)
    assert fused_tower(tower) is tower
    assert all(isinstance(block, FusedVisionBlock) for block in tower.blocks)
    found = features_of(tower, GRIDS, torch.float32)
    assert expected.abs().mean() > 0.1
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", TOWERS)
def test_half_precision_is_no_further_from_the_truth(name: str) -> None:
    """The truth is what the same weights compute in single precision."""
    tower = tower_of(name, torch.bfloat16)
    truth = features_of(copy.deepcopy(tower).float(), GRIDS, torch.float32)
    theirs = features_of(copy.deepcopy(tower), GRIDS, torch.bfloat16)
    ours = features_of(fused_tower(tower), GRIDS, torch.bfloat16)
    assert ours.dtype == torch.bfloat16
    error, allowed = ((each.float() - truth).square().mean().sqrt().item() for each in (ours, theirs))
    assert error <= 1.25 * allowed + 1e-3


def test_products_of_a_wide_tower_are_those_in_c() -> None:
    tower = fused_tower(tower_of("qwen2.5-vl wide", torch.float32))
    kinds = {type(each) for each in (tower.blocks[0].attention.inputs, tower.blocks[0].mlp.up, tower.merger.mlp[0])}
    assert kinds == {NativeProjection}


def test_blocks_that_are_not_known_stay_as_they_are() -> None:
    tower = tower_of("qwen2.5-vl", torch.float32)
    other = type("SomeVisionBlock", (nn.Identity,), {})()
    tower.blocks[1] = other
    fused_tower(tower)
    assert [isinstance(block, FusedVisionBlock) for block in tower.blocks] == [True, False, True]
    assert tower.blocks[1] is other


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=8), st.integers(1, 3))
def test_segments_attend_to_themselves_alone(lengths: list[int], num_heads: int) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    q, k, v = torch.randn((3, sum(lengths), num_heads, 8), generator=generator).unbind(0)
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
    scores = scores.masked_fill(segment[:, None] != segment, float("-inf"))
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    torch.testing.assert_close(attend_within(q, k, v, lengths, 0.3), expected, atol=1e-5, rtol=1e-5)

"""Tests that vision blocks with few large operations compute the same features as the operations they replace."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from vision_towers import GRIDS, TOWERS, features_of, tower_of

from modalities.families.causal_lm.projection import NativeProjection
from modalities.families.qwen_vl.towers import FusedVisionBlock, fused_tower


@pytest.mark.parametrize("name", TOWERS)
def test_the_same_features_in_single_precision(name: str) -> None:
    tower = tower_of(name, torch.float32)
    expected = features_of(copy.deepcopy(tower), GRIDS, torch.float32)
    assert fused_tower(tower) is tower
    assert all(isinstance(block, FusedVisionBlock) for block in tower.blocks)
    found = features_of(tower, GRIDS, torch.float32, has_tables=True)
    assert expected.abs().mean() > 0.1
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", TOWERS)
def test_half_precision_is_no_further_from_the_truth(name: str) -> None:
    """The truth is what the same weights compute in single precision."""
    tower = tower_of(name, torch.bfloat16)
    truth = features_of(copy.deepcopy(tower).float(), GRIDS, torch.float32)
    theirs = features_of(copy.deepcopy(tower), GRIDS, torch.bfloat16)
    ours = features_of(fused_tower(tower), GRIDS, torch.bfloat16, has_tables=True)
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

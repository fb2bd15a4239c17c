"""Tests the Qwen vision families' config files: what is read, and what is refused before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from modalities_files import PREPROCESSOR, write_config

from fabric.contracts import ConfigError, UnsupportedModality
from modalities.family import Family, ImageHeader, ModelShape
from modalities.registry import REGISTRY

TEXT = {
    "vocab_size": 200,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
SHAPE = ModelShape(64, 1, 4, 2, 16, 200, 4096)
QWEN2_VL, QWEN2_5_VL = "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"
QWEN3_VL, QWEN2_5_OMNI = "Qwen3VLForConditionalGeneration", "Qwen2_5OmniThinkerForConditionalGeneration"
ALL = (QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN2_5_OMNI)


def family(tmp_path: Path, architecture: str, text: dict[str, Any] | None = None, **other: Any) -> Family:
    vision = {"hidden_size": 64} if architecture == QWEN2_VL else {"out_hidden_size": 64, "hidden_size": 32}
    if architecture == QWEN3_VL:
        vision["deepstack_visual_indexes"] = [1]
    audio = {"audio_config": {"output_dim": 64, "num_mel_bins": 16}} if architecture == QWEN2_5_OMNI else {}
    config = {
        **audio,
        "architectures": [architecture],
        "text_config": TEXT | (text or {}),
        "vision_config": vision | other.pop("vision", {}),
        **other,
    }
    patch_size = 16 if architecture == QWEN3_VL else 14
    return REGISTRY.load_family(write_config(tmp_path, config, PREPROCESSOR | {"patch_size": patch_size}))


def test_shapes(tmp_path: Path) -> None:
    for index, architecture in enumerate((QWEN2_VL, QWEN2_5_VL, QWEN2_5_OMNI)):
        assert family(tmp_path / str(index), architecture).shape == SHAPE
    assert family(tmp_path / "3", QWEN3_VL, {"head_dim": 24}).shape == SHAPE._replace(num_levels=2, head_dim=24)
    # Unlike its siblings, Qwen3-VL does not derive the size of a head.
    assert family(tmp_path / "4", QWEN3_VL).shape.head_dim == 128
    assert family(tmp_path / "5", QWEN2_VL, {"num_key_value_heads": None}).shape.num_kv_heads == 4


@pytest.mark.parametrize("architecture", [QWEN2_VL, QWEN2_5_VL])
def test_the_text_model_at_the_top(tmp_path: Path, architecture: str) -> None:
    assert family(tmp_path, architecture, **TEXT, text_config=None).shape == SHAPE


@pytest.mark.parametrize("architecture", [QWEN3_VL, QWEN2_5_OMNI])
def test_the_text_model_has_a_section(tmp_path: Path, architecture: str) -> None:
    with pytest.raises(ConfigError, match="text_config"):
        family(tmp_path, architecture, **TEXT, text_config=None)


@pytest.mark.parametrize("architecture", ALL)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 3}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"is_causal": False}, "bidirectional"),
        ({"rope_scaling": {"type": "dynamic"}}, "dynamic"),
        ({"hidden_size": 128}, "hidden_size"),
    ],
)
def test_what_the_engine_can_not_do_is_refused(
    tmp_path: Path, architecture: str, text: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        family(tmp_path, architecture, text)


@pytest.mark.parametrize("architecture", [QWEN2_VL, QWEN2_5_VL, QWEN2_5_OMNI])
@pytest.mark.parametrize(
    "text",
    [
        {"sliding_window": 128},
        {"sliding_window": 128, "use_sliding_window": False, "max_window_layers": 1},
        {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 4},
        {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0},
    ],
)
def test_windows_that_no_layer_uses_are_fine(tmp_path: Path, architecture: str, text: dict[str, Any]) -> None:
    assert family(tmp_path, architecture, text).shape == SHAPE


@pytest.mark.parametrize("architecture", ALL)
def test_towers_that_do_not_fit_the_preprocessor_are_refused(tmp_path: Path, architecture: str) -> None:
    for key in ("patch_size", "spatial_merge_size", "temporal_patch_size"):
        with pytest.raises(ConfigError, match=key):
            family(tmp_path, architecture, vision={key: 3})


def test_more_levels_than_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="DeepStack"):
        family(tmp_path, QWEN3_VL, vision={"deepstack_visual_indexes": [0, 1, 2, 3, 4]})


def test_the_token_of_a_picture(tmp_path: Path) -> None:
    for index, (architecture, key) in enumerate(
        ((QWEN2_VL, "image_token_id"), (QWEN2_5_OMNI, "image_token_index"), (QWEN2_5_OMNI, "image_token_id"))
    ):
        loaded = family(tmp_path / str(index), architecture, **{key: 7})
        plan = loaded.plan(ImageHeader("PNG", 56, 84, "RGB"))
        assert loaded.expand([1, 7, 2], [plan]).token_ids == [1, *[7] * sum(plan.unit_tokens), 2]


@pytest.mark.parametrize(
    ("architecture", "grid"), [(QWEN2_VL, (1, 14, 22)), (QWEN2_5_OMNI, (1, 14, 22)), (QWEN3_VL, (1, 12, 18))]
)
def test_plans(tmp_path: Path, architecture: str, grid: tuple[int, int, int]) -> None:
    loaded = family(tmp_path, architecture)
    plan = loaded.plan(ImageHeader("PNG", 300, 200, "RGB"))
    assert plan.grid == grid
    assert plan.unit_tokens == (grid[1] * grid[2] // 4,)
    with pytest.raises(UnsupportedModality, match="smell"):
        loaded.placeholder_text("smell")


def test_the_pure_half_imports_no_torch(tmp_path: Path) -> None:
    family(tmp_path, QWEN2_5_VL)
    load = f"REGISTRY.load_family(pathlib.Path({str(tmp_path)!r}))"
    code = f"import sys, pathlib; from modalities.registry import REGISTRY; {load}"
    show = "; print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code + show], check=True, capture_output=True, text=True)
    assert found.stdout == "[]\n"

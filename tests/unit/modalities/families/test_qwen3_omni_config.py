"""Tests Qwen3-Omni's config files: both layouts, the defaults, and what is refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from modalities_files import PREPROCESSOR, TEXT_CONFIG, TOKENS, encode, picture, thinker_config, write_config

from fabric.contracts import ConfigError, InvalidMedia, MediaItem, MmHash
from modalities.families.qwen3_omni import Qwen3OmniFamily
from modalities.family import ImageHeader, ModelShape
from modalities.registry import REGISTRY

SHAPE = ModelShape(64, 4, 4, 2, 16, 200, 4096)


def test_thinker_alone_and_whole_model_read_the_same(tmp_path: Path) -> None:
    thinker = thinker_config()
    whole = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "thinker_config": thinker}
    first = REGISTRY.load_family(write_config(tmp_path / "a", thinker))
    second = REGISTRY.load_family(write_config(tmp_path / "b", whole))
    assert first.shape == second.shape == SHAPE
    assert first.options("image") == second.options("image")
    assert isinstance(first, Qwen3OmniFamily)
    assert isinstance(second, Qwen3OmniFamily)
    assert (first.config.is_thinker_only, second.config.is_thinker_only) == (True, False)
    assert first.config.image_token_id == second.config.image_token_id == TOKENS["image_token_id"]
    assert first.model_id != second.model_id


def test_the_head_size_follows_from_the_heads(tmp_path: Path) -> None:
    config = thinker_config()
    del config["text_config"]["head_dim"]
    assert Qwen3OmniFamily(write_config(tmp_path, config)).shape.head_dim == 64 // 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"sliding_window": 128}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"is_causal": False}, "bidirectional"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "dynamic"),
        ({"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"hidden_size": 128}, "out_hidden_size"),
        ({"num_hidden_layers": 2}, "DeepStack"),
    ],
)
def test_what_the_engine_can_not_do_is_refused(tmp_path: Path, text: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Qwen3OmniFamily(write_config(tmp_path, thinker_config(text)))


def test_full_attention_by_name_is_fine(tmp_path: Path) -> None:
    text = {"layer_types": ["full_attention"] * 4, "sliding_window": 128, "use_sliding_window": False}
    assert Qwen3OmniFamily(write_config(tmp_path, thinker_config(text))).shape == SHAPE


@pytest.mark.parametrize("section", ["text_config", "vision_config"])
def test_missing_sections_are_named(tmp_path: Path, section: str) -> None:
    config = thinker_config()
    del config[section]
    with pytest.raises(ConfigError, match=section):
        Qwen3OmniFamily(write_config(tmp_path, config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 14}, "patch_size"),
        ({"merge_size": 1}, "spatial_merge_size"),
        ({"temporal_patch_size": 1}, "temporal_patch_size"),
        ({"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor"),
        ({"do_resize": False}, "must resize"),
        ({"image_mean": [0.5]}, "broken"),
        ({"max_pixels": "many"}, "broken"),
    ],
)
def test_preprocessors_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Qwen3OmniFamily(write_config(tmp_path, thinker_config(), PREPROCESSOR | change))


def test_a_missing_preprocessor_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, thinker_config())
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        Qwen3OmniFamily(tmp_path)


def test_pixel_limits_old_and_new(tmp_path: Path) -> None:
    legacy = {k: v for k, v in PREPROCESSOR.items() if k != "size"} | {"min_pixels": 1024, "max_pixels": 4096}
    image = Qwen3OmniFamily(write_config(tmp_path, thinker_config(), legacy)).config.image
    assert (image.min_pixels, image.max_pixels) == (1024, 4096)
    image = Qwen3OmniFamily(write_config(tmp_path, thinker_config(), PREPROCESSOR | {"min_pixels": 1024})).config.image
    assert (image.min_pixels, image.max_pixels) == (1024, 256 * 256)


def test_the_nested_processor_config_comes_first(tmp_path: Path) -> None:
    write_config(tmp_path, thinker_config())
    nested = {"image_processor": PREPROCESSOR | {"max_pixels": 8192}, "processor_class": "Qwen3OmniMoeProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert Qwen3OmniFamily(tmp_path).config.image.max_pixels == 8192
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3OmniMoeProcessor"}))
    assert Qwen3OmniFamily(tmp_path).config.image.max_pixels == 256 * 256


@pytest.fixture
def family(tmp_path: Path) -> Qwen3OmniFamily:
    return Qwen3OmniFamily(write_config(tmp_path, thinker_config()))


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [
        (64, 64, (1, 4, 4)),
        (1, 1, (1, 4, 4)),
        (256, 256, (1, 16, 16)),
        (2560, 2560, (1, 16, 16)),
        (300, 200, (1, 12, 18)),
        (48, 80, (1, 4, 4)),  # Both 1.5 and 2.5 round to even.
        (1000, 5, (1, 2, 58)),
    ],
)
def test_plans_of_known_sizes(family: Qwen3OmniFamily, width: int, height: int, grid: tuple[int, int, int]) -> None:
    plan = family.plan(ImageHeader("PNG", width, height, "RGB"))
    assert plan.grid == grid
    assert plan.cost == grid[1] * grid[2]
    assert plan.unit_tokens == (grid[1] * grid[2] // 4,)
    assert plan.geometry == (width, height)


def item(grid: tuple[int, int, int], *unit_tokens: int) -> MediaItem:
    return MediaItem(0, "image", MmHash("0" * 32), grid, unit_tokens, 1, "messages.0.content.1")


def test_a_picture_that_is_not_what_was_planned_is_refused(family: Qwen3OmniFamily) -> None:
    data = encode(picture(300, 200))
    (unit,) = family.preprocess(data, item((1, 12, 18), 54))
    assert (unit.modality, unit.grid, unit.pixels.shape) == ("image", (1, 12, 18), (216, 3 * 2 * 16 * 16))
    for wrong in (item((1, 18, 12), 54), item((1, 12, 18), 53), item((1, 12, 18), 27, 27)):
        with pytest.raises(InvalidMedia, match=r"messages\.0\.content\.1") as caught:
            family.preprocess(data, wrong)
        assert caught.value.param == "messages.0.content.1"


def test_a_truncated_picture_is_refused(family: Qwen3OmniFamily) -> None:
    data = encode(picture(300, 200))
    for size in (100, len(data) // 2, len(data) * 9 // 10):
        with pytest.raises(InvalidMedia, match="truncated") as caught:
            family.preprocess(data[:size], item((1, 12, 18), 54))
        assert caught.value.param == "messages.0.content.1"


def test_the_shape_counts_what_the_config_says() -> None:
    assert TEXT_CONFIG["num_hidden_layers"] == SHAPE.num_layers

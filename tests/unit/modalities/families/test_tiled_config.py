"""Tests the config files of text models and of families on tiles: what is refused before anything is loaded, plans of
known sizes, and what is part of a picture's identity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from modalities_files import encode, picture

from fabric.contracts import ConfigError, InvalidMedia, InvalidRequest, MediaItem, MmHash, UnsupportedModality
from modalities.family import Family, ImageHeader, ModelShape
from modalities.registry import REGISTRY

TEXT = {
    "model_type": "qwen2",
    "vocab_size": 120,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
SHAPE = ModelShape(48, 1, 3, 2, 12, 120, 2048)
SQUARE = {"height": 28, "width": 28}
CANVASES = [[28, 28], [28, 56], [56, 28], [56, 56]]


def llava(**change: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the contents of config.json and preprocessor_config.json."""
    vision = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 7}
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": TEXT, "vision_config": vision}
    processor = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}, "crop_size": SQUARE}
    return config | {"image_token_index": 100}, processor | change


def onevision(**change: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    vision = {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 7}
    config = {"architectures": ["LlavaOnevisionForConditionalGeneration"], "text_config": TEXT, "vision_config": vision}
    config |= {"image_token_index": 100, "image_grid_pinpoints": CANVASES, "vision_aspect_ratio": "anyres_max_2"}
    processor = {"image_processor_type": "LlavaOnevisionImageProcessor", "size": SQUARE}
    return config, processor | {"image_grid_pinpoints": CANVASES} | change


def internvl(**change: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    vision = {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [7, 7]}
    config = {"architectures": ["InternVLForConditionalGeneration"], "text_config": TEXT, "vision_config": vision}
    processor = {"image_processor_type": "GotOcr2ImageProcessorFast", "size": SQUARE, "max_patches": 6}
    return config | {"image_token_id": 100}, processor | change


def load(directory: Path, files: tuple[dict[str, Any], dict[str, Any]], **change: Any) -> Family:
    config, processor = files
    (directory / "config.json").write_text(json.dumps(config | change))
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    tokens = [{"id": 101, "content": "<img>"}, {"id": 102, "content": "</img>"}]
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    return REGISTRY.load_family(directory)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"model_type": "gemma2"}, "gemma2"),
        ({"model_type": None}, "None"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"is_causal": False}, "bidirectional"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
        ({"add_cross_attention": True}, "cross attention"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"rope_parameters": "linear"}, "must be an object"),
        ({"hidden_size": "many"}, "broken"),
        ({"num_attention_heads": 0}, "broken"),
    ],
)
def test_text_models_that_the_engine_can_not_run_are_refused(
    tmp_path: Path, text: dict[str, Any], message: str
) -> None:
    alone = {"architectures": ["Qwen2ForCausalLM"], **TEXT, **text}
    (tmp_path / "config.json").write_text(json.dumps(alone))
    with pytest.raises(ConfigError, match=message):
        REGISTRY.load_family(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, llava(), text_config=TEXT | text)


@pytest.mark.parametrize(
    "text",
    [
        {},
        {"sliding_window": 64},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
        {"layer_types": ["full_attention"] * 3, "use_sliding_window": True},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    ],
)
def test_a_window_that_no_layer_uses_is_fine(tmp_path: Path, text: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], **TEXT, **text}))
    assert REGISTRY.load_family(tmp_path).shape == SHAPE


@pytest.mark.parametrize(("kind", "head_dim"), [("llama", 12), ("qwen2", 12), ("qwen3", 128)])
def test_the_head_size_follows_the_kind(tmp_path: Path, kind: str, head_dim: int) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **TEXT, "model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert REGISTRY.load_family(tmp_path).shape == SHAPE._replace(head_dim=head_dim)


def test_a_text_model_takes_no_media(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **TEXT}))
    family = REGISTRY.load_family(tmp_path)
    assert family.max_items == {}
    expanded = family.expand([1, 2, 100], [])
    assert (expanded.token_ids, expanded.placeholders) == ([1, 2, 100], ())
    positions = family.positions([1, 2, 100], (), ())
    assert (positions.ids.tolist(), positions.delta) == ([[0, 1, 2]], 0)
    header = ImageHeader("PNG", 28, 28, "RGB")
    item = MediaItem(0, "image", MmHash("0" * 32), (1, 4, 4), (16,), 16, "p")
    for call in (
        lambda: family.plan(header),
        lambda: family.options("image"),
        lambda: family.placeholder_text("image"),
        lambda: family.preprocess(b"", item),
    ):
        with pytest.raises(UnsupportedModality):
            call()
    with pytest.raises(ConfigError, match="without encoders"):
        family.load_encoder(tmp_path, "cpu", "float32", ["image"])
    other = load(tmp_path, llava())
    with pytest.raises(InvalidRequest, match="1 media items"):
        family.expand([1], [other.plan(header)])


@pytest.mark.parametrize(
    ("files", "config", "message"),
    [
        (llava(do_center_crop=False), {}, "crop the centre"),
        (llava(do_pad=True), {}, "crop the centre"),
        (llava(crop_size={"height": 28, "width": 14}), {}, "crop_size must be a square"),
        (llava(crop_size=14), {}, "crops to 14"),
        (llava(size=14), {}, "scales to 14"),
        (llava(do_resize=False), {}, "must resize"),
        (llava(image_mean=[0.5]), {}, "broken"),
        (llava(image_processor_type="PixtralImageProcessor"), {}, "PixtralImageProcessor"),
        (llava(), {"vision_config": {"model_type": "pixtral"}}, "pixtral"),
        (llava(), {"vision_config": None}, "vision_config"),
        (llava(), {"text_config": None}, "text_config"),
        (llava(), {"vision_feature_select_strategy": "some"}, "some"),
        (onevision(size={"height": 14, "width": 14}), {}, "28x28 pixels, but its processor makes 14x14"),
        (onevision(crop_size=SQUARE), {}, "must not crop"),
        (onevision(image_grid_pinpoints=[[28, 28]]), {}, "differ"),
        (onevision(image_grid_pinpoints=[[28, 30]]), {"image_grid_pinpoints": [[28, 30]]}, "multiples of 28"),
        (onevision(image_grid_pinpoints=[28]), {"image_grid_pinpoints": [28]}, "list of pairs"),
        (onevision(), {"vision_aspect_ratio": "square"}, "square"),
        (onevision(), {"vision_feature_select_strategy": "default"}, "full"),
        (internvl(size=14), {}, "28x28 pixels, but its processor makes 14x14"),
        (internvl(), {"downsample_ratio": 0.3}, "4 patches of a side"),
        (internvl(), {"vision_feature_select_strategy": "full"}, "class token"),
        (internvl(), {"vision_feature_layer": [1, 2]}, "one layer"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, files: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, files, **config)


def test_internvl_needs_its_marks(tmp_path: Path) -> None:
    load(tmp_path, internvl())
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 101, "content": "<img>"}]}))
    with pytest.raises(ConfigError, match="lacks </img>"):
        REGISTRY.load_family(tmp_path)


@pytest.mark.parametrize(
    ("files", "size", "num_tiles", "num_tokens"),
    [
        (llava(), (28, 28), 1, 16),
        (llava(), (2000, 10), 1, 16),
        (internvl(), (28, 28), 1, 4),
        (internvl(), (56, 28), 3, 12),
        (internvl(), (57, 28), 3, 12),
        (internvl(), (300, 200), 7, 28),
        (onevision(), (28, 28), 2, 16 + 4 * (4 + 1)),
        (onevision(), (56, 28), 3, 16 + 4 * (8 + 1)),
        # A canvas of 2 x 2 tiles has 8 x 8 patches, which is too many for twice 16; so 5 x 5 are left, with a newline
        # behind each 5.
        (onevision(), (56, 56), 5, 16 + 5 * (5 + 1)),
        # Two rows of the canvas above and below are padding.
        (onevision(), (56, 14), 3, 16 + 2 * (8 + 1)),
    ],
)
def test_plans_of_known_sizes(
    tmp_path: Path, files: Any, size: tuple[int, int], num_tiles: int, num_tokens: int
) -> None:
    family = load(tmp_path, files)
    plan = family.plan(ImageHeader("PNG", *size, "RGB"))
    assert (plan.modality, plan.grid, plan.cost) == ("image", (num_tiles, 4, 4), num_tiles * 16)
    assert (plan.unit_tokens, plan.geometry) == ((num_tokens,), size)
    data = encode(picture(*size))
    item = MediaItem(0, "image", MmHash("0" * 32), plan.grid, plan.unit_tokens, plan.cost, "p")
    (unit,) = family.preprocess(data, item)
    assert unit.pixels.shape == (num_tiles, 3, 28, 28)
    assert (unit.num_patches, unit.grid, unit.geometry) == (plan.cost, plan.grid, size)


def test_a_line_is_refused(tmp_path: Path) -> None:
    """LLaVA's processor would scale such a picture before it crops it."""
    with pytest.raises(InvalidMedia, match="aspect ratio"):
        load(tmp_path, llava()).plan(ImageHeader("PNG", 2010, 10, "RGB"))


@pytest.mark.parametrize(
    ("files", "changed"),
    [
        (llava(), llava(size={"shortest_edge": 30})),
        (internvl(), internvl(max_patches=7)),
        (onevision(), onevision(image_std=[0.5, 0.5, 0.5])),
    ],
)
def test_other_processing_is_another_identity(tmp_path: Path, files: Any, changed: Any) -> None:
    assert load(tmp_path, files).options("image") == load(tmp_path, files).options("image")
    assert load(tmp_path, files).options("image") != load(tmp_path, changed).options("image")


def test_placeholders_and_other_modalities(tmp_path: Path) -> None:
    family = load(tmp_path, internvl())
    assert family.placeholder_text("image") == "<IMG_CONTEXT>"
    for call in (family.placeholder_text, family.options):
        with pytest.raises(UnsupportedModality, match="video"):
            call("video")
    with pytest.raises(UnsupportedModality, match="video"):
        family.load_encoder(tmp_path, "cpu", "float32", ["image", "video"])
    assert load(tmp_path, llava()).placeholder_text("image") == "<image>"

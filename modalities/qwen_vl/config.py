"""config.json of a Qwen vision family, read as plain JSON: neither torch nor transformers is imported.

What Weft can't run is refused here, so every part of the cluster refuses it at start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric.errors import ConfigError
from modalities.causal_lm.config import refuse_unsupported, shape_of
from modalities.family import ModelShape
from modalities.json_files import model_id, read_json, section
from modalities.qwen_vl.image_options import ImageOptions, read_image_options


@dataclass(frozen=True, slots=True)
class Layout:
    """What sets one family apart from its siblings in config.json. Defaults are transformers 5.23's."""

    name: str
    image_placeholder: str
    """What the chat template writes for a picture; one token."""
    text_defaults: Mapping[str, Any]
    """Missing keys of the text model."""
    vision_defaults: Mapping[str, Any]
    """Missing keys of the vision tower, patch and merge sizes always among them."""
    feature_size_key: str = "out_hidden_size"
    """Of the vision config: the width of a feature."""
    image_token_key: str = "image_token_id"
    whole_architectures: tuple[str, ...] = ()
    """A checkpoint of one of these holds the family as its `thinker_config`, beside other parts."""
    is_text_flat: bool = False
    """Older checkpoints have no `text_config`: its keys stand at the top."""


@dataclass(frozen=True, slots=True)
class QwenVLConfig:
    model_id: str
    is_thinker_only: bool
    """Otherwise the model is a part of a checkpoint with talker and vocoder."""
    shape: ModelShape
    image_token_id: int
    num_deepstack_levels: int
    image: ImageOptions


def read_config(model_dir: Path, layout: Layout) -> QwenVLConfig:
    """Raises ConfigError for missing or broken files and for what Weft can't run."""
    raw, config = read_json(model_dir / "config.json")
    is_thinker_only = set(layout.whole_architectures).isdisjoint(config.get("architectures") or ())
    model = config if is_thinker_only else section(config, "thinker_config")
    text = _with_defaults(_text_section(model, layout), layout.text_defaults)
    vision = _with_defaults(section(model, "vision_config"), layout.vision_defaults)
    refuse_unsupported(text)
    image = read_image_options(model_dir)
    for key, mine in (
        ("patch_size", image.patch_size),
        ("spatial_merge_size", image.merge_size),
        ("temporal_patch_size", image.temporal_patch_size),
    ):
        if vision[key] != mine:
            raise ConfigError(f"vision_config.{key} is {vision[key]}, the preprocessor's is {mine}")
    levels = vision.get("deepstack_visual_indexes", ())
    shape = shape_of(text, num_levels=1 + len(levels))
    if vision[layout.feature_size_key] != shape.hidden_size:
        raise ConfigError(f"vision_config.{layout.feature_size_key} is not the text model's hidden_size")
    if len(levels) > shape.num_layers:
        raise ConfigError(f"{len(levels)} DeepStack levels for {shape.num_layers} layers")
    return QwenVLConfig(
        model_id=model_id(model_dir, raw),
        is_thinker_only=is_thinker_only,
        shape=shape,
        image_token_id=int(model.get(layout.image_token_key, model.get("image_token_id", 151655))),
        num_deepstack_levels=len(levels),
        image=image,
    )


def _text_section(model: Mapping[str, Any], layout: Layout) -> Mapping[str, Any]:
    if layout.is_text_flat and model.get("text_config") is None:
        return model
    return section(model, "text_config")


def _with_defaults(found: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {**defaults, **found}

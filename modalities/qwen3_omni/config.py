"""Config files of a Qwen3-Omni checkpoint, read as plain JSON: neither torch nor transformers is imported.

Missing keys take the values that transformers 5.23 gives them. What Weft can't run is refused here, so every part of
the cluster refuses it at start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import blake3

from fabric.errors import ConfigError
from modalities.family import ModelShape

_FULL_ARCHITECTURE = "Qwen3OmniMoeForConditionalGeneration"
# Their frequencies follow the longest position of the batch, so one sequence would change another's result.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """How a picture becomes patches (transformers' Qwen2VLImageProcessor)."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    resample: int
    """Pillow's number of the filter."""
    rescale_factor: float | None
    mean: tuple[float, float, float] | None
    std: tuple[float, float, float] | None

    @property
    def factor(self) -> int:
        """Both sides of a resized image are multiples of it."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, slots=True)
class Qwen3OmniConfig:
    model_id: str
    is_thinker_only: bool
    """Otherwise the thinker is a part of a checkpoint with talker and code2wav."""
    shape: ModelShape
    image_token_id: int
    num_deepstack_levels: int
    image: ImageOptions


def read_config(model_dir: Path) -> Qwen3OmniConfig:
    """Raises ConfigError for missing or broken files and for what Weft can't run."""
    raw, config = _read_json(model_dir / "config.json")
    is_thinker_only = _FULL_ARCHITECTURE not in (config.get("architectures") or ())
    thinker = config if is_thinker_only else _section(config, "thinker_config")
    text, vision = _section(thinker, "text_config"), _section(thinker, "vision_config")
    _refuse_unsupported(text)
    image = _read_image_options(model_dir)
    for key, default, mine in (
        ("patch_size", 16, image.patch_size),
        ("spatial_merge_size", 2, image.merge_size),
        ("temporal_patch_size", 2, image.temporal_patch_size),
    ):
        if vision.get(key, default) != mine:
            raise ConfigError(f"vision_config.{key} is {vision.get(key, default)}, the preprocessor's is {mine}")
    levels = vision.get("deepstack_visual_indexes", (8, 16, 24))
    shape = _shape(text, num_levels=1 + len(levels))
    if vision.get("out_hidden_size", 3584) != shape.hidden_size:
        raise ConfigError("vision_config.out_hidden_size is not the text model's hidden_size")
    if len(levels) > shape.num_layers:
        raise ConfigError(f"{len(levels)} DeepStack levels for {shape.num_layers} layers")
    return Qwen3OmniConfig(
        model_id=f"{model_dir.resolve().name}@{blake3.blake3(raw).hexdigest(length=8)}",
        is_thinker_only=is_thinker_only,
        shape=shape,
        image_token_id=int(thinker.get("image_token_id", 151655)),
        num_deepstack_levels=len(levels),
        image=image,
    )


def _shape(text: Mapping[str, Any], num_levels: int) -> ModelShape:
    hidden_size, num_heads = text.get("hidden_size", 2048), text.get("num_attention_heads", 28)
    return ModelShape(
        hidden_size=hidden_size,
        num_levels=num_levels,
        num_layers=text.get("num_hidden_layers", 28),
        num_kv_heads=text.get("num_key_value_heads", 4),
        head_dim=text.get("head_dim") or hidden_size // num_heads,
        vocab_size=text.get("vocab_size", 3584),
        max_model_len=text.get("max_position_embeddings", 32768),
    )


def _refuse_unsupported(text: Mapping[str, Any]) -> None:
    """Weft's paged attention is causal and full; without a mask function anything else would silently become that."""
    if text.get("sliding_window") is not None and text.get("use_sliding_window", True):
        raise ConfigError(f"sliding-window attention ({text['sliding_window']}) is not supported")
    other = sorted({str(kind) for kind in text.get("layer_types") or ()} - {"full_attention"})
    if other:
        raise ConfigError(f"attention layers of type {', '.join(other)} are not supported")
    if text.get("is_causal", True) is not True:
        raise ConfigError("bidirectional text attention is not supported")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in _BATCH_DEPENDENT_ROPE:
        raise ConfigError(f"rope type {kind!r} depends on the batch and is not supported")


def _read_image_options(model_dir: Path) -> ImageOptions:
    """From processor_config.json (nested) or preprocessor_config.json, in transformers' order."""
    options = _read_image_section(model_dir)
    kind = options.get("image_processor_type", "Qwen2VLImageProcessor")
    if not str(kind).startswith("Qwen2VLImageProcessor"):
        raise ConfigError(f"unsupported image processor {kind!r} in {model_dir}")
    if not options.get("do_resize", True) or not options.get("do_convert_rgb", True):
        raise ConfigError(f"the image processor of {model_dir} must resize and convert to RGB")
    size = options.get("size") or {}
    min_pixels = options.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    max_pixels = options.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    is_normalised = options.get("do_normalize", True)
    try:
        return ImageOptions(
            patch_size=int(options.get("patch_size", 14)),
            merge_size=int(options.get("merge_size", 2)),
            temporal_patch_size=int(options.get("temporal_patch_size", 2)),
            min_pixels=int(min_pixels),
            max_pixels=int(max_pixels),
            resample=int(options.get("resample", _BICUBIC)),
            rescale_factor=float(options.get("rescale_factor", 1 / 255)) if options.get("do_rescale", True) else None,
            mean=_channels(options.get("image_mean", _CLIP_MEAN)) if is_normalised else None,
            std=_channels(options.get("image_std", _CLIP_STD)) if is_normalised else None,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the image processor's config of {model_dir} is broken: {error}") from error


def _channels(values: Any) -> tuple[float, float, float]:
    red, green, blue = values
    return float(red), float(green), float(blue)


def _read_image_section(model_dir: Path) -> Mapping[str, Any]:
    processor_path = model_dir / "processor_config.json"
    if processor_path.exists():
        nested = _read_json(processor_path)[1].get("image_processor")
        if nested is not None:
            return cast(Mapping[str, Any], nested)
    return _read_json(model_dir / "preprocessor_config.json")[1]


def _read_json(path: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        raw = path.read_bytes()
        value = json.loads(raw)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return raw, value


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    if not isinstance(section, Mapping):
        raise ConfigError(f"config.json has no {name}")
    return section

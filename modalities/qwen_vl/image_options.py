"""Reads, as plain JSON, how a checkpoint wants its pictures cut (transformers' Qwen2VLImageProcessor).

Missing keys take the values that transformers 5.23 gives them. The module knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric.errors import ConfigError
from modalities.json_files import read_image_processor

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """Describes how a picture becomes patches (transformers' Qwen2VLImageProcessor)."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    resample: int
    """This is Pillow's number of the resize filter."""
    rescale_factor: float | None
    mean: tuple[float, float, float] | None
    std: tuple[float, float, float] | None

    @property
    def factor(self) -> int:
        """Both sides of a resized image are multiples of this number."""
        return self.patch_size * self.merge_size


def read_image_options(model_dir: Path) -> ImageOptions:
    """Reads the options from processor_config.json (nested) or preprocessor_config.json, in transformers' order. Raises
    ConfigError for missing or broken files and for another kind of image processor."""
    options = read_image_processor(model_dir)
    kind = options.get("image_processor_type", "Qwen2VLImageProcessor")
    if not str(kind).startswith("Qwen2VLImageProcessor"):
        raise ConfigError(f"unsupported image processor {kind!r} in {model_dir}")
    if not options.get("do_resize", True) or not options.get("do_convert_rgb", True):
        raise ConfigError(f"the image processor of {model_dir} must resize and convert to RGB")
    try:
        return pixel_options(options, 56 * 56, 28 * 28 * 1280)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the image processor's config of {model_dir} is broken: {error}") from error


def pixel_options(options: Mapping[str, Any], min_pixels: int, max_pixels: int) -> ImageOptions:
    """Returns the options of a processor's config; `min_pixels` and `max_pixels` hold where the config names none.
    Raises TypeError or ValueError for values of the wrong kind."""
    size = options.get("size") or {}
    is_normalised = options.get("do_normalize", True)
    return ImageOptions(
        patch_size=int(options.get("patch_size", 14)),
        merge_size=int(options.get("merge_size", 2)),
        temporal_patch_size=int(options.get("temporal_patch_size", 2)),
        min_pixels=int(options.get("min_pixels") or size.get("shortest_edge") or min_pixels),
        max_pixels=int(options.get("max_pixels") or size.get("longest_edge") or max_pixels),
        resample=int(options.get("resample", _BICUBIC)),
        rescale_factor=float(options.get("rescale_factor", 1 / 255)) if options.get("do_rescale", True) else None,
        mean=_channels(options.get("image_mean", _CLIP_MEAN)) if is_normalised else None,
        std=_channels(options.get("image_std", _CLIP_STD)) if is_normalised else None,
    )


def _channels(values: Any) -> tuple[float, float, float]:
    red, green, blue = values
    return float(red), float(green), float(blue)

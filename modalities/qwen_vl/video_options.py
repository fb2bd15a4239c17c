"""Reads, as plain JSON, how a checkpoint wants the frames of its videos chosen and cut (transformers' Qwen2VL- and
Qwen3VLVideoProcessor). Missing keys take the values that transformers 5.23 gives them. The module knows nothing of
models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fabric.errors import ConfigError
from modalities.json_files import read_video_processor
from modalities.qwen_vl.image_options import ImageOptions, pixel_options


class SizeRange(NamedTuple):
    """Holds the least and the largest number of pixels."""

    least: int
    most: int


class VideoDefaults(NamedTuple):
    """Holds what a family's video processor assumes where the checkpoint gives no value."""

    processor: str
    frame_pixels: SizeRange | None = None
    """The family's processor passes this range when it is called; it holds for checkpoints without a file for
    videos."""


@dataclass(frozen=True, slots=True)
class VideoOptions:
    """Describes how a video becomes patches (transformers' Qwen2VL- and Qwen3VLVideoProcessor)."""

    frame: ImageOptions
    """Describes how one frame is cut. Its range of pixels holds for one frame, or for all frames together
    (`is_budget_shared`)."""
    min_frames: int
    max_frames: int
    is_budget_shared: bool
    """Says whether frames x height x width together stay within the range of pixels, as in Qwen3-VL."""
    is_capped: bool
    """Says whether the pixels of a frame are capped (the key `cap_pixels_per_frame`)."""
    max_video_tokens: int
    """The cap on the pixels of a frame is derived from this number of tokens."""


class _Kind(NamedTuple):
    patch_size: int
    frame_pixels: SizeRange
    mean: tuple[float, float, float] | None
    is_budget_shared: bool
    max_video_tokens: int


_HALF = (0.5, 0.5, 0.5)
_KINDS = {
    "Qwen2VLVideoProcessor": _Kind(14, SizeRange(128 * 28 * 28, 768 * 28 * 28), None, False, 128_000),
    "Qwen3VLVideoProcessor": _Kind(16, SizeRange(128 * 32 * 32, 768 * 32 * 32), _HALF, True, 768),
}


def read_video_options(model_dir: Path, defaults: VideoDefaults) -> VideoOptions:
    """Reads the options of videos. Raises ConfigError for missing or broken files and for another kind of video
    processor."""
    found, is_own = read_video_processor(model_dir)
    name = str(found.get("video_processor_type", defaults.processor))
    kind = _KINDS.get(name.removesuffix("Fast"))
    if kind is None:
        raise ConfigError(f"unsupported video processor {name!r} in {model_dir}")
    if not found.get("do_resize", True) or not found.get("do_convert_rgb", True):
        raise ConfigError(f"the video processor of {model_dir} must resize and convert to RGB")
    frame_pixels = kind.frame_pixels
    if not is_own and defaults.frame_pixels is not None:
        frame_pixels = defaults.frame_pixels
        found = {key: value for key, value in found.items() if key not in ("size", "min_pixels", "max_pixels")}
    colours = {} if kind.mean is None else {"image_mean": kind.mean, "image_std": kind.mean}
    try:
        return VideoOptions(
            frame=pixel_options({"patch_size": kind.patch_size, **colours, **found}, *frame_pixels),
            min_frames=int(found.get("min_frames", 4)),
            max_frames=int(found.get("max_frames", 768)),
            is_budget_shared=kind.is_budget_shared,
            is_capped=bool(found.get("cap_pixels_per_frame", False)),
            max_video_tokens=int(found.get("max_video_tokens", kind.max_video_tokens)),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the video processor's config of {model_dir} is broken: {error}") from error

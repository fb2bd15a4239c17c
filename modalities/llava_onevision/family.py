"""Reads a LLaVA-OneVision checkpoint's config files and builds a family on tiles from them.

It knows nothing of weights.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fabric.errors import ConfigError
from modalities.family import EncoderModel, Family
from modalities.llava_onevision.tiling import AnyResolution
from modalities.tiled.config import ConfigFiles, read_pixel_options, read_tiled_config, square
from modalities.tiled.family import TiledFamily, Videos
from modalities.tiled.video import FrameTiling, read_frame_pixels

_VISION_DEFAULTS = {"model_type": "siglip_vision_model", "image_size": 224, "patch_size": 16}
_PROCESSORS = ("LlavaOnevisionImageProcessor",)
_STEPS = range(384, 2304 + 1, 384)
_DEFAULT_RESOLUTIONS = [[height, width] for height in _STEPS for width in _STEPS]


def load_family(model_dir: Path) -> Family:
    """Returns the family. It reads only config files. Raises ConfigError if Weft can't use them."""
    config, files = read_tiled_config(model_dir, ("image_token_index", 151646), _VISION_DEFAULTS, "qwen2")
    _refuse_unsupported(files, config.tile_size)
    aspect_ratio = re.fullmatch(r"anyres_max_(\d+)", str(files.model.get("vision_aspect_ratio", "anyres_max_9")))
    if aspect_ratio is None:
        raise ConfigError(f"vision_aspect_ratio {files.model['vision_aspect_ratio']!r} is not supported")
    tiling = AnyResolution(
        pixels=read_pixel_options(files.processor, _PROCESSORS),
        tile_size=config.tile_size,
        patches_per_side=config.patches_per_side,
        resolutions=_resolutions(files, config.tile_size),
        max_tiles_of_rows=int(aspect_ratio[1]),
    )
    frames = FrameTiling(
        pixels=read_frame_pixels(model_dir, config, "LlavaOnevisionVideoProcessor"),
        tile_size=config.tile_size,
        patches_per_side=config.patches_per_side,
        rows_per_frame=((config.patches_per_side + 1) // 2) ** 2,
        is_centred=False,
        has_newline=True,
    )
    token = int(files.model.get("video_token_index", files.model.get("video_token_id", 151647)))
    videos = Videos(frames, "<video>", token, token)
    return TiledFamily("llava_onevision", config, tiling, "<image>", _load_encoder, videos=videos)


def _refuse_unsupported(files: ConfigFiles, tile_size: int) -> None:
    if square(files.processor.get("size", 384), "size") != tile_size:
        raise ConfigError(f"the vision tower takes {tile_size} pixels, the processor's tiles are of another size")
    if files.processor.get("do_center_crop") or files.processor.get("crop_size"):
        raise ConfigError("the image processor must not crop tiles")
    if files.model.get("vision_feature_select_strategy", "full") != "full":
        raise ConfigError("a tower without class token needs vision_feature_select_strategy `full`")


def _resolutions(files: ConfigFiles, tile_size: int) -> tuple[tuple[int, int], ...]:
    """Returns the (height, width) of every canvas. Raises ConfigError for canvases that do not consist of whole tiles,
    and for canvases that model and image processor do not have in common."""
    ours: Any = files.model.get("image_grid_pinpoints") or _DEFAULT_RESOLUTIONS
    if ours != (files.processor.get("image_grid_pinpoints") or _DEFAULT_RESOLUTIONS):
        raise ConfigError("image_grid_pinpoints of model and image processor differ")
    try:
        found = tuple((int(height), int(width)) for height, width in ours)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"image_grid_pinpoints are broken: {error}") from error
    if not found or any(side < 1 or side % tile_size for resolution in found for side in resolution):
        raise ConfigError(f"image_grid_pinpoints must be some multiples of {tile_size}")
    return found


def _load_encoder(model_dir: Path, device: str, dtype: str) -> EncoderModel:
    from modalities.llava_onevision.encoder import load_encoder

    return load_encoder(model_dir, device, dtype)

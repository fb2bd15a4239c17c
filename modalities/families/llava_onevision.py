"""Implements LLaVA-OneVision: it takes text, images and videos and returns text.

A picture is scaled into the best of several fixed canvases, padded with black, and cut into tiles (`AnyResolution`).
The first tile is the whole picture, squeezed into one tile. The tiles equal those of transformers'
LlavaOnevisionImageProcessorPil, bit by bit. The number of rows follows from what the model does with the features of
the tiles: the features of padding are removed, and a newline follows each row of features. Each frame of a video is one
tile, whose features are scaled down to half. Every picture of a prompt is cut in the same way, as transformers'
processor does for a flat list of images. The rest of this module reads the checkpoint's config files and builds a
family on tiles from them.

It knows nothing of weights: `modalities.families.tiled.tile_encoders`, which imports torch, loads the encoder.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from fabric.contracts import ConfigError, InvalidMedia
from modalities.families.tiled.tiled_family import (
    ConfigFiles,
    Cut,
    FrameTiling,
    Halved,
    TiledFamily,
    Videos,
    check_tile_size,
    read_frame_pixels,
    read_pixel_options,
    read_tiled_config,
)
from modalities.family import EncoderModel, Family, FeaturesHeader, canonical_options
from modalities.media import normalise
from modalities.pixel_options import PixelOptions

ARCHITECTURES = ("LlavaOnevisionForConditionalGeneration",)
_VISION_DEFAULTS = {"model_type": "siglip_vision_model", "image_size": 224, "patch_size": 16}
_PROCESSORS = ("LlavaOnevisionImageProcessor",)
_STEPS = range(384, 2304 + 1, 384)
_DEFAULT_RESOLUTIONS = [[height, width] for height in _STEPS for width in _STEPS]


def load(model_dir: Path) -> Family:
    """Returns the family of the checkpoint in `model_dir`. It reads only config files. Raises ConfigError if Weft can't
    use them."""
    config, files = read_tiled_config(model_dir, ("image_token_index", 151646), _VISION_DEFAULTS, "qwen2")
    _refuse_unsupported(files, config.tile_size)
    aspect_ratio = re.fullmatch(r"anyres_max_(\d+)", str(files.model.get("vision_aspect_ratio", "anyres_max_9")))
    if aspect_ratio is None:
        raise ConfigError(
            f"vision_aspect_ratio must have the form `anyres_max_N`, not {files.model['vision_aspect_ratio']!r}"
        )
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
    check_tile_size(files.processor, tile_size)
    if files.processor.get("do_center_crop") or files.processor.get("crop_size"):
        raise ConfigError("the image processor must not crop tiles: do_center_crop and crop_size must not be set")
    if (strategy := files.model.get("vision_feature_select_strategy", "full")) != "full":
        raise ConfigError(
            f"the vision tower has no class token, so vision_feature_select_strategy must be `full`, not {strategy!r}"
        )


def _resolutions(files: ConfigFiles, tile_size: int) -> tuple[tuple[int, int], ...]:
    """Returns the (height, width) of every canvas. Raises ConfigError for canvases that do not consist of whole tiles,
    and for canvases that model and image processor do not have in common."""
    ours: Any = files.model.get("image_grid_pinpoints") or _DEFAULT_RESOLUTIONS
    if ours != (files.processor.get("image_grid_pinpoints") or _DEFAULT_RESOLUTIONS):
        raise ConfigError("the image_grid_pinpoints of the model differ from those of the image processor")
    try:
        found = tuple((int(height), int(width)) for height, width in ours)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"image_grid_pinpoints must be a list of pairs (height, width): {error}") from error
    if not found or any(side < 1 or side % tile_size for resolution in found for side in resolution):
        raise ConfigError(
            f"image_grid_pinpoints must be a list of pairs of positive multiples of {tile_size}, not {list(found)}"
        )
    return found


def _load_encoder(model_dir: Path, device: str, dtype: str) -> EncoderModel:
    from modalities.families.tiled.tile_encoders import load_llava_onevision_encoder

    return load_llava_onevision_encoder(model_dir, device, dtype)


# ------------------------------------------------------------ the cutting of pictures


@dataclass(frozen=True, slots=True)
class AnyResolution:
    """Implements `modalities.families.tiled.tiled_family.Tiling`."""

    pixels: PixelOptions
    tile_size: int
    patches_per_side: int
    resolutions: tuple[tuple[int, int], ...]
    """Holds the (height, width) of each canvas in the checkpoint's order: of equally good canvases the first is
    taken."""
    max_tiles_of_rows: int
    """Limits the features of the canvas: if it has more than 1.21 (1.1 squared) times the patches of this many tiles,
    its features are scaled down to about as many as these tiles have."""

    def cut(self, width: int, height: int) -> Cut:
        canvas_height, canvas_width = self.canvas(width, height)
        num_tiles = canvas_height // self.tile_size * (canvas_width // self.tile_size)
        num_rows, num_columns = self._shape_of_features(width, height, canvas_height, canvas_width)
        # A newline follows each row of features.
        return Cut(1 + num_tiles, self.patches_per_side**2 + num_rows * (num_columns + 1))

    def cut_of_features(self, header: FeaturesHeader) -> Cut:
        """Returns the cut of a picture of the size that the client states. Raises InvalidMedia if it states none."""
        if header.size is None:
            raise InvalidMedia("this model needs the size of the picture, in pixels (height, width): `image_sizes`")
        return self.cut(*header.size)

    def halved(self, width: int, height: int, times: int) -> Halved:
        """Returns this tiling with a smaller size, for which it then chooses a smaller canvas. Each side is that of the
        picture itself or of the picture on its canvas, the smaller of the two, halved `times` times."""
        shown = self._scaled_size(width, height, *self.canvas(width, height))
        size = (max(1, min(width, shown[0]) >> times), max(1, min(height, shown[1]) >> times))
        return Halved(self, size)

    def limited(self, max_pixels: int) -> AnyResolution:
        areas = {height * width for height, width in self.resolutions}
        most = max(max_pixels, min(areas))
        fitting = tuple(size for size in self.resolutions if size[0] * size[1] <= most)
        return dataclasses.replace(self, resolutions=fitting)

    def canvas(self, width: int, height: int) -> tuple[int, int]:
        """Returns the (height, width) of the canvas on which the picture keeps most of its pixels; of several, the one
        that wastes least."""
        best, most, least = self.resolutions[0], 0, math.inf
        for canvas_height, canvas_width in self.resolutions:
            scale = min(canvas_width / width, canvas_height / height)
            effective = min(int(width * scale) * int(height * scale), width * height)
            wasted = canvas_height * canvas_width - effective
            if effective > most or (effective == most and wasted < least):
                best, most, least = (canvas_height, canvas_width), effective, wasted
        return best

    def tiles(self, image: Image.Image) -> npt.NDArray[np.float32]:
        """Returns the whole picture, then the tiles of the canvas row by row. Their shape is
        `(1 + num_tiles, 3, tile_size, tile_size)`."""
        canvas_height, canvas_width = self.canvas(*image.size)
        size, resample = self.tile_size, self.pixels.resample
        scaled = image.resize(self._scaled_size(*image.size, canvas_height, canvas_width), resample=resample)
        canvas = np.zeros((canvas_height, canvas_width, 3), dtype=np.uint8)
        top, left = (canvas_height - scaled.height) // 2, (canvas_width - scaled.width) // 2
        canvas[top : top + scaled.height, left : left + scaled.width] = np.asarray(scaled)
        cut = canvas.reshape(canvas_height // size, size, canvas_width // size, size, 3).transpose(0, 2, 1, 3, 4)
        whole = np.asarray(image.resize((size, size), resample=resample))
        tiles = np.concatenate([whole[None], cut.reshape(-1, size, size, 3)])
        return normalise(tiles, self.pixels.normalisation)

    def options(self) -> str:
        return canonical_options(self)

    def _scaled_size(self, width: int, height: int, canvas_height: int, canvas_width: int) -> tuple[int, int]:
        """Returns the (width, height) of the picture on its canvas."""
        scale_width, scale_height = canvas_width / width, canvas_height / height
        if scale_width < scale_height:
            return canvas_width, min(math.ceil(height * scale_width), canvas_height)
        return min(math.ceil(width * scale_height), canvas_width), canvas_height

    def _shape_of_features(self, width: int, height: int, canvas_height: int, canvas_width: int) -> tuple[int, int]:
        """Returns the (rows, columns) of the canvas's patches that remain without padding, scaled down if there are too
        many. The order of operations is that of transformers' `unpad_image`, because the rounding depends on it."""
        num_rows = canvas_height // self.tile_size * self.patches_per_side
        num_columns = canvas_width // self.tile_size * self.patches_per_side
        if width / height > num_columns / num_rows:
            kept = int(round(height * (num_columns / width), 7))
            num_rows -= (num_rows - kept) // 2 * 2
        else:
            kept = int(round(width * (num_rows / height), 7))
            num_columns -= (num_columns - kept) // 2 * 2
        ratio = math.sqrt(num_rows * num_columns / (self.max_tiles_of_rows * self.patches_per_side**2))
        if ratio > 1.1:
            return int(num_rows // ratio), int(num_columns // ratio)
        return num_rows, num_columns

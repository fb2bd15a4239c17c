"""Implements LLaVA-1.5: it takes text and images and returns text.

A picture is one tile: it is scaled so that its shortest edge has the right length, and its centre is cut out
(`CentreCrop`). The result equals that of transformers' CLIPImageProcessorPil, bit by bit. The rest of this module reads
the checkpoint's config files and builds a family on tiles from them.

It knows nothing of weights: `modalities.families.tiled.tile_encoders`, which imports torch, loads the encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from fabric.contracts import ConfigError, InvalidMedia
from modalities.families.tiled.tiled_family import (
    Cut,
    Halved,
    TiledFamily,
    read_pixel_options,
    read_tiled_config,
    square,
)
from modalities.family import EncoderModel, Family, FeaturesHeader, canonical_options
from modalities.media import normalise
from modalities.pixel_options import PixelOptions

ARCHITECTURES = ("LlavaForConditionalGeneration",)
_VISION_DEFAULTS = {"model_type": "clip_vision_model", "image_size": 224, "patch_size": 32}
# Both scale the shortest edge and crop the centre. The second one could also pad; `_shortest_edge` refuses that.
_PROCESSORS = ("CLIPImageProcessor", "LlavaImageProcessor")


def load(model_dir: Path) -> Family:
    """Returns the family of the checkpoint in `model_dir`. It reads only config files. Raises ConfigError if Weft can't
    use them."""
    config, files = read_tiled_config(model_dir, ("image_token_index", 32000), _VISION_DEFAULTS, "llama")
    strategy = files.model.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise ConfigError(f"vision_feature_select_strategy must be `default` or `full`, not {strategy!r}")
    tiling = CentreCrop(
        pixels=read_pixel_options(files.processor, _PROCESSORS),
        shortest_edge=_shortest_edge(files.processor, config.tile_size),
        tile_size=config.tile_size,
        num_tokens=config.patches_per_side**2 + (strategy == "full"),  # "full" keeps the class token.
    )
    return TiledFamily("llava", config, tiling, "<image>", _load_encoder)


def _shortest_edge(processor: Mapping[str, Any], tile_size: int) -> int:
    """Returns the length to which the processor scales the shortest edge of a picture. Raises ConfigError for a
    processor whose pictures the vision tower does not take."""
    if not processor.get("do_center_crop", True) or processor.get("do_pad", False):
        raise ConfigError(
            "the image processor must crop the centre and must not pad: do_center_crop must be true, and do_pad false"
        )
    crop = square(processor.get("crop_size", 224), "crop_size")
    size = processor.get("size", 224)
    edge = square(size.get("shortest_edge") if isinstance(size, Mapping) else size, "size.shortest_edge")
    if crop != tile_size or edge < crop:
        raise ConfigError(
            f"the vision tower reads pictures of {tile_size}x{tile_size} pixels, but the image processor scales to "
            f"{edge} and crops to {crop} pixels"
        )
    return edge


def _load_encoder(model_dir: Path, device: str, dtype: str) -> EncoderModel:
    from modalities.families.tiled.tile_encoders import load_llava_encoder

    return load_llava_encoder(model_dir, device, dtype)


# ------------------------------------------------------------ the cutting of pictures

_MAX_ASPECT_RATIO = 200
"""Limits the aspect ratio of a picture. The reference scales before it crops, so without a limit a line of 100,000
pixels would become gigabytes."""


@dataclass(frozen=True, slots=True)
class CentreCrop:
    """Implements `modalities.families.tiled.tiled_family.Tiling` with one tile, which always has the same number of
    tokens."""

    pixels: PixelOptions
    shortest_edge: int
    tile_size: int
    num_tokens: int

    def cut(self, width: int, height: int) -> Cut:
        """Returns the one tile and its tokens. Raises InvalidMedia for an aspect ratio above 200."""
        if max(width, height) > _MAX_ASPECT_RATIO * min(width, height):
            raise InvalidMedia(f"the aspect ratio of {width}x{height} pixels is above the limit of {_MAX_ASPECT_RATIO}")
        return Cut(1, self.num_tokens)

    def halved(self, width: int, height: int, times: int) -> Halved:
        """Returns this tiling and the same size, because a picture can't have fewer than one tile."""
        return Halved(self, (width, height))

    def limited(self, max_pixels: int) -> CentreCrop:
        """Returns this tiling, because a picture can't have fewer than one tile."""
        return self

    def cut_of_features(self, header: FeaturesHeader) -> Cut:
        """Returns the one tile and its tokens."""
        return Cut(1, self.num_tokens)

    def tiles(self, image: Image.Image) -> npt.NDArray[np.float32]:
        """Scales and crops the picture. The result has shape `(1, 3, tile_size, tile_size)`."""
        width, height = image.size
        edge = self.shortest_edge
        size = (edge, int(edge * height / width)) if width <= height else (int(edge * width / height), edge)
        left, top = (size[0] - self.tile_size) // 2, (size[1] - self.tile_size) // 2
        scaled = image.resize(size, resample=self.pixels.resample)
        cropped = scaled.crop((left, top, left + self.tile_size, top + self.tile_size))
        return normalise(np.asarray(cropped)[None], self.pixels.normalisation)

    def options(self) -> str:
        return canonical_options(self)

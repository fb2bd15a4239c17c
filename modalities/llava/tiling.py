"""Scales a picture so that its shortest edge has the right length, and cuts out its centre.

The result equals that of transformers' CLIPImageProcessorPil, bit by bit. This module knows nothing of models or
torch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from fabric.errors import InvalidMedia
from modalities.pixels import normalise
from modalities.tiled.config import PixelOptions
from modalities.tiled.family import Cut, Halved

_MAX_ASPECT_RATIO = 200
"""Limits the aspect ratio of a picture. The reference scales before it crops, so without a limit a line of 100,000
pixels would become gigabytes."""


@dataclass(frozen=True, slots=True)
class CentreCrop:
    """Implements `modalities.tiled.family.Tiling` with one tile, which always has the same number of tokens."""

    pixels: PixelOptions
    shortest_edge: int
    tile_size: int
    num_tokens: int

    def cut(self, width: int, height: int) -> Cut:
        """Returns the one tile and its tokens. Raises InvalidMedia for an aspect ratio above 200."""
        if max(width, height) > _MAX_ASPECT_RATIO * min(width, height):
            raise InvalidMedia(f"{width}x{height} pixels: the aspect ratio is above {_MAX_ASPECT_RATIO}")
        return Cut(1, self.num_tokens)

    def halved(self, width: int, height: int, times: int) -> Halved:
        """Returns this tiling and the same size, because a picture can't have fewer than one tile."""
        return Halved(self, (width, height))

    def limited(self, max_pixels: int) -> CentreCrop:
        """Returns this tiling, because a picture can't have fewer than one tile."""
        return self

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
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

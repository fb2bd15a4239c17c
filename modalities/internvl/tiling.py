"""Cuts a picture into a grid of tiles and adds one tile of the whole picture.

The picture is scaled to the grid whose aspect ratio is nearest. The result equals that of transformers'
GotOcr2ImageProcessorPil, bit by bit. This module knows nothing of models or torch."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from modalities.pixels import normalise
from modalities.tiled.config import PixelOptions
from modalities.tiled.family import Cut, Halved


@dataclass(frozen=True, slots=True)
class GridOfTiles:
    """Implements `modalities.tiled.family.Tiling`."""

    pixels: PixelOptions
    tile_size: int
    tokens_per_tile: int
    min_tiles: int
    max_tiles: int

    def cut(self, width: int, height: int) -> Cut:
        num_columns, num_rows = self.grid(width, height)
        num_tiles = num_columns * num_rows
        num_tiles += num_tiles > 1  # One more tile shows the whole picture scaled down.
        return Cut(num_tiles, num_tiles * self.tokens_per_tile)

    def halved(self, width: int, height: int, times: int) -> Halved:
        """Returns a tiling with a quarter of the tiles for each halving. The picture keeps its size, because the
        aspect ratio and not the size determines the grid."""
        columns, rows = self.grid(width, height)
        fewer = max(1, self.min_tiles, columns * rows >> (2 * times))
        return Halved(dataclasses.replace(self, max_tiles=fewer), (width, height))

    def limited(self, max_pixels: int) -> GridOfTiles:
        most = max(1, self.min_tiles, max_pixels // self.tile_size**2)
        return dataclasses.replace(self, max_tiles=min(self.max_tiles, most))

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns the (columns, rows) of the grid whose aspect ratio is nearest. Of equally near grids it takes the
        larger one, unless the picture would have to grow to twice its area or more."""
        best, least = (1, 1), float("inf")
        for columns, rows in _grids(self.min_tiles, self.max_tiles):
            distance = abs(width / height - columns / rows)
            is_filled = width * height > 0.5 * self.tile_size * self.tile_size * columns * rows
            if distance < least or (distance == least and is_filled):
                best = (columns, rows)
            least = min(least, distance)
        return best

    def tiles(self, image: Image.Image) -> npt.NDArray[np.float32]:
        """Returns the tiles row by row and the whole picture last. Their shape is
        `(num_tiles, 3, tile_size, tile_size)`."""
        columns, rows = self.grid(*image.size)
        size, resample = self.tile_size, self.pixels.resample
        scaled = np.asarray(image.resize((columns * size, rows * size), resample=resample))
        cut = scaled.reshape(rows, size, columns, size, 3).transpose(0, 2, 1, 3, 4).reshape(-1, size, size, 3)
        if len(cut) > 1:
            cut = np.concatenate([cut, np.asarray(image.resize((size, size), resample=resample))[None]])
        return normalise(cut, self.pixels.normalisation)

    def options(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))


@functools.cache
def _grids(min_tiles: int, max_tiles: int) -> tuple[tuple[int, int], ...]:
    """Returns the (columns, rows) of every grid within the limits. They are ordered by number of tiles, then by number
    of columns."""
    sides = range(1, max_tiles + 1)
    found = [(columns, rows) for columns in sides for rows in sides if min_tiles <= columns * rows <= max_tiles]
    return tuple(sorted(found, key=lambda grid: grid[0] * grid[1]))

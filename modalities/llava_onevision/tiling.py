"""Scales a picture into the best of several fixed canvases, pads it with black and cuts it into tiles.

The first tile is the whole picture, squeezed into one tile. The result equals that of transformers'
LlavaOnevisionImageProcessorPil, bit by bit. The number of rows follows from what the model does with the features of
the tiles. This module knows nothing of models or torch."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from modalities.pixels import normalise
from modalities.tiled.config import PixelOptions
from modalities.tiled.family import Cut, Halved


@dataclass(frozen=True, slots=True)
class AnyResolution:
    """Implements `modalities.tiled.family.Tiling`."""

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
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

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

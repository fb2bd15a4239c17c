"""Turns pictures into patches with numpy and Pillow, equal to transformers' Qwen2VLImageProcessorPil to the bit.

The module knows nothing of requests, models or torch.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fabric.errors import InvalidMedia
from modalities.family import DEFAULT_OPTIONS, ImageHeader, MediaOptions
from modalities.image import decode_image
from modalities.pixels import Normalisation, channel_values, to_rgb
from modalities.qwen_vl.image_options import ImageOptions

_MAX_ASPECT_RATIO = 200


def smart_resize(height: int, width: int, options: ImageOptions, most_pixels: int | None = None) -> tuple[int, int]:
    """Returns the size (height, width) that a picture is scaled to: both are multiples of `options.factor`, the number
    of pixels is within the options' range (or at most `most_pixels`), and the aspect ratio is nearly kept (rule and
    rounding are those of Qwen2-VL). Raises InvalidMedia for a picture whose longer side is more than 200 times the
    shorter one."""
    if max(height, width) / min(height, width) > _MAX_ASPECT_RATIO:
        raise InvalidMedia(f"{width}x{height} pixels: the aspect ratio is above {_MAX_ASPECT_RATIO}")
    factor, most_pixels = options.factor, options.max_pixels if most_pixels is None else most_pixels
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > most_pixels:
        beta = math.sqrt((height * width) / most_pixels)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif new_height * new_width < options.min_pixels:
        beta = math.sqrt(options.min_pixels / (height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_height, new_width


def image_grid(
    header: ImageHeader, options: ImageOptions, wishes: MediaOptions = DEFAULT_OPTIONS
) -> tuple[int, int, int]:
    """Returns the numbers of patches (t, h, w) of a picture, from its header. It has at most `wishes.max_pixels`
    pixels, and the sides that it would be scaled to are halved `wishes.reduction` times, down to the smallest size that
    the model takes. Raises InvalidMedia."""
    most, reduction = options.max_pixels, wishes.reduction
    if wishes.max_pixels:
        most = min(most, max(wishes.max_pixels, options.min_pixels))
    height, width = smart_resize(header.height, header.width, options, most)
    if reduction:
        most_pixels = max(options.min_pixels, (height * width) >> (2 * reduction))
        height, width = smart_resize(header.height, header.width, options, most_pixels)
    if height == 0 or width == 0:
        raise InvalidMedia(f"{header.width}x{header.height} pixels: too small")
    return 1, height // options.patch_size, width // options.patch_size


def image_patches(
    data: bytes,
    grid: tuple[int, int, int],
    options: ImageOptions,
    param: str,
    wishes: MediaOptions = DEFAULT_OPTIONS,
) -> npt.NDArray[np.float32]:
    """Decodes a picture into patches, float32 `(grid_h * grid_w, 3 * temporal_patch_size * patch_size**2)`. The patches
    of one merged token follow each other. Raises InvalidMedia for a broken file or one that does not give `grid`."""
    image, header = decode_image(data, param)
    found = image_grid(header, options, wishes)
    if found != grid:
        raise InvalidMedia(f"{param}: the image gives patches {found}, planned were {grid}", param=param)
    rgb = to_rgb(image)
    size = (grid[2] * options.patch_size, grid[1] * options.patch_size)
    pixels = np.asarray(rgb.resize(size, resample=options.resample))
    return patchify(pixels, options)


def patchify(pixels: npt.NDArray[np.uint8], options: ImageOptions) -> npt.NDArray[np.float32]:
    """Turns pixels `(height, width, 3)` into patches `(num_patches, patch_dim)`. A still picture fills all frames of a
    temporal patch."""
    patch, merge = options.patch_size, options.merge_size
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    blocks = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5)  # The axes are (rows/m, columns/m, m, m, channel, patch, patch).
    blocks = blocks.reshape(rows * columns, 3, 1, patch * patch)
    values = channel_values(Normalisation(options.rescale_factor, options.mean, options.std))[
        np.arange(3)[None, :, None, None], blocks
    ]
    return np.repeat(values, options.temporal_patch_size, axis=2).reshape(rows * columns, -1)

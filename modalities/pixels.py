"""Converts colours and normalises values exactly like transformers' Pillow image processors, bit for bit.

This module knows nothing of models: the families choose sizes and crops.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

_WHITE = (255, 255, 255, 255)
_STRIP_PIXELS = 2**18
"""Limits the pixels that are laid on white at once, so that their copies stay in a processor's cache."""


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Says what an 8-bit value becomes: it is multiplied by `rescale_factor`, then `mean` is subtracted and the result
    is divided by `std`; each step applies if its numbers are given."""

    rescale_factor: float | None
    mean: tuple[float, float, float] | None
    std: tuple[float, float, float] | None


def to_rgb(image: Image.Image) -> Image.Image:
    """Returns the image in RGB. Transparent pixels are laid on white (transformers' rule since 5.x). 16-bit grey is
    clipped at 255, which is Pillow's conversion and therefore the reference's.

    Takes the memory of one more picture. An RGB image without transparency is returned as it is and takes no memory."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    rgb = Image.new("RGB", image.size)
    num_rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, num_rows):
        strip = image.crop((0, top, image.width, min(top + num_rows, image.height))).convert("RGBA")
        rgb.paste(Image.alpha_composite(Image.new("RGBA", strip.size, _WHITE), strip).convert("RGB"), (0, top))
    return rgb


def channel_values(options: Normalisation) -> npt.NDArray[np.float32]:
    """Returns the value that each 8-bit value of each channel becomes, in the reference's order of operations. Has
    shape `(3, 256)`."""
    values: npt.NDArray[np.float32] = np.arange(256).astype(np.float32)
    if options.rescale_factor is not None:
        values = (np.arange(256, dtype=np.float64) * options.rescale_factor).astype(np.float32)
    table = np.broadcast_to(values, (3, 256))
    if options.mean is not None and options.std is not None:
        mean, std = np.array(options.mean, dtype=np.float32), np.array(options.std, dtype=np.float32)
        table = (table - mean[:, None]) / std[:, None]
    return np.ascontiguousarray(table, dtype=np.float32)


def fused_channel_values(options: Normalisation) -> npt.NDArray[np.float32]:
    """Returns the same table as `channel_values`, but in the order of operations of transformers' video processors,
    where scaling and normalising are one step."""
    values: npt.NDArray[np.float32] = np.broadcast_to(np.arange(256, dtype=np.float32), (3, 256))
    factor = options.rescale_factor
    if options.mean is None or options.std is None:
        return np.ascontiguousarray(values if factor is None else values * np.float32(factor), dtype=np.float32)
    scale = np.float32(1.0 if factor is None else 1.0 / factor)
    mean, std = (np.array(found, dtype=np.float32) * scale for found in (options.mean, options.std))
    return np.ascontiguousarray((values - mean[:, None]) / std[:, None], dtype=np.float32)


def normalise(pixels: npt.NDArray[np.uint8], options: Normalisation) -> npt.NDArray[np.float32]:
    """Returns the normalised pixels `(n, 3, height, width)` of `(n, height, width, 3)`."""
    return channel_values(options)[np.arange(3)[None, :, None, None], pixels.transpose(0, 3, 1, 2)]

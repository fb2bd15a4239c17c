"""Pixels as transformers' Pillow image processors make them, to the bit: colours, and values after normalising.

Knows no model: sizes and cuts are the families'.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

_WHITE = (255, 255, 255, 255)
_STRIP_PIXELS = 2**18
"""That are laid on white at once: their copies stay in a processor's cache."""


@dataclass(frozen=True, slots=True)
class Normalisation:
    """What an 8-bit value becomes: times `rescale_factor`, less `mean`, over `std`, each if it is given."""

    rescale_factor: float | None
    mean: tuple[float, float, float] | None
    std: tuple[float, float, float] | None


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB; what is transparent lies on white (transformers' rule since 5.x). 16-bit grey is clipped at 255, which is
    Pillow's conversion and so the reference's.

    Takes the memory of one more picture, and none for one that is RGB: that is returned as it is."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    rgb = Image.new("RGB", image.size)
    num_rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, num_rows):
        strip = image.crop((0, top, image.width, min(top + num_rows, image.height))).convert("RGBA")
        rgb.paste(Image.alpha_composite(Image.new("RGBA", strip.size, _WHITE), strip).convert("RGB"), (0, top))
    return rgb


def channel_values(options: Normalisation) -> npt.NDArray[np.float32]:
    """`(3, 256)`: what each 8-bit value of each channel becomes, in the reference's order of operations."""
    values: npt.NDArray[np.float32] = np.arange(256).astype(np.float32)
    if options.rescale_factor is not None:
        values = (np.arange(256, dtype=np.float64) * options.rescale_factor).astype(np.float32)
    table = np.broadcast_to(values, (3, 256))
    if options.mean is not None and options.std is not None:
        mean, std = np.array(options.mean, dtype=np.float32), np.array(options.std, dtype=np.float32)
        table = (table - mean[:, None]) / std[:, None]
    return np.ascontiguousarray(table, dtype=np.float32)


def fused_channel_values(options: Normalisation) -> npt.NDArray[np.float32]:
    """As above, in the order of operations of transformers' video processors: scaling and normalising are one step."""
    values: npt.NDArray[np.float32] = np.broadcast_to(np.arange(256, dtype=np.float32), (3, 256))
    factor = options.rescale_factor
    if options.mean is None or options.std is None:
        return np.ascontiguousarray(values if factor is None else values * np.float32(factor), dtype=np.float32)
    scale = np.float32(1.0 if factor is None else 1.0 / factor)
    mean, std = (np.array(found, dtype=np.float32) * scale for found in (options.mean, options.std))
    return np.ascontiguousarray((values - mean[:, None]) / std[:, None], dtype=np.float32)


def normalise(pixels: npt.NDArray[np.uint8], options: Normalisation) -> npt.NDArray[np.float32]:
    """`(n, height, width, 3)` -> `(n, 3, height, width)`."""
    return channel_values(options)[np.arange(3)[None, :, None, None], pixels.transpose(0, 3, 1, 2)]

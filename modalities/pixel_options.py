"""Reads from an image processor's config how pixels are scaled and normalised.

All image processors of transformers have these options and, unless their config says otherwise, normalise by CLIP's
colours. The families on patches and on tiles share this module. It knows nothing of sizes, or of how a family cuts a
picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modalities.media import Normalisation

Channels = tuple[float, float, float]
"""Holds one number each for red, green and blue."""
CLIP_MEAN: Channels = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Channels = (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3


@dataclass(frozen=True, slots=True)
class PixelOptions:
    """Says how pixels are scaled and normalised."""

    resample: int
    """This is Pillow's number for the resampling filter."""
    normalisation: Normalisation


def pixel_options(processor: Mapping[str, Any], mean: Channels = CLIP_MEAN, std: Channels = CLIP_STD) -> PixelOptions:
    """Returns the options in the config of an image processor; `mean` and `std` replace values that are missing or
    null. Raises TypeError or ValueError for values of the wrong kind."""
    is_normalised = processor.get("do_normalize", True)
    is_rescaled = processor.get("do_rescale", True)
    return PixelOptions(
        resample=int(processor.get("resample", _BICUBIC)),
        normalisation=Normalisation(
            rescale_factor=float(processor.get("rescale_factor", 1 / 255)) if is_rescaled else None,
            mean=_channels(processor.get("image_mean") or mean) if is_normalised else None,
            std=_channels(processor.get("image_std") or std) if is_normalised else None,
        ),
    )


def _channels(values: Any) -> Channels:
    red, green, blue = values
    return float(red), float(green), float(blue)

"""Reads config.json and preprocessor_config.json of a model on tiles as plain JSON.

Missing keys take the values that transformers 5.23 gives them. This module knows nothing of a particular family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric.errors import ConfigError
from modalities.causal_lm.config import text_shape
from modalities.family import ModelShape
from modalities.json_files import model_id, read_image_processor, read_json, section
from modalities.pixels import Normalisation

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3


@dataclass(frozen=True, slots=True)
class TiledConfig:
    """Holds the settings that all families on tiles have."""

    model_id: str
    shape: ModelShape
    image_token_id: int
    tile_size: int
    """This is the length of each side of a tile, in pixels."""
    patches_per_side: int
    """Counts the patches that the vision transformer sees along one side of a tile."""


@dataclass(frozen=True, slots=True)
class PixelOptions:
    """Says how pixels are scaled and normalised. All image processors of transformers have these options."""

    resample: int
    """This is Pillow's number for the resampling filter."""
    normalisation: Normalisation


@dataclass(frozen=True, slots=True)
class ConfigFiles:
    """Holds the contents of the files, for the settings that only one family reads."""

    model: Mapping[str, Any]
    vision: Mapping[str, Any]
    """Holds the vision tower's section, with `vision_defaults` in place of missing keys."""
    processor: Mapping[str, Any]


def read_tiled_config(
    model_dir: Path, image_token: tuple[str, int], vision_defaults: Mapping[str, Any], default_text: str
) -> tuple[TiledConfig, ConfigFiles]:
    """Returns the settings of a checkpoint, and the files that they come from.

    `image_token` is the key and the default of the placeholder's id. `vision_defaults` has `model_type` (no other type
    is accepted), `image_size` and `patch_size`. `default_text` is the text model's type if the config does not name
    one. Raises ConfigError for missing or broken files and for a model that Weft can't run."""
    raw, model = read_json(model_dir / "config.json")
    vision = {**vision_defaults, **section(model, "vision_config")}
    if vision["model_type"] != vision_defaults["model_type"]:
        raise ConfigError(f"vision tower {vision['model_type']!r} is not supported")
    tile_size, patch_size = square(vision["image_size"], "image_size"), square(vision["patch_size"], "patch_size")
    shape = text_shape({"model_type": default_text, **section(model, "text_config")})
    key, default = image_token
    config = TiledConfig(
        model_id=model_id(model_dir, raw),
        shape=shape,
        image_token_id=int(model.get(key, model.get("image_token_id", default))),
        tile_size=tile_size,
        patches_per_side=tile_size // patch_size,
    )
    return config, ConfigFiles(model, vision, read_image_processor(model_dir))


def read_pixel_options(
    processor: Mapping[str, Any],
    kinds: tuple[str, ...],
    mean: tuple[float, float, float] = _CLIP_MEAN,
    std: tuple[float, float, float] = _CLIP_STD,
) -> PixelOptions:
    """Returns the pixel options of an image processor's config.

    `kinds` are the names, without `Fast` or `Pil`, of the image processors that cut pictures as the caller does. `mean`
    and `std` replace missing values. Raises ConfigError for another processor, for one that does not resize or convert
    to RGB, and for a broken config."""
    name = str(processor.get("image_processor_type", kinds[0]))
    if name.removesuffix("Fast").removesuffix("Pil") not in kinds:
        raise ConfigError(f"unsupported image processor {name!r}")
    if not processor.get("do_resize", True) or not processor.get("do_convert_rgb", True):
        raise ConfigError("the image processor must resize and convert to RGB")
    is_normalised = processor.get("do_normalize", True)
    is_rescaled = processor.get("do_rescale", True)
    try:
        return PixelOptions(
            resample=int(processor.get("resample", _BICUBIC)),
            normalisation=Normalisation(
                rescale_factor=float(processor.get("rescale_factor", 1 / 255)) if is_rescaled else None,
                mean=_channels(processor.get("image_mean") or mean) if is_normalised else None,
                std=_channels(processor.get("image_std") or std) if is_normalised else None,
            ),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the image processor's config is broken: {error}") from error


def square(size: Any, name: str) -> int:
    """Returns the side of a square, given as one number or as two equal numbers. Raises ConfigError for other sizes;
    the message calls the size `name`."""
    if isinstance(size, Mapping):
        size = [size.get("height"), size.get("width")]
    sides = size if isinstance(size, (list, tuple)) else [size]
    if not sides or any(not isinstance(side, int) or side < 1 or side != sides[0] for side in sides):
        raise ConfigError(f"{name} must be a square, not {size}")
    return int(sides[0])


def _channels(values: Any) -> tuple[float, float, float]:
    red, green, blue = values
    return float(red), float(green), float(blue)

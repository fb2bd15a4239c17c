"""config.json and preprocessor_config.json of a model on tiles, read as plain JSON.

Missing keys take the values that transformers 5.23 gives them.
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
    """What all families of this kind have."""

    model_id: str
    shape: ModelShape
    image_token_id: int
    tile_size: int
    """Both sides of a tile in pixels."""
    patches_per_side: int
    """Patches that the vision transformer sees along one side of a tile."""


@dataclass(frozen=True, slots=True)
class PixelOptions:
    """How pixels are scaled and normalised, alike in all of transformers' image processors."""

    resample: int
    """Pillow's number of the filter."""
    normalisation: Normalisation


@dataclass(frozen=True, slots=True)
class ConfigFiles:
    """The files as they are, for what a family reads on top."""

    model: Mapping[str, Any]
    vision: Mapping[str, Any]
    """With `vision_defaults` in place of missing keys."""
    processor: Mapping[str, Any]


def read_tiled_config(
    model_dir: Path, image_token: tuple[str, int], vision_defaults: Mapping[str, Any], default_text: str
) -> tuple[TiledConfig, ConfigFiles]:
    """`image_token`: key and default of the placeholder's id; `vision_defaults` has `model_type`, which is the only
    one accepted, `image_size` and `patch_size`; `default_text`: the text model's type where it is not named. Raises
    ConfigError for missing or broken files and for what Weft can't run."""
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
    """`kinds`: names of image processors that cut pictures in the way in question, without `Fast` or `Pil`. `mean` and
    `std` in place of missing ones. Raises ConfigError for another processor and for one that does less than those."""
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
    """A side given as a number or as two equal ones. Raises ConfigError."""
    if isinstance(size, Mapping):
        size = [size.get("height"), size.get("width")]
    sides = size if isinstance(size, (list, tuple)) else [size]
    if not sides or any(not isinstance(side, int) or side < 1 or side != sides[0] for side in sides):
        raise ConfigError(f"{name} must be a square, not {size}")
    return int(sides[0])


def _channels(values: Any) -> tuple[float, float, float]:
    red, green, blue = values
    return float(red), float(green), float(blue)

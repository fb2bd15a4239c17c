"""Reads a LLaVA-1.5 checkpoint's config files and builds a family on tiles from them. It knows nothing of weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fabric.errors import ConfigError
from modalities.family import EncoderModel, Family
from modalities.llava.tiling import CentreCrop
from modalities.tiled.config import read_pixel_options, read_tiled_config, square
from modalities.tiled.family import TiledFamily

_VISION_DEFAULTS = {"model_type": "clip_vision_model", "image_size": 224, "patch_size": 32}
# Both scale the shortest edge and crop the centre. The second one could also pad; `_shortest_edge` refuses that.
_PROCESSORS = ("CLIPImageProcessor", "LlavaImageProcessor")


def load_family(model_dir: Path) -> Family:
    """Returns the family. It reads only config files. Raises ConfigError if Weft can't use them."""
    config, files = read_tiled_config(model_dir, ("image_token_index", 32000), _VISION_DEFAULTS, "llama")
    strategy = files.model.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise ConfigError(f"vision_feature_select_strategy {strategy!r} is not known")
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
        raise ConfigError("the image processor must crop the centre, and not pad")
    crop = square(processor.get("crop_size", 224), "crop_size")
    size = processor.get("size", 224)
    edge = square(size.get("shortest_edge") if isinstance(size, Mapping) else size, "size.shortest_edge")
    if crop != tile_size or edge < crop:
        raise ConfigError(f"the vision tower takes {tile_size} pixels; the processor scales to {edge}, crops to {crop}")
    return edge


def _load_encoder(model_dir: Path, device: str, dtype: str) -> EncoderModel:
    from modalities.llava.encoder import load_encoder

    return load_encoder(model_dir, device, dtype)

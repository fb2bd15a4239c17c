"""Reads an InternVL checkpoint's config files and builds a family on tiles from them. It knows nothing of weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fabric.errors import ConfigError
from modalities.family import EncoderModel, Family
from modalities.internvl.tiling import GridOfTiles
from modalities.json_files import read_json
from modalities.tiled.config import ConfigFiles, TiledConfig, read_pixel_options, read_tiled_config, square
from modalities.tiled.family import TiledFamily, Videos, Wrapping
from modalities.tiled.video import FramePrompt, FrameTiling, read_frame_pixels

_VISION_DEFAULTS = {"model_type": "internvl_vision", "image_size": 448, "patch_size": 14}
_PROCESSORS = ("GotOcr2ImageProcessor",)
_START, _END, _CONTEXT, _VIDEO = "<img>", "</img>", "<IMG_CONTEXT>", "<video>"


def load_family(model_dir: Path) -> Family:
    """Returns the family. It reads only config files and the tokenizer's added tokens. Raises ConfigError if Weft can't
    use them."""
    config, files = read_tiled_config(model_dir, ("image_token_id", 151667), _VISION_DEFAULTS, "qwen2")
    if square(files.processor.get("size", 384), "size") != config.tile_size:
        raise ConfigError(
            f"the vision tower takes {config.tile_size} pixels, the processor's tiles are of another size"
        )
    tiling = GridOfTiles(
        pixels=read_pixel_options(files.processor, _PROCESSORS),
        tile_size=config.tile_size,
        tokens_per_tile=_tokens_per_tile(config, files),
        # InternVLProcessor always cuts into tiles; it ignores what the image processor's own file says about that.
        min_tiles=int(files.processor.get("min_patches", 1)),
        max_tiles=int(files.processor.get("max_patches", 12)),
    )
    ids = _added_tokens(model_dir)
    if missing := [name for name in (_START, _END) if name not in ids]:
        raise ConfigError(f"the tokenizer of {model_dir} lacks {', '.join(missing)}")
    wrapping = Wrapping((ids[_START],), (ids[_END],))
    videos = _videos(model_dir, config, tiling.tokens_per_tile, ids)
    return TiledFamily("internvl", config, tiling, _CONTEXT, _load_encoder, wrapping, videos)


def _videos(model_dir: Path, config: TiledConfig, tokens_per_tile: int, ids: Mapping[str, int]) -> Videos | None:
    """Returns the settings for videos, or None for a checkpoint whose tokenizer has no token for videos."""
    if _VIDEO not in ids:
        return None
    frames = FrameTiling(
        pixels=read_frame_pixels(model_dir, config, "InternVLVideoProcessor"),
        tile_size=config.tile_size,
        patches_per_side=config.patches_per_side,
        rows_per_frame=tokens_per_tile,
        is_centred=True,
        has_newline=False,
        prompt=FramePrompt(ids[_START], ids[_END]),
    )
    return Videos(frames, _VIDEO, ids[_VIDEO], config.image_token_id)


def _tokens_per_tile(config: TiledConfig, files: ConfigFiles) -> int:
    """Returns the number of tokens of one tile. Raises ConfigError for a tower whose patches can't be shuffled into a
    smaller square, and for features that are not those of one layer without the class token."""
    model = files.model
    ratio = float(model.get("downsample_ratio", 0.5))
    side = config.patches_per_side * ratio
    if not side or side != int(side):
        raise ConfigError(f"{config.patches_per_side} patches a side are not divisible by downsample_ratio {ratio}")
    if model.get("vision_feature_select_strategy", "default") != "default":
        raise ConfigError("InternVL must drop the class token (vision_feature_select_strategy `default`)")
    if not isinstance(model.get("vision_feature_layer", -1), int):
        raise ConfigError("InternVL takes the features of one layer")
    return int(side) ** 2


def _added_tokens(model_dir: Path) -> dict[str, int]:
    """Returns the ids of the added tokens by their texts, from tokenizer_config.json or tokenizer.json. Raises
    ConfigError for broken files."""
    found: dict[str, int] = {}
    for name in ("tokenizer_config.json", "tokenizer.json"):
        path = model_dir / name
        content: Mapping[str, Any] = read_json(path)[1] if path.exists() else {}
        for token_id, token in content.get("added_tokens_decoder", {}).items():
            found.setdefault(str(token["content"]), int(token_id))
        for token in content.get("added_tokens", ()):
            found.setdefault(str(token["content"]), int(token["id"]))
        if all(name in found for name in (_START, _END, _VIDEO)):
            break
    return found


def _load_encoder(model_dir: Path, device: str, dtype: str) -> EncoderModel:
    from modalities.internvl.encoder import load_encoder

    return load_encoder(model_dir, device, dtype)

"""Implements InternVL (transformers' own form of the checkpoints): it takes text, images and videos and returns text.

A picture is scaled to the grid of tiles whose aspect ratio is nearest, and one more tile holds the whole picture scaled
down (`GridOfTiles`). The tiles equal those of transformers' GotOcr2ImageProcessorPil, bit by bit. Each frame of a video
is one tile, and the prompt has the frame's number before it. The rest of this module reads the checkpoint's config
files and builds a family on tiles from them.

It knows nothing of weights: `modalities.families.tiled.tile_encoders`, which imports torch, loads the encoder.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from fabric.contracts import ConfigError, InvalidMedia
from modalities.checkpoint_files import read_json_if_present
from modalities.families.tiled.tiled_family import (
    ConfigFiles,
    Cut,
    FramePrompt,
    FrameTiling,
    Halved,
    TiledConfig,
    TiledFamily,
    Videos,
    Wrapping,
    check_tile_size,
    read_frame_pixels,
    read_pixel_options,
    read_tiled_config,
)
from modalities.family import EncoderModel, Family, FeaturesHeader, canonical_options
from modalities.media import normalise
from modalities.pixel_options import PixelOptions

ARCHITECTURES = ("InternVLForConditionalGeneration",)
_VISION_DEFAULTS = {"model_type": "internvl_vision", "image_size": 448, "patch_size": 14}
_PROCESSORS = ("GotOcr2ImageProcessor",)
_START, _END, _CONTEXT, _VIDEO = "<img>", "</img>", "<IMG_CONTEXT>", "<video>"


def load(model_dir: Path) -> Family:
    """Returns the family. It reads only config files and the tokenizer's added tokens. Raises ConfigError if Weft can't
    use them."""
    config, files = read_tiled_config(model_dir, ("image_token_id", 151667), _VISION_DEFAULTS, "qwen2")
    check_tile_size(files.processor, config.tile_size)
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
        raise ConfigError(
            f"downsample_ratio {ratio} must reduce the {config.patches_per_side} patches of a side to a whole number"
        )
    if (strategy := model.get("vision_feature_select_strategy", "default")) != "default":
        raise ConfigError(
            f"InternVL must drop the class token: vision_feature_select_strategy must be `default`, not {strategy!r}"
        )
    if not isinstance(layer := model.get("vision_feature_layer", -1), int):
        raise ConfigError(
            f"InternVL uses the features of one layer: vision_feature_layer must be a number, not {layer!r}"
        )
    return int(side) ** 2


def _added_tokens(model_dir: Path) -> dict[str, int]:
    """Returns the ids of the added tokens by their texts, from tokenizer_config.json or tokenizer.json. Raises
    ConfigError for broken files."""
    found: dict[str, int] = {}
    for name in ("tokenizer_config.json", "tokenizer.json"):
        content = read_json_if_present(model_dir / name)
        for token_id, token in content.get("added_tokens_decoder", {}).items():
            found.setdefault(str(token["content"]), int(token_id))
        for token in content.get("added_tokens", ()):
            found.setdefault(str(token["content"]), int(token["id"]))
        if all(name in found for name in (_START, _END, _VIDEO)):
            break
    return found


def _load_encoder(model_dir: Path, device: str, dtype: str) -> EncoderModel:
    from modalities.families.tiled.tile_encoders import load_internvl_encoder

    return load_internvl_encoder(model_dir, device, dtype)


# ------------------------------------------------------------ the cutting of pictures


@dataclass(frozen=True, slots=True)
class GridOfTiles:
    """Implements `modalities.families.tiled.tiled_family.Tiling`."""

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

    def cut_of_features(self, header: FeaturesHeader) -> Cut:
        """Returns the tiles that have as many tokens. Raises InvalidMedia if no number of tiles has."""
        num_tiles = header.num_tokens // self.tokens_per_tile
        grids = range(self.min_tiles, self.max_tiles + 1)
        if header.num_tokens % self.tokens_per_tile or num_tiles not in {num + (num > 1) for num in grids}:
            raise InvalidMedia(
                f"the features must have {self.tokens_per_tile} tokens for each of {self.min_tiles} to "
                f"{self.max_tiles} tiles, and as many for the whole picture behind two or more tiles, not "
                f"{header.num_tokens} tokens"
            )
        return Cut(num_tiles, header.num_tokens)

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
        return canonical_options(self)


@functools.cache
def _grids(min_tiles: int, max_tiles: int) -> tuple[tuple[int, int], ...]:
    """Returns the (columns, rows) of every grid within the limits. They are ordered by number of tiles, then by number
    of columns."""
    sides = range(1, max_tiles + 1)
    found = [(columns, rows) for columns in sides for rows in sides if min_tiles <= columns * rows <= max_tiles]
    return tuple(sorted(found, key=lambda grid: grid[0] * grid[1]))

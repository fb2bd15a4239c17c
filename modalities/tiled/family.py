"""Implements the families on tiles: which media they take, and which tokens and positions the prompt has for them.

The module is pure except for the two loaders, which import torch when they are called. It knows nothing of how a
particular family cuts pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from fabric.errors import InvalidMedia, UnsupportedModality
from fabric.messages import MediaItem, PlaceholderRange
from modalities.causal_lm.positions import running_positions
from modalities.family import (
    DEFAULT_OPTIONS,
    EncoderInput,
    EncoderModel,
    ExpandedPrompt,
    ImageHeader,
    ItemPlan,
    LanguageModel,
    MediaHeader,
    MediaOptions,
    Positions,
    VideoHeader,
    check_modality,
)
from modalities.image import decode_image
from modalities.pixels import to_rgb
from modalities.placeholders import FeatureRows, Piece, expand_pieces
from modalities.tiled.config import TiledConfig
from modalities.tiled.video import FrameTiling

_IMAGE, _VIDEO = "image", "video"

LoadEncoder = Callable[[Path, str, str], EncoderModel]
"""A `LoadEncoder` takes (model_dir, device, dtype) and returns the encoder."""


class Cut(NamedTuple):
    """Counts the tiles and the tokens that a picture of known size becomes."""

    num_tiles: int
    num_tokens: int


class Halved(NamedTuple):
    """Says how a picture is cut that the model should see at a reduced size."""

    tiling: Tiling
    size: tuple[int, int]
    """The picture is scaled to this (width, height) before it is cut."""


class Tiling(Protocol):
    """A `Tiling` is the way in which a family cuts pictures."""

    def halved(self, width: int, height: int, times: int) -> Halved:
        """Returns how to cut the picture so that its sides, as the model sees them, are halved `times` times. If the
        model has no smaller form, the picture is cut as before."""
        ...

    def limited(self, max_pixels: int) -> Tiling:
        """Returns this tiling, limited to tiles of at most `max_pixels` pixels together, or to the smallest number of
        tiles that it allows. The tile of the whole picture does not count."""
        ...

    def cut(self, width: int, height: int) -> Cut:
        """Returns the number of tiles and tokens, from the size alone. Raises InvalidMedia for a size that the model
        can't take."""
        ...

    def tiles(self, image: Image.Image) -> npt.NDArray[np.float32]:
        """Cuts an RGB picture into tiles. The result has shape `(num_tiles, 3, tile_size, tile_size)`."""
        ...

    def options(self) -> str:
        """Returns canonical JSON of all options that `cut` and `tiles` depend on."""
        ...


class Videos(NamedTuple):
    """Holds what a family that takes videos needs for them."""

    tiling: FrameTiling
    placeholder: str
    token_id: int
    row_token_id: int
    """The prompt has this token at each row of a video's features."""


class Wrapping(NamedTuple):
    """Holds the token ids that the reference's processor puts before and after a picture's rows."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


class TiledFamily:
    """A `TiledFamily` stands for one checkpoint directory. It is immutable and thread-safe."""

    def __init__(
        self,
        name: str,
        config: TiledConfig,
        tiling: Tiling,
        placeholder: str,
        load_encoder: LoadEncoder,
        wrapping: Wrapping = Wrapping(),  # noqa: B008 (immutable)
        videos: Videos | None = None,
    ) -> None:
        self.name, self.model_id, self.shape = name, config.model_id, config.shape
        self.max_items: Mapping[str, int] = {_IMAGE: 64, **({_VIDEO: 16} if videos else {})}
        self.config, self.tiling, self.videos = config, tiling, videos
        self._placeholder, self._load_encoder, self._wrapping = placeholder, load_encoder, wrapping

    def plan(self, header: MediaHeader, options: MediaOptions = DEFAULT_OPTIONS) -> ItemPlan:
        """Plans an image or a video from its header. Raises InvalidMedia for a size that the model can't take and
        UnsupportedModality for another medium."""
        if isinstance(header, VideoHeader) and self.videos is not None:
            return self.videos.tiling.plan(header, options)
        if not isinstance(header, ImageHeader):
            raise UnsupportedModality(f"{self.name} takes {' and '.join(self.max_items)} alone")
        tiling, size = self._tiling(header, options)
        cut = tiling.cut(*size)
        side = self.config.patches_per_side
        cost = cut.num_tiles * side * side
        return ItemPlan(_IMAGE, (cut.num_tiles, side, side), (cut.num_tokens,), cost, size)

    def placeholder_text(self, modality: str) -> str:
        """Returns the placeholder of one item. Raises UnsupportedModality for a modality that the family does not
        take."""
        check_modality(self, modality)
        return self.videos.placeholder if self.videos and modality == _VIDEO else self._placeholder

    def expand(
        self,
        token_ids: Sequence[int],
        plans: Sequence[ItemPlan],
        tokenize: Callable[[str], Sequence[int]] | None = None,
    ) -> ExpandedPrompt:
        """Replaces each placeholder by the tokens of its item. Raises InvalidRequest if placeholders and plans do not
        match, and ConfigError for a family that numbers frames if there is no `tokenize`."""
        placeholders = row_tokens = {_IMAGE: self.config.image_token_id}
        if self.videos:
            placeholders = {**placeholders, _VIDEO: self.videos.token_id}
            row_tokens = {**row_tokens, _VIDEO: self.videos.row_token_id}

        def pieces_of(index: int) -> Sequence[Piece]:
            plan = plans[index]
            if self.videos and plan.modality == _VIDEO:
                return list(self.videos.tiling.pieces(plan, index, tokenize))
            return [self._wrapping.before, FeatureRows(index, 0, sum(plan.unit_tokens)), self._wrapping.after]

        return expand_pieces(token_ids, placeholders, plans, pieces_of, row_tokens)

    def positions(
        self, token_ids: Sequence[int], placeholders: Sequence[PlaceholderRange], media: Sequence[MediaItem]
    ) -> Positions:
        """Returns positions on one axis."""
        return running_positions(len(token_ids))

    def options(self, modality: str) -> str:
        """Returns canonical JSON of the processing options. Raises UnsupportedModality for a modality that the family
        does not take."""
        check_modality(self, modality)
        return self.videos.tiling.options() if self.videos and modality == _VIDEO else self.tiling.options()

    def preprocess(self, data: bytes, item: MediaItem) -> list[EncoderInput]:
        """Returns the units of `item`: one for a picture, one or more for a video. Raises InvalidMedia for a broken
        file and for one that differs from its plan."""
        return list(self.preprocess_units(data, item))

    def preprocess_units(self, data: bytes, item: MediaItem) -> Iterator[EncoderInput]:
        """Yields the units as `modalities.unit_stream` describes: each one as soon as it is ready."""
        check_modality(self, item.modality)
        if self.videos and item.modality == _VIDEO:
            yield from self.videos.tiling.units(data, item)
        else:
            yield self._image_input(data, item)

    def _image_input(self, data: bytes, item: MediaItem) -> EncoderInput:
        image, header = decode_image(data, item.part)
        options = MediaOptions.decode(item.options)
        found = self.plan(header, options)
        if (found.grid, found.unit_tokens) != (item.grid, item.unit_tokens):
            raise InvalidMedia(
                f"{item.part}: the image gives patches {found.grid}, planned were {item.grid}", param=item.part
            )
        tiling, size = self._tiling(header, options)
        rgb = to_rgb(image)
        tiles = tiling.tiles(rgb if rgb.size == size else rgb.resize(size, resample=Image.Resampling.BICUBIC))
        return EncoderInput(_IMAGE, tiles, found.grid, found.grid[1] * found.grid[2], found.geometry)

    def load_encoder(self, model_dir: Path, device: str, dtype: str, modalities: Sequence[str]) -> EncoderModel:
        """Loads the vision tower and the projector. Raises ConfigError if a weight is missing, and UnsupportedModality
        for a modality that the family does not take."""
        for modality in modalities:
            check_modality(self, modality)
        return self._load_encoder(model_dir, device, dtype)

    def load_language_model(self, model_dir: Path, device: str, dtype: str, attention_name: str) -> LanguageModel:
        """Loads the language model. Raises ConfigError if a weight is missing."""
        from modalities.causal_lm.language_model import load_causal_lm

        return load_causal_lm(model_dir, device, dtype, attention_name)

    def _tiling(self, header: ImageHeader, options: MediaOptions) -> Halved:
        tiling = self.tiling.limited(options.max_pixels) if options.max_pixels else self.tiling
        if options.reduction:
            return tiling.halved(header.width, header.height, options.reduction)
        return Halved(tiling, (header.width, header.height))

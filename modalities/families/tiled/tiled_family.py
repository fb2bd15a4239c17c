"""Implements the families on tiles: which media they take, and which tokens and positions the prompt has for them.

`TiledFamily` answers a `Family`'s questions for one checkpoint. It leaves the cutting of pictures to the family's
`Tiling`. Videos are cut in one way in all families, by `FrameTiling`: every frame becomes one tile. It decides which
frames are decoded, how many rows they become, and which tokens the prompt has for them. The functions at the end read
config.json and the processors' files as plain JSON, where missing keys take the values that transformers 5.23 gives
them.

The module is pure except for decoding and for the two loaders, which import torch when they are called. It knows
nothing of weights and of how a particular family cuts pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from fabric.contracts import ConfigError, InvalidMedia, MediaItem, PlaceholderRange, UnsupportedModality
from modalities.checkpoint_files import model_id, read_image_processor, read_json, read_video_processor, section
from modalities.families.causal_lm.text_family import running_positions, text_shape
from modalities.family import (
    DEFAULT_OPTIONS,
    EncoderInput,
    EncoderModel,
    ExpandedPrompt,
    FeatureRows,
    FeaturesHeader,
    ImageHeader,
    ItemPlan,
    LanguageModel,
    MediaHeader,
    MediaOptions,
    ModelShape,
    Piece,
    Positions,
    Tokenize,
    VideoHeader,
    canonical_options,
    check_modality,
    expand_pieces,
)
from modalities.media import (
    Timeline,
    VideoRows,
    decode_image,
    fused_channel_values,
    sample_frames,
    step_rows,
    to_rgb,
    unit_steps,
)
from modalities.pixel_options import PixelOptions, pixel_options

# ------------------------------------------------------------ the family

_IMAGE, _VIDEO = "image", "video"

LoadEncoder = Callable[[Path, str, str], EncoderModel]
"""A `LoadEncoder` takes (model_dir, device, dtype) and returns the encoder."""


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
            raise UnsupportedModality(f"{self.name} accepts only {' and '.join(self.max_items)}")
        tiling, size = self._tiling(header, options)
        cut = tiling.cut(*size)
        side = self.config.patches_per_side
        cost = cut.num_tiles * side * side
        return ItemPlan(_IMAGE, (cut.num_tiles, side, side), (cut.num_tokens,), cost, size)

    def plan_features(self, header: FeaturesHeader) -> ItemPlan:
        """Plans the features of a picture. Raises InvalidMedia if no picture has them."""
        num_tiles, num_tokens = self.tiling.cut_of_features(header)
        if num_tokens != header.num_tokens:
            raise InvalidMedia(f"such a picture has {num_tokens} tokens, but the features have {header.num_tokens}")
        side = self.config.patches_per_side
        geometry = (self.shape.num_levels, num_tokens, self.shape.hidden_size, *(header.size or ()))
        return ItemPlan(_IMAGE, (num_tiles, side, side), (num_tokens,), 1, geometry)

    def least_features(self) -> FeaturesHeader:
        """Returns the header of a picture of the size of one tile."""
        side = self.config.tile_size
        return FeaturesHeader(self.tiling.cut(side, side).num_tokens, size=(side, side))

    def placeholder_text(self, modality: str) -> str:
        """Returns the placeholder of one item. Raises UnsupportedModality for a modality that the family does not
        take."""
        check_modality(self, modality)
        return self.videos.placeholder if self.videos and modality == _VIDEO else self._placeholder

    def expand(
        self,
        token_ids: Sequence[int],
        plans: Sequence[ItemPlan],
        tokenize: Tokenize | None = None,
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
        """Yields the units as `modalities.family` describes: each one as soon as it is ready."""
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
                f"{item.part}: the image gives patches {found.grid}, but {item.grid} were planned from its header",
                param=item.part,
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
        from modalities.families.causal_lm.language_model import load_causal_lm

        return load_causal_lm(model_dir, device, dtype, attention_name)

    def _tiling(self, header: ImageHeader, options: MediaOptions) -> Halved:
        tiling = self.tiling.limited(options.max_pixels) if options.max_pixels else self.tiling
        if options.reduction:
            return tiling.halved(header.width, header.height, options.reduction)
        return Halved(tiling, (header.width, header.height))


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

    def cut_of_features(self, header: FeaturesHeader) -> Cut:
        """Returns the tiles and tokens of a picture whose features a client sends. The number of tokens differs from
        the header's if the features are those of no picture. Raises InvalidMedia if the header lacks the size that they
        follow from, or if no picture has as many tokens."""
        ...

    def tiles(self, image: Image.Image) -> npt.NDArray[np.float32]:
        """Cuts an RGB picture into tiles. The result has shape `(num_tiles, 3, tile_size, tile_size)`."""
        ...

    def options(self) -> str:
        """Returns canonical JSON of all options that `cut` and `tiles` depend on."""
        ...


class Cut(NamedTuple):
    """Counts the tiles and the tokens that a picture of known size becomes."""

    num_tiles: int
    num_tokens: int


class Halved(NamedTuple):
    """Says how a picture is cut that the model should see at a reduced size."""

    tiling: Tiling
    size: tuple[int, int]
    """The picture is scaled to this (width, height) before it is cut."""


class Videos(NamedTuple):
    """Holds what a family that takes videos needs for them."""

    tiling: FrameTiling
    placeholder: str
    token_id: int
    row_token_id: int
    """The prompt has this token at each row of a video's features."""


# ------------------------------------------------------------ videos


@dataclass(frozen=True, slots=True)
class FrameTiling:
    """Plans the videos of one checkpoint and turns them into encoder inputs."""

    pixels: PixelOptions
    tile_size: int
    patches_per_side: int
    rows_per_frame: int
    is_centred: bool
    """The video is divided into equal shares, one per frame. If this is true, a frame is taken from the middle of its
    share, otherwise from the beginning."""
    has_newline: bool
    """If this is true, one more row follows the last frame."""
    prompt: FramePrompt | None = None

    def plan(self, header: VideoHeader, options: MediaOptions) -> ItemPlan:
        """Plans a video from its header. Raises InvalidMedia for a video of no frames, and if a frame has more rows
        than `options.max_tokens`."""
        timeline, slots, rows, units = self._cut(header, options)
        return ItemPlan(
            modality=_VIDEO,
            grid=(len(slots), self.patches_per_side, self.patches_per_side),
            unit_tokens=self._unit_tokens(rows, units),
            cost=len(slots) * self.patches_per_side**2,
            geometry=(header.width, header.height, header.num_frames),
            frame_times_s=timeline.times_s(slots),
            num_pooled_frames=rows.num_pooled,
        )

    def options(self) -> str:
        """Returns canonical JSON of these settings."""
        return canonical_options(self)

    def units(self, data: bytes, item: MediaItem) -> Iterator[EncoderInput]:
        """Yields the units of a video, each as soon as its frames are decoded. Raises InvalidMedia for a broken file
        and for one that differs from its plan."""
        from modalities.media import VideoPlugin, decode_frames, settled_frames

        options = MediaOptions.decode(item.options)
        header = VideoPlugin().probe(data, item.part)
        timeline, slots, rows, units = self._cut(header, options)
        frames = timeline.frames(slots)
        if (len(frames), self._unit_tokens(rows, units)) != (item.grid[0], item.unit_tokens):
            raise InvalidMedia(
                f"{item.part}: the video gives {len(frames)} frames, but {item.grid[0]} were planned from its header",
                param=item.part,
            )
        decoded = decode_frames(data, settled_frames(data, header, frames, options, item.part), header, item.part)
        values = fused_channel_values(self.pixels.normalisation)
        side = self.patches_per_side
        for index, num_frames in enumerate(units):
            tiles = np.stack([self._tile(next(decoded)) for _ in range(num_frames)])
            pixels = values[np.arange(3)[None, :, None, None], tiles.transpose(0, 3, 1, 2)]
            is_closed = self.has_newline and index == len(units) - 1
            geometry = (int(is_closed), *rows.geometry())
            yield EncoderInput(_VIDEO, pixels, (num_frames, side, side), side * side, geometry)

    def pieces(self, plan: ItemPlan, index: int, tokenize: Tokenize | None) -> Iterator[Piece]:
        """Yields the pieces of the prompt that replace the placeholder of plan `index`. Raises ConfigError if the
        family writes text between frames and `tokenize` is None."""
        num_rows = sum(plan.unit_tokens)
        if self.prompt is None:
            yield FeatureRows(index, 0, num_rows)
            return
        if tokenize is None:
            raise ConfigError("videos of this family need a tokenizer, because the prompt numbers their frames")
        num_groups = -(-plan.grid[0] // plan.num_pooled_frames)
        for group in range(num_groups):
            mark = "\n" if group else ""
            behind = self.prompt.end if group else None
            yield [*tokenize(f"{mark}Frame{group + 1}: ", behind), self.prompt.start]
            yield FeatureRows(index, group * (num_rows // num_groups), num_rows // num_groups)
            yield [self.prompt.end]

    def _cut(
        self, header: VideoHeader, options: MediaOptions
    ) -> tuple[Timeline, list[int], VideoRows, tuple[int, ...]]:
        """Returns the video's timeline, the slots of it that the model sees, which rows of a frame stay, and the number
        of frames in each unit."""
        timeline = Timeline.of(header, options)
        rows = step_rows(self.rows_per_frame, options)
        most = (options.max_tokens - self.has_newline) // len(rows.kept) * rows.num_pooled
        if most < 1:
            raise InvalidMedia(
                f"a frame of the video takes {len(rows.kept)} tokens, which is more than the limit of "
                f"{options.max_tokens}"
            )
        num_frames = len(sample_frames(timeline.num_frames, timeline.seconds, options, max_frames=most))
        shift = int(self.is_centred)
        slots = [(2 * at + shift) * timeline.num_frames // (2 * num_frames) for at in range(num_frames)]
        return timeline, slots, rows, unit_steps(num_frames, self.patches_per_side**2, rows.num_pooled)

    def _unit_tokens(self, rows: VideoRows, units: Sequence[int]) -> tuple[int, ...]:
        *others, last = (rows.num_rows(num_frames) for num_frames in units)
        return (*others, last + self.has_newline)

    def _tile(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        size = (self.tile_size, self.tile_size)
        if pixels.shape[1::-1] == size:
            return pixels
        return np.asarray(Image.fromarray(pixels).resize(size, resample=self.pixels.resample))


@dataclass(frozen=True, slots=True)
class FramePrompt:
    """Holds the tokens that stand before and after the rows of a frame in InternVL's prompts. Each frame (or group of
    frames that are averaged) has the text `Frame1: `, `Frame2: ` and so on, then its rows between these two tokens."""

    start: int
    end: int


# ------------------------------------------------------------ the config files


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
        raise ConfigError(
            f"the vision tower {vision['model_type']!r} is not supported; for this family Weft supports "
            f"{vision_defaults['model_type']}"
        )
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


def read_pixel_options(processor: Mapping[str, Any], kinds: tuple[str, ...]) -> PixelOptions:
    """Returns the pixel options of an image processor's config.

    `kinds` are the names, without `Fast` or `Pil`, of the image processors that cut pictures as the caller does. Raises
    ConfigError for another processor, for one that does not resize or convert to RGB, and for a broken config."""
    name = str(processor.get("image_processor_type", kinds[0]))
    if name.removesuffix("Fast").removesuffix("Pil") not in kinds:
        raise ConfigError(f"the image processor {name!r} is not supported; Weft supports {', '.join(kinds)}")
    if not processor.get("do_resize", True) or not processor.get("do_convert_rgb", True):
        raise ConfigError(
            "the image processor must resize and convert to RGB; set do_resize and do_convert_rgb to true"
        )
    try:
        return pixel_options(processor)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the config of the image processor is broken: {error}") from error


def read_frame_pixels(model_dir: Path, config: TiledConfig, kind: str) -> PixelOptions:
    """Returns the pixel options for video frames. They come from the config of the video processor `kind` if the
    checkpoint has a file for videos, otherwise from that of the image processor. Raises ConfigError for another video
    processor, for one that crops frames, and for frames that do not have the size of a tile."""
    found, is_own = read_video_processor(model_dir)
    if is_own and str(found.get("video_processor_type", kind)).removesuffix("Fast") != kind:
        raise ConfigError(
            f"the video processor {found['video_processor_type']!r} is not supported; Weft supports {kind}"
        )
    check_tile_size(found, config.tile_size)
    if is_own and (found.get("do_center_crop") or found.get("crop_size")):
        raise ConfigError("the video processor must not crop frames: do_center_crop and crop_size must not be set")
    return read_pixel_options({key: value for key, value in found.items() if key != "image_processor_type"}, (kind,))


def check_tile_size(processor: Mapping[str, Any], tile_size: int) -> None:
    """Raises ConfigError unless the processor's `size` is that of the tiles that the vision tower reads."""
    side = square(processor.get("size", 384), "size")
    if side != tile_size:
        raise ConfigError(
            f"the vision tower reads tiles of {tile_size}x{tile_size} pixels, but its processor makes {side}x{side}"
        )


def square(size: Any, name: str) -> int:
    """Returns the side of a square, given as one number or as two equal numbers. Raises ConfigError for other sizes;
    the message calls the size `name`."""
    if isinstance(size, Mapping):
        size = [size.get("height"), size.get("width")]
    sides = size if isinstance(size, (list, tuple)) else [size]
    if not sides or any(not isinstance(side, int) or side < 1 or side != sides[0] for side in sides):
        raise ConfigError(f"{name} must be a square, so one positive number or two equal ones, not {size}")
    return int(sides[0])

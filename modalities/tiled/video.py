"""Videos of a family on tiles: every frame becomes one tile. Which frames, how many rows, what stands in the prompt.

Pure but for decoding. Knows no weights.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from fabric.errors import ConfigError, InvalidMedia
from fabric.messages import MediaItem
from modalities.family import EncoderInput, ItemPlan, MediaOptions, VideoHeader
from modalities.json_files import read_video_processor
from modalities.pixels import fused_channel_values
from modalities.placeholders import Piece, Rows
from modalities.sampling import Timeline, sample_frames
from modalities.tiled.config import PixelOptions, TiledConfig, read_pixel_options, square
from modalities.video_rows import StepRows, step_rows, unit_steps

_VIDEO = "video"
Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class FramePrompt:
    """Frames stand in the prompt one by one, as `Frame1: ` and so on, each between two tokens (InternVL)."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class FrameTiling:
    """A family's half for videos."""

    pixels: PixelOptions
    tile_size: int
    patches_per_side: int
    rows_per_frame: int
    is_centred: bool
    """Frames are taken from the middle of their shares of the video, not from the beginnings."""
    has_newline: bool
    """One more row behind the last frame."""
    prompt: FramePrompt | None = None

    def plan(self, header: VideoHeader, options: MediaOptions) -> ItemPlan:
        """Raises InvalidMedia for a video of no frames, and if a frame has more rows than `options.max_tokens`."""
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
        """Canonical JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    def units(self, data: bytes, item: MediaItem) -> Iterator[EncoderInput]:
        """Units of tiles, each as soon as its frames are decoded. Raises InvalidMedia for a broken file or one that is
        not what was planned."""
        from modalities.keyframes import settled_frames
        from modalities.video import VideoPlugin, decode_frames

        options = MediaOptions.decode(item.options)
        header = VideoPlugin().probe(data, item.part)
        timeline, slots, rows, units = self._cut(header, options)
        frames = timeline.frames(slots)
        if (len(frames), self._unit_tokens(rows, units)) != (item.grid[0], item.unit_tokens):
            raise InvalidMedia(
                f"{item.part}: the video gives {len(frames)} frames, planned were {item.grid[0]}", param=item.part
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
        """What the placeholder of plan `index` becomes. Raises ConfigError for text without a tokenizer."""
        num_rows = sum(plan.unit_tokens)
        if self.prompt is None:
            yield Rows(index, 0, num_rows)
            return
        if tokenize is None:
            raise ConfigError("videos of this family need a tokenizer")
        num_groups = -(-plan.grid[0] // plan.num_pooled_frames)
        for group in range(num_groups):
            mark = "\n" if group else ""
            yield [*tokenize(f"{mark}Frame{group + 1}: "), self.prompt.start]
            yield Rows(index, group * (num_rows // num_groups), num_rows // num_groups)
            yield [self.prompt.end]

    def _cut(self, header: VideoHeader, options: MediaOptions) -> tuple[Timeline, list[int], StepRows, tuple[int, ...]]:
        """The timeline and the slots of it that are looked at, rows, frames of each unit."""
        timeline = Timeline.of(header, options)
        rows = step_rows(self.rows_per_frame, options)
        most = (options.max_tokens - self.has_newline) // len(rows.kept) * rows.num_pooled
        if most < 1:
            raise InvalidMedia(
                f"{len(rows.kept)} rows for a frame are more than the limit of {options.max_tokens} tokens"
            )
        num_frames = len(sample_frames(timeline.num_frames, timeline.seconds, options, max_frames=most))
        shift = int(self.is_centred)
        slots = [(2 * at + shift) * timeline.num_frames // (2 * num_frames) for at in range(num_frames)]
        return timeline, slots, rows, unit_steps(num_frames, self.patches_per_side**2, rows.num_pooled)

    def _unit_tokens(self, rows: StepRows, units: Sequence[int]) -> tuple[int, ...]:
        *others, last = (rows.num_rows(num_frames) for num_frames in units)
        return (*others, last + self.has_newline)

    def _tile(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        size = (self.tile_size, self.tile_size)
        if pixels.shape[1::-1] == size:
            return pixels
        return np.asarray(Image.fromarray(pixels).resize(size, resample=self.pixels.resample))


def read_frame_pixels(model_dir: Path, config: TiledConfig, kind: str) -> PixelOptions:
    """Of the video processor `kind`, where the checkpoint has a file for videos, else as of pictures. Raises
    ConfigError for another processor, and for frames that are not of a tile's size."""
    found, is_own = read_video_processor(model_dir)
    if is_own and str(found.get("video_processor_type", kind)).removesuffix("Fast") != kind:
        raise ConfigError(f"unsupported video processor {found['video_processor_type']!r}")
    if square(found.get("size", 384), "size") != config.tile_size:
        raise ConfigError(f"the vision tower takes {config.tile_size} pixels, the video processor gives another size")
    if is_own and (found.get("do_center_crop") or found.get("crop_size")):
        raise ConfigError("the video processor must not crop frames")
    return read_pixel_options({key: value for key, value in found.items() if key != "image_processor_type"}, (kind,))

"""Handles the videos of a family on tiles, where every frame becomes one tile.

It decides which frames are decoded, how many rows they become, and which tokens the prompt has for them. The module is
pure except for decoding and knows nothing of weights.
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
from modalities.placeholders import FeatureRows, Piece
from modalities.sampling import Timeline, sample_frames
from modalities.tiled.config import PixelOptions, TiledConfig, read_pixel_options, square
from modalities.video_rows import VideoRows, step_rows, unit_steps

_VIDEO = "video"
Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class FramePrompt:
    """Holds the tokens that stand before and after the rows of a frame in InternVL's prompts. Each frame (or group of
    frames that are averaged) has the text `Frame1: `, `Frame2: ` and so on, then its rows between these two tokens."""

    start: int
    end: int


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
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    def units(self, data: bytes, item: MediaItem) -> Iterator[EncoderInput]:
        """Yields the units of a video, each as soon as its frames are decoded. Raises InvalidMedia for a broken file
        and for one that differs from its plan."""
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
        """Yields the pieces of the prompt that replace the placeholder of plan `index`. Raises ConfigError if the
        family writes text between frames and `tokenize` is None."""
        num_rows = sum(plan.unit_tokens)
        if self.prompt is None:
            yield FeatureRows(index, 0, num_rows)
            return
        if tokenize is None:
            raise ConfigError("videos of this family need a tokenizer")
        num_groups = -(-plan.grid[0] // plan.num_pooled_frames)
        for group in range(num_groups):
            mark = "\n" if group else ""
            yield [*tokenize(f"{mark}Frame{group + 1}: "), self.prompt.start]
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
                f"{len(rows.kept)} rows for a frame are more than the limit of {options.max_tokens} tokens"
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


def read_frame_pixels(model_dir: Path, config: TiledConfig, kind: str) -> PixelOptions:
    """Returns the pixel options for video frames. They come from the config of the video processor `kind` if the
    checkpoint has a file for videos, otherwise from that of the image processor. Raises ConfigError for another video
    processor, for one that crops frames, and for frames that do not have the size of a tile."""
    found, is_own = read_video_processor(model_dir)
    if is_own and str(found.get("video_processor_type", kind)).removesuffix("Fast") != kind:
        raise ConfigError(f"unsupported video processor {found['video_processor_type']!r}")
    if square(found.get("size", 384), "size") != config.tile_size:
        raise ConfigError(f"the vision tower takes {config.tile_size} pixels, the video processor gives another size")
    if is_own and (found.get("do_center_crop") or found.get("crop_size")):
        raise ConfigError("the video processor must not crop frames")
    return read_pixel_options({key: value for key, value in found.items() if key != "image_processor_type"}, (kind,))

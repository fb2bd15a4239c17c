"""Computes what a medium of a Qwen vision family takes up in the prompt: tokens, rows, and their positions. The module
is pure and knows nothing of pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fabric.errors import ConfigError
from fabric.messages import MediaItem
from modalities.family import ItemPlan, MediaOptions
from modalities.placeholders import FeatureRows, Piece
from modalities.qwen_vl.config import QwenVLConfig
from modalities.qwen_vl.positions import Block, grid_positions
from modalities.qwen_vl.video_plan import Grid, grid_rows
from modalities.qwen_vl.video_time import SharedTime

Tokenize = Callable[[str], Sequence[int]]


def image_block(config: QwenVLConfig, item: MediaItem) -> Block:
    """Returns the positions of a picture. It is one temporal patch, so its time step has no effect."""
    return Block(grid_positions(item.grid, config.image.merge_size, time_step=0))


def audio_block(config: QwenVLConfig, item: MediaItem) -> Block:
    return Block(np.broadcast_to(np.arange(item.num_tokens, dtype=np.int64), (3, item.num_tokens)))


def video_block(config: QwenVLConfig, item: MediaItem) -> Block:
    """Returns the positions of a video's rows. A row that stands for several steps has the time of the first one."""
    rows = grid_rows(item.grid, config.video.frame.merge_size, MediaOptions.decode(item.options))
    time, merge = config.video_time, config.video.frame.merge_size
    moments = time.positions(item.grid[0], item.row_seconds)[:: rows.num_pooled]
    height, width = item.grid[1] // merge, item.grid[2] // merge
    places = np.indices((height, width), dtype=np.int64).reshape(2, -1)[:, list(rows.kept)]
    ids = np.concatenate([np.repeat(moments, len(rows.kept))[None], np.tile(places, len(moments))])
    return Block(ids, max(height, width) if time.ends_with_sides else None, is_parted=time.is_written)


def pieces(config: QwenVLConfig, plans: Sequence[ItemPlan], index: int, tokenize: Tokenize | None) -> list[Piece]:
    """Returns the pieces that replace the placeholder of plan `index`. Raises ConfigError for text between frames
    without a tokenizer, and for frames or a video with sound if the checkpoint does not name the tokens around
    them."""
    plan = plans[index]
    sounds = [sound for sound, other in enumerate(plans) if other.anchor == index]
    if sounds:
        return list(_woven(config, plans, index, sounds[0]))
    if plan.modality == "video" and config.video_time.is_written:
        return list(_written(config, plan, index, tokenize))
    return [FeatureRows(index, 0, sum(plan.unit_tokens))]


def _written(config: QwenVLConfig, plan: ItemPlan, index: int, tokenize: Tokenize | None) -> Iterator[Piece]:
    """Yields each step with its time before it (Qwen3VLProcessor's `replace_video_token`); for steps that were
    averaged, the time is the mean of their times."""
    start, end = config.marks.vision_start, config.marks.vision_end
    if tokenize is None or start is None or end is None:
        raise ConfigError("videos of this family need a tokenizer and the tokens around a frame")
    size, times = plan.num_pooled_frames, plan.frame_times_s
    num_rows = _rows_of_step(plan)
    for step, at in enumerate(range(0, len(times), size)):
        seconds = sum(times[at : at + size]) / len(times[at : at + size])
        yield [*tokenize(f"<{seconds:.1f} seconds>"), start]
        yield FeatureRows(index, step * num_rows, num_rows)
        yield [end]


def _woven(config: QwenVLConfig, plans: Sequence[ItemPlan], video: int, sound: int) -> Iterator[Piece]:
    """Yields the rows of a video and of its sound, ordered by time (the omni processors'
    `replace_video_with_audio_token`)."""
    plan, time = plans[video], config.video_time
    start, end = config.marks.audio_start, config.marks.audio_end
    if start is None or end is None or not isinstance(time, SharedTime):
        raise ConfigError("the checkpoint does not say how a video is seen and heard at once")
    moments = time.positions(plan.grid[0], plan.row_seconds)[:: plan.num_pooled_frames]
    seen = np.repeat(moments, _rows_of_step(plan))
    is_seen = time.woven(seen, sum(plans[sound].unit_tokens))
    yield [start]
    for begin, stop in _runs(is_seen):
        num_seen = int(is_seen[:begin].sum())
        item, first = (video, num_seen) if is_seen[begin] else (sound, begin - num_seen)
        yield FeatureRows(item, first, stop - begin)
    yield [end]


def _runs(flags: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yields half-open ranges of equal flags."""
    edges = [0, *(np.flatnonzero(np.diff(flags)) + 1).tolist(), len(flags)]
    yield from pairwise(edges)


def _rows_of_step(plan: ItemPlan) -> int:
    """Returns the number of rows of a step, or of several steps that were averaged together."""
    grid: Grid = plan.grid
    return sum(plan.unit_tokens) // -(-grid[0] // plan.num_pooled_frames)

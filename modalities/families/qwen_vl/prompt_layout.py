"""Computes what the media of a Qwen vision family take up in the prompt: tokens, rows, and their positions.

`pieces` says what replaces a placeholder: the rows of a picture or sound, the steps of a video with their times in
words, or the rows of a video and its sound ordered by time. `prompt_positions` computes the M-RoPE positions of the
whole expanded prompt from the grids alone, equal to transformers' `get_rope_index`; the position of each medium's rows
is a `Block`.

The module is pure and knows nothing of pixels. The positions need no token ids: placeholder ranges say where the media
stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fabric.contracts import ConfigError, MediaItem, PlaceholderRange, ProtocolError
from modalities.families.qwen_vl.layout import QwenVLConfig, SharedTime
from modalities.families.qwen_vl.patches import Grid, grid_rows
from modalities.family import FeatureRows, ItemPlan, MediaOptions, Piece, Positions, Tokenize

# ------------------------------------------------------------ the pieces of a medium


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
        raise ConfigError(
            "videos of this family need a tokenizer, and vision_start_token_id and vision_end_token_id in config.json"
        )
    size, times = plan.num_pooled_frames, plan.frame_times_s
    num_rows = _rows_of_step(plan)
    for step, at in enumerate(range(0, len(times), size)):
        seconds = sum(times[at : at + size]) / len(times[at : at + size])
        yield [*tokenize(f"<{seconds:.1f} seconds>", end if step else None), start]
        yield FeatureRows(index, step * num_rows, num_rows)
        yield [end]


def _woven(config: QwenVLConfig, plans: Sequence[ItemPlan], video: int, sound: int) -> Iterator[Piece]:
    """Yields the rows of a video and of its sound, ordered by time (the omni processors'
    `replace_video_with_audio_token`)."""
    plan, time = plans[video], config.video_time
    start, end = config.marks.audio_start, config.marks.audio_end
    if start is None or end is None or not isinstance(time, SharedTime):
        raise ConfigError(
            "the checkpoint does not define how a video and its sound are interleaved: the family must have a common "
            "clock for both, and config.json must name the tokens around a sound"
        )
    moments = time.positions(plan.grid[0], plan.row_seconds)[:: plan.num_pooled_frames]
    seen = np.repeat(moments, _rows_of_step(plan))
    is_seen = time.woven(seen, sum(plans[sound].unit_tokens))
    yield [start]
    for begin, stop in _equal_ranges(is_seen):
        num_seen = int(is_seen[:begin].sum())
        item, first = (video, num_seen) if is_seen[begin] else (sound, begin - num_seen)
        yield FeatureRows(item, first, stop - begin)
    yield [end]


def _equal_ranges(flags: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yields half-open ranges of equal flags."""
    edges = [0, *(np.flatnonzero(np.diff(flags)) + 1).tolist(), len(flags)]
    yield from pairwise(edges)


def _rows_of_step(plan: ItemPlan) -> int:
    """Returns the number of rows of a step, or of several steps that were averaged together."""
    grid: Grid = plan.grid
    return sum(plan.unit_tokens) // -(-grid[0] // plan.num_pooled_frames)


# ------------------------------------------------------------ positions


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Holds the positions of all rows of an item, as if it began at 0."""

    ids: npt.NDArray[np.int64]
    """Holds the positions on the axes time, height and width. Has shape `(3, num_tokens)`."""
    span: int | None = None
    """The text continues at this distance after the start of the block; with None it continues after the largest
    position of the last run."""
    is_parted: bool = False
    """Says whether each run is a block of its own, which starts where the text before it ends."""


BlockPositions = Callable[[MediaItem], Block]


def prompt_positions(
    num_tokens: int,
    placeholders: Sequence[PlaceholderRange],
    media: Sequence[MediaItem],
    modality_to_block: Mapping[str, BlockPositions],
    are_marks_paired: bool = False,
) -> Positions:
    """Returns the positions of the expanded prompt. `placeholders` must be sorted by offset. The runs of one item, and
    of the sound that is anchored to it, share the start of the first run, unless its block is parted. With
    `are_marks_paired`, the two tokens before a video with sound have one position, and so do the two after it
    (Qwen2.5-Omni). Raises ProtocolError if the runs do not fit media or prompt.

    The function walks the prompt run by run. Text takes the next positions, the same on all three axes (time, height,
    width). A medium takes a block of positions that starts where the text before it ended; the block of a sound track
    starts where its video's block starts. The block decides where the text after it continues (`Block.span`)."""
    ids = np.empty((3, num_tokens), dtype=np.int64)
    item_to_block: dict[int, Block] = {}
    item_to_start: dict[int, int] = {}
    paired_to_last = _last_runs(placeholders, media) if are_marks_paired else {}
    at, following = 0, 0
    for index, run in enumerate(placeholders):
        if run.offset < at or run.end > num_tokens or not 0 <= run.item < len(media):
            raise ProtocolError(f"the placeholder run {run} does not fit a prompt of {num_tokens} tokens")
        gap = run.offset - at
        ids[:, at : run.offset] = np.arange(following, following + gap)
        following += gap
        item, root = media[run.item], _root(media[run.item])
        if run.item not in item_to_block:
            item_to_block[run.item] = _block(item, modality_to_block)
        block = item_to_block[run.item]
        if root in paired_to_last and root not in item_to_start and gap:
            following -= 1
            ids[:, run.offset - 1] = following - 1
        start = item_to_start.setdefault(root, following)
        start = following if block.is_parted else start
        found = block.ids[:, _rows(item, run)] + start
        ids[:, run.offset : run.end] = found
        following = int(found.max()) + 1 if block.span is None else start + block.span
        at = run.end
        if paired_to_last.get(root) == index and at < num_tokens:
            ids[:, at] = following
            at += 1
    ids[:, at:] = np.arange(following, following + num_tokens - at)
    # The delta makes generated tokens continue as in `generate`, one after the last position of the prompt.
    # `get_rope_index` itself returns a delta that counts from the largest position, which may lie within a video.
    return Positions(ids, following - at)


def _root(item: MediaItem) -> int:
    """Returns the index of the item whose start this item shares."""
    return item.anchor if item.anchor >= 0 else item.index


def _last_runs(placeholders: Sequence[PlaceholderRange], media: Sequence[MediaItem]) -> dict[int, int]:
    """Maps each video with sound to the last run of the video and its sound."""
    roots = {item.anchor for item in media if item.anchor >= 0}
    items = [(_root(media[run.item]) if 0 <= run.item < len(media) else -1) for run in placeholders]
    return {root: index for index, root in enumerate(items) if root in roots}


def _block(item: MediaItem, modality_to_block: Mapping[str, BlockPositions]) -> Block:
    if item.modality not in modality_to_block:
        raise ProtocolError(f"the model defines no positions for media of modality {item.modality!r}")
    block = modality_to_block[item.modality](item)
    if block.ids.shape[1] != item.num_tokens:
        raise ProtocolError(
            f"the grid {item.grid} of item {item.index} gives {block.ids.shape[1]} rows, but {item.num_tokens} were "
            "planned"
        )
    return block


def _rows(item: MediaItem, run: PlaceholderRange) -> slice:
    """Returns the item's rows that stand in the run. Raises ProtocolError if the run does not fit the item."""
    if not 0 <= run.unit < len(item.unit_tokens):
        raise ProtocolError(f"item {item.index} has {len(item.unit_tokens)} units, but no unit {run.unit}")
    if run.length < 1 or not 0 <= run.row <= item.unit_tokens[run.unit] - run.length:
        raise ProtocolError(f"the placeholder run {run} does not fit unit {run.unit} of item {item.index}")
    start = sum(item.unit_tokens[: run.unit]) + run.row
    return slice(start, start + run.length)


# ------------------------------------------------------------ the positions of one medium


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


def grid_positions(grid: tuple[int, int, int], merge_size: int, time_step: int) -> npt.NDArray[np.int64]:
    """Returns the positions of a grid of patches (t, h, w), row-major after merging: `(3, t * h * w / merge_size**2)`.
    Time advances by `time_step` from one temporal patch to the next."""
    time, height, width = grid[0], grid[1] // merge_size, grid[2] // merge_size
    block = np.indices((time, height, width), dtype=np.int64).reshape(3, -1)
    block[0] *= time_step
    return block

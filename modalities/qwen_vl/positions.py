"""Computes the M-RoPE positions of a whole prompt from the grids alone, equal to transformers' `get_rope_index`.

The code walks a prompt run by run. Text takes the next positions, the same on all three axes (time, height, width). A
medium takes a block of positions that starts where the text before it ended; the block of a sound track starts where
its video's block starts. The block decides where the text after it continues (`Block.span`). The module knows nothing
of token ids: placeholder ranges say where the media stand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fabric.errors import ProtocolError
from fabric.messages import MediaItem, PlaceholderRange
from modalities.family import Positions


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


def grid_positions(grid: tuple[int, int, int], merge_size: int, time_step: int) -> npt.NDArray[np.int64]:
    """Returns the positions of a grid of patches (t, h, w), row-major after merging: `(3, t * h * w / merge_size**2)`.
    Time advances by `time_step` from one temporal patch to the next."""
    time, height, width = grid[0], grid[1] // merge_size, grid[2] // merge_size
    block = np.indices((time, height, width), dtype=np.int64).reshape(3, -1)
    block[0] *= time_step
    return block


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
    (Qwen2.5-Omni). Raises ProtocolError if the runs do not fit media or prompt."""
    ids = np.empty((3, num_tokens), dtype=np.int64)
    item_to_block: dict[int, Block] = {}
    item_to_start: dict[int, int] = {}
    paired_to_last = _last_runs(placeholders, media) if are_marks_paired else {}
    at, following = 0, 0
    for index, run in enumerate(placeholders):
        if run.offset < at or run.end > num_tokens or not 0 <= run.item < len(media):
            raise ProtocolError(f"placeholder run {run} does not fit a prompt of {num_tokens} tokens")
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
        raise ProtocolError(f"no positions for media of modality {item.modality!r}")
    block = modality_to_block[item.modality](item)
    if block.ids.shape[1] != item.num_tokens:
        raise ProtocolError(
            f"item {item.index}: grid {item.grid} gives {block.ids.shape[1]} rows, not {item.num_tokens}"
        )
    return block


def _rows(item: MediaItem, run: PlaceholderRange) -> slice:
    """Returns the item's rows that stand in the run. Raises ProtocolError if the run does not fit the item."""
    if not 0 <= run.unit < len(item.unit_tokens):
        raise ProtocolError(f"item {item.index} has no unit {run.unit}")
    if run.length < 1 or not 0 <= run.row <= item.unit_tokens[run.unit] - run.length:
        raise ProtocolError(f"placeholder run {run} does not fit unit {run.unit} of item {item.index}")
    start = sum(item.unit_tokens[: run.unit]) + run.row
    return slice(start, start + run.length)

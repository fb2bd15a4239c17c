"""M-RoPE positions of a whole prompt, from the grids alone: equal to transformers' `get_rope_index`.

A prompt is walked in runs. Text takes the next positions, the same on all three axes (time, height, width). A medium
takes a block of positions that starts where the text ended; the text behind it goes on after the block's largest
position. Knows no token ids: placeholder ranges say where the media stand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fabric.errors import ProtocolError
from fabric.messages import MediaItem, PlaceholderRange
from modalities.family import Positions

BlockPositions = Callable[[MediaItem], npt.NDArray[np.int64]]
"""Positions of all rows of an item, `(3, num_tokens)`, as if it began at 0."""


def grid_positions(grid: tuple[int, int, int], merge_size: int, time_step: int) -> npt.NDArray[np.int64]:
    """Of a grid of patches (t, h, w), row-major after merging: `(3, t * h * w / merge_size**2)`. Time advances by
    `time_step` from one temporal patch to the next."""
    time, height, width = grid[0], grid[1] // merge_size, grid[2] // merge_size
    block = np.indices((time, height, width), dtype=np.int64).reshape(3, -1)
    block[0] *= time_step
    return block


def prompt_positions(
    num_tokens: int,
    placeholders: Sequence[PlaceholderRange],
    media: Sequence[MediaItem],
    modality_to_block: Mapping[str, BlockPositions],
) -> Positions:
    """Of the expanded prompt. `placeholders` sorted by offset; the runs of one item may be parted by text and share
    the block that begins at the item's first run. Raises ProtocolError if the runs do not fit media or prompt."""
    ids = np.empty((3, num_tokens), dtype=np.int64)
    item_to_block: dict[int, npt.NDArray[np.int64]] = {}
    at, following = 0, 0
    for run in placeholders:
        if run.offset < at or run.end > num_tokens or not 0 <= run.item < len(media):
            raise ProtocolError(f"placeholder run {run} does not fit a prompt of {num_tokens} tokens")
        gap = run.offset - at
        ids[:, at : run.offset] = np.arange(following, following + gap)
        following += gap
        if run.item not in item_to_block:
            item_to_block[run.item] = _block(media[run.item], modality_to_block) + following
        rows = _rows(media[run.item], run)
        ids[:, run.offset : run.end] = item_to_block[run.item][:, rows]
        following = max(following, int(ids[:, run.offset : run.end].max()) + 1)
        at = run.end
    ids[:, at:] = np.arange(following, following + num_tokens - at)
    following += num_tokens - at
    return Positions(ids, following - num_tokens)


def _block(item: MediaItem, modality_to_block: Mapping[str, BlockPositions]) -> npt.NDArray[np.int64]:
    if item.modality not in modality_to_block:
        raise ProtocolError(f"no positions for media of modality {item.modality!r}")
    block = modality_to_block[item.modality](item)
    if block.shape[1] != item.num_tokens:
        raise ProtocolError(f"item {item.index}: grid {item.grid} gives {block.shape[1]} rows, not {item.num_tokens}")
    return block


def _rows(item: MediaItem, run: PlaceholderRange) -> slice:
    """The item's rows that stand in the run."""
    if not 0 <= run.unit < len(item.unit_tokens):
        raise ProtocolError(f"item {item.index} has no unit {run.unit}")
    if run.length < 1 or not 0 <= run.row <= item.unit_tokens[run.unit] - run.length:
        raise ProtocolError(f"placeholder run {run} does not fit unit {run.unit} of item {item.index}")
    start = sum(item.unit_tokens[: run.unit]) + run.row
    return slice(start, start + run.length)

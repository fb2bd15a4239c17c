"""Cuts a spectrogram into units so that each unit, encoded alone, gives exactly its rows of the whole spectrogram.

Each tower's convolutions and attention stay within chunks of mel frames; a unit is one or more chunks. This module
knows nothing of weights.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Window(NamedTuple):
    """A `Window` holds the size of one unit: its mel frames, and the rows (tokens) that they become."""

    num_frames: int
    num_tokens: int


class Cutting(Protocol):
    """A `Cutting` knows how many mel frames a tower takes in one unit, and how many rows they become."""

    @property
    def unit_frames(self) -> int:
        """Returns the number of mel frames of a full unit."""
        ...

    def num_tokens(self, num_frames: int) -> int:
        """Returns the number of rows that the first `num_frames` consecutive mel frames of a unit become."""
        ...


def cut(num_frames: int, cutting: Cutting) -> tuple[Window, ...]:
    """Returns the units of a spectrogram. A remainder that gives no row of its own joins the unit before it. The result
    is empty if the whole spectrogram gives no row."""
    counts = [cutting.unit_frames] * (num_frames // cutting.unit_frames)
    if rest := num_frames % cutting.unit_frames:
        counts.append(rest)
    if len(counts) > 1 and cutting.num_tokens(counts[-1]) == 0:
        counts[-2:] = [counts[-2] + counts[-1]]
    return tuple(Window(count, cutting.num_tokens(count)) for count in counts if cutting.num_tokens(count))


class PooledChunks(NamedTuple):
    """Counts the rows of Qwen2.5-Omni and Qwen2-Audio (`_get_feat_extract_output_lengths`): a convolution halves the
    frames within each chunk, then pooling of pairs over the whole unit halves them a second time. `unit_frames` must
    be a whole number of chunks and a multiple of four."""

    unit_frames: int

    def num_tokens(self, num_frames: int) -> int:
        return (num_frames + 1) // 2 // 2


class ConvolvedChunks(NamedTuple):
    """Counts the rows of Qwen3-Omni (`_get_feat_extract_output_lengths`): three convolutions halve the frames within
    each chunk. The reference counts 13 rows for a full chunk."""

    chunk_frames: int
    unit_frames: int

    def num_tokens(self, num_frames: int) -> int:
        full, rest = divmod(num_frames, self.chunk_frames)
        return full * halved(self.chunk_frames, 3) + halved(rest, 3)


def halved(num_frames: int, num_times: int) -> int:
    """Returns the number of frames that remain after `num_times` convolutions of stride two and padding one."""
    for _ in range(num_times):
        num_frames = (num_frames + 1) // 2
    return num_frames

"""Where a spectrogram may be cut into units so that each, encoded alone, gives exactly its rows of the whole.

Each tower's convolutions and attention stay within chunks of mel frames; a unit is some chunks. Knows no weights.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Window(NamedTuple):
    """A unit."""

    num_frames: int
    num_tokens: int


class Cutting(Protocol):
    @property
    def unit_frames(self) -> int:
        """Mel frames of a full unit."""
        ...

    def num_tokens(self, num_frames: int) -> int:
        """Rows that so many frames in a row become, from the beginning of a unit on."""
        ...


def cut(num_frames: int, cutting: Cutting) -> tuple[Window, ...]:
    """The units of a spectrogram. A rest that gives no row of its own joins the unit before it; nothing at all if the
    whole gives none."""
    counts = [cutting.unit_frames] * (num_frames // cutting.unit_frames)
    if rest := num_frames % cutting.unit_frames:
        counts.append(rest)
    if len(counts) > 1 and cutting.num_tokens(counts[-1]) == 0:
        counts[-2:] = [counts[-2] + counts[-1]]
    return tuple(Window(count, cutting.num_tokens(count)) for count in counts if cutting.num_tokens(count))


class PooledChunks(NamedTuple):
    """One halving by convolution within each chunk, one by pooling pairs over the whole (Qwen2.5-Omni, Qwen2-Audio:
    `_get_feat_extract_output_lengths`). `unit_frames` must be whole chunks and a multiple of four."""

    unit_frames: int

    def num_tokens(self, num_frames: int) -> int:
        return (num_frames + 1) // 2 // 2


class ConvolvedChunks(NamedTuple):
    """Three halvings by convolution within each chunk (Qwen3-Omni: `_get_feat_extract_output_lengths`, which counts
    what is left of a full chunk as 13)."""

    chunk_frames: int
    unit_frames: int

    def num_tokens(self, num_frames: int) -> int:
        full, rest = divmod(num_frames, self.chunk_frames)
        return full * halved(self.chunk_frames, 3) + halved(rest, 3)


def halved(num_frames: int, num_times: int) -> int:
    """Frames behind so many convolutions of stride two and padding one."""
    for _ in range(num_times):
        num_frames = (num_frames + 1) // 2
    return num_frames

"""Computes the times of a video's steps, in the families' four ways: as positions, as text, and together with the sound
that belongs to the video.

A *step* is a temporal patch. The rules are those of transformers' `get_rope_index` and of the families' processors. The
module is pure and knows nothing of pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from modalities.family import MediaOptions, VideoHeader
from modalities.qwen_vl.video_plan import VideoCut

Ints = npt.NDArray[np.int64]


class VideoTime(Protocol):
    """A `VideoTime` is one family's rule for the times of a video's steps."""

    @property
    def is_written(self) -> bool:
        """Says whether steps stand in the prompt one by one, each with its time as text before it."""
        ...

    @property
    def ends_with_sides(self) -> bool:
        """Says whether the text after a video continues at the video's start plus the longer side of a frame's merged
        grid, independent of the video's duration."""
        ...

    def row_seconds(self, cut: VideoCut, header: VideoHeader, options: MediaOptions, step: int) -> float:
        """Returns the seconds from one step of `step` frames to the next; 0.0 where positions do not depend on it."""
        ...

    def positions(self, num_steps: int, row_seconds: float) -> Ints:
        """Returns the positions of the steps on the time axis, `(num_steps,)`, from 0."""
        ...


@dataclass(frozen=True, slots=True)
class CountedTime:
    """Implements Qwen2-VL's rule: each step has the next position."""

    is_written = False
    ends_with_sides = True

    def row_seconds(self, cut: VideoCut, header: VideoHeader, options: MediaOptions, step: int) -> float:
        return 0.0

    def positions(self, num_steps: int, row_seconds: float) -> Ints:
        return np.arange(num_steps, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class WrittenTime:
    """Implements Qwen3-VL's rule: every step is a block of its own, after its time in words."""

    is_written = True
    ends_with_sides = True

    def row_seconds(self, cut: VideoCut, header: VideoHeader, options: MediaOptions, step: int) -> float:
        return 0.0

    def positions(self, num_steps: int, row_seconds: float) -> Ints:
        return np.zeros(num_steps, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class MeasuredTime:
    """Implements Qwen2.5-VL's rule: there are `per_second` positions per second, by the time between the frames that
    are actually taken."""

    per_second: float
    is_written = False
    ends_with_sides = True

    def row_seconds(self, cut: VideoCut, header: VideoHeader, options: MediaOptions, step: int) -> float:
        return step * header.seconds / cut.num_moments

    def positions(self, num_steps: int, row_seconds: float) -> Ints:
        # The reference computes in float32 and truncates, so this code does too.
        interval = np.float32(self.per_second) * np.float32(row_seconds)
        return (np.arange(num_steps, dtype=np.float32) * interval).astype(np.int64)


@dataclass(frozen=True, slots=True)
class SharedTime:
    """Implements the Omni families' rule: pictures and sound share one clock.

    The time between two steps is the one that was asked for (the reference's `fps`), unless limits made it longer: then
    it is the time between the frames that are actually taken, since the sound continues unchanged."""

    per_second: int
    """Counts the positions per second, and for sound also the rows per second."""
    is_rounded_up: bool
    """Says whether fractions of positions are rounded up. This keeps the reference's order of video and sound rows
    (Qwen3-Omni), where positions have fractions. Otherwise fractions are cut off, as in the reference
    (Qwen2.5-Omni)."""
    chunk: int
    """Rows of video and rows of sound take turns every `chunk` positions (Qwen2.5-Omni). With 0 the rows are merged by
    position."""
    is_written = False
    ends_with_sides = False

    def row_seconds(self, cut: VideoCut, header: VideoHeader, options: MediaOptions, step: int) -> float:
        return step / options.fps if cut.is_as_asked else step * header.seconds / cut.num_moments

    def positions(self, num_steps: int, row_seconds: float) -> Ints:
        if self.is_rounded_up:
            rounded: Ints = np.ceil(np.arange(num_steps) * row_seconds * self.per_second).astype(np.int64)
            return rounded
        found = np.arange(num_steps, dtype=np.float32) * np.float32(row_seconds) * np.float32(self.per_second)
        return found.astype(np.int64)

    def woven(self, seen: Ints, num_heard: int) -> npt.NDArray[np.bool_]:
        """Returns `(len(seen) + num_heard,)`: True where a row of the video stands, and False where one of the sound
        stands. `seen` holds the positions of the video's rows, ascending; those of the sound count up from 0."""
        heard = np.arange(num_heard, dtype=np.int64)
        keys = [seen, heard] if not self.chunk else [_chunks(seen, self.chunk), _chunks(heard, self.chunk)]
        order = np.argsort(np.concatenate(keys), kind="stable")
        return order < len(seen)


def _chunks(positions: Ints, size: int) -> Ints:
    """Returns the chunk of each row: a row opens at most one chunk (`get_chunked_index` of the reference)."""
    found = np.zeros(len(positions), dtype=np.int64)
    chunk = 0
    for index, position in enumerate(positions.tolist()):
        if position >= (chunk + 1) * size:
            chunk += 1
        found[index] = chunk
    return found

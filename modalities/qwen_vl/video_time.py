"""When the steps of a video are, in the families' four ways: positions, text, and sound that runs along. Pure.

A *step* is a temporal patch. Rules are those of transformers' `get_rope_index` and of the families' processors.
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
    @property
    def is_written(self) -> bool:
        """Steps stand in the prompt one by one, the time in front of each as text."""
        ...

    @property
    def ends_with_sides(self) -> bool:
        """The text behind a medium goes on as far from its begin as a frame is long, whatever its duration."""
        ...

    def row_seconds(self, cut: VideoCut, header: VideoHeader, options: MediaOptions, step: int) -> float:
        """From one step of `step` frames to the next; 0.0 where positions do not depend on it."""
        ...

    def positions(self, num_steps: int, row_seconds: float) -> Ints:
        """`(num_steps,)`, from 0."""
        ...


@dataclass(frozen=True, slots=True)
class CountedTime:
    """Qwen2-VL: a position for each step."""

    is_written = False
    ends_with_sides = True

    def row_seconds(self, cut: VideoCut, header: VideoHeader, options: MediaOptions, step: int) -> float:
        return 0.0

    def positions(self, num_steps: int, row_seconds: float) -> Ints:
        return np.arange(num_steps, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class WrittenTime:
    """Qwen3-VL: every step is a block of its own, behind its time in words."""

    is_written = True
    ends_with_sides = True

    def row_seconds(self, cut: VideoCut, header: VideoHeader, options: MediaOptions, step: int) -> float:
        return 0.0

    def positions(self, num_steps: int, row_seconds: float) -> Ints:
        return np.zeros(num_steps, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class MeasuredTime:
    """Qwen2.5-VL: so many positions a second, by the time between the frames that are really looked at."""

    per_second: float
    is_written = False
    ends_with_sides = True

    def row_seconds(self, cut: VideoCut, header: VideoHeader, options: MediaOptions, step: int) -> float:
        return step * header.seconds / cut.num_moments

    def positions(self, num_steps: int, row_seconds: float) -> Ints:
        # Truncated, in float32, as the reference does.
        interval = np.float32(self.per_second) * np.float32(row_seconds)
        return (np.arange(num_steps, dtype=np.float32) * interval).astype(np.int64)


@dataclass(frozen=True, slots=True)
class SharedTime:
    """The Omni families: one clock for what is seen and what is heard.

    The time between two steps is what was asked for (the reference's `fps`), unless limits made it longer: then it is
    the time between the frames that are really looked at, since the sound runs on regardless."""

    per_second: int
    """Positions; of sound, also rows."""
    is_rounded_up: bool
    """The reference (Qwen3-Omni) has fractions of positions; here they are rounded up, which keeps its order of what
    is seen and what is heard. Otherwise they are cut off, as the reference does (Qwen2.5-Omni)."""
    chunk: int
    """Positions that are seen, then those that are heard, in turn (Qwen2.5-Omni); 0: merged by position."""
    is_written = False
    ends_with_sides = False

    def row_seconds(self, cut: VideoCut, header: VideoHeader, options: MediaOptions, step: int) -> float:
        return step / options.fps if cut.is_as_asked else step * header.seconds / cut.num_moments

    def positions(self, num_steps: int, row_seconds: float) -> Ints:
        if self.is_rounded_up:
            return np.ceil(np.arange(num_steps) * row_seconds * self.per_second).astype(np.int64)
        found = np.arange(num_steps, dtype=np.float32) * np.float32(row_seconds) * np.float32(self.per_second)
        return found.astype(np.int64)

    def woven(self, seen: Ints, num_heard: int) -> npt.NDArray[np.bool_]:
        """`(len(seen) + num_heard,)`: where a row of the video stands, and where one of the sound. `seen` are the
        positions of the video's rows, ascending; those of the sound count up from 0."""
        heard = np.arange(num_heard, dtype=np.int64)
        keys = [seen, heard] if not self.chunk else [_chunks(seen, self.chunk), _chunks(heard, self.chunk)]
        order = np.argsort(np.concatenate(keys), kind="stable")
        return order < len(seen)


def _chunks(positions: Ints, size: int) -> Ints:
    """In which chunk each row is: a row opens at most one (`get_chunked_index` of the reference)."""
    found = np.zeros(len(positions), dtype=np.int64)
    chunk = 0
    for index, position in enumerate(positions.tolist()):
        if position >= (chunk + 1) * size:
            chunk += 1
        found[index] = chunk
    return found

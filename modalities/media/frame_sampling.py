"""Chooses the frames of a video that the model sees, and the rows of their features that remain, before any frame is
decoded.

The number of frames is a contract: the plan counts tokens by it. The arguments of `sample_frames` say how a family's
reference processor counts (`sample_frames` of transformers' `Qwen2VLVideoProcessor` and `Qwen3VLVideoProcessor`). These
processors treat a video as a number of frames at a constant rate. A file of variable rate is sampled as if it had been
converted to a constant rate first (`Timeline`). So frames are spread evenly over time, and the times that the model
receives are true (docs/adr/0032-variable-frame-rates.md).

`VideoRows` keeps some rows of each step and averages them over several steps. A *step* is a temporal patch or a frame:
the rows that an encoder makes at once and independently of other steps. So `unit_steps` may cut a video into units (the
parts that are encoded on their own) between any two steps.

This module is pure, and knows nothing of families, pixels or tensors.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fabric.contracts import InvalidMedia
from modalities.family import DEFAULT_OPTIONS, MediaOptions, VideoHeader

# ------------------------------------------------------------ the frames of a video

Spacing = Literal["stride", "ends"]


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """A `Timeline` is a video at a constant rate: it has `num_frames` slots, each of which shows one frame of the file.

    A file of constant rate is its own timeline. The timeline of a file of variable rate is what FFmpeg's `fps` filter
    makes of it, at the rate of the two frames that are closest together: every frame moves to the nearest slot, and
    stays until the next frame."""

    num_frames: int
    seconds: float
    _times_s: npt.NDArray[np.float64] | None = None

    @staticmethod
    def of(header: VideoHeader, options: MediaOptions = DEFAULT_OPTIONS) -> Timeline:
        """Returns the timeline that the sampling of `options` needs. Key frames, which only decoding finds, are as many
        as at a constant rate, since each of them is another frame. Raises InvalidMedia if the video has no frames."""
        if header.num_frames < 1 or header.seconds <= 0:
            raise InvalidMedia("the video has no frames")
        times_s = header.times_s
        if times_s is None or options.sampling == "keyframe":
            return Timeline(header.num_frames, header.seconds)
        gaps_s = np.diff(times_s)
        shortest_s = gaps_s[gaps_s > 0].min(initial=header.seconds)
        return Timeline(max(round(header.seconds / shortest_s), 1), header.seconds, times_s)

    @property
    def is_converted(self) -> bool:
        """Returns whether the file's own rate varies."""
        return self._times_s is not None

    def times_s(self, slots: Sequence[int]) -> tuple[float, ...]:
        """Returns the times at which the slots begin."""
        fps = self.num_frames / self.seconds
        return tuple(slot / fps for slot in slots)

    def frames(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Returns the file's frames that the slots show, one for each slot. They ascend, and a frame repeats if it is
        shown for longer than from one slot to the next."""
        if self._times_s is None:
            return tuple(slots)
        ends_s = (np.asarray(slots) + 0.5) * (self.seconds / self.num_frames)
        found = np.searchsorted(self._times_s, ends_s, side="right") - 1
        return tuple(np.maximum(found, 0).tolist())


def sample_frames(
    num_frames: int,
    seconds: float,
    options: MediaOptions,
    *,
    multiple: int = 1,
    min_frames: int = 1,
    max_frames: int | None = None,
    spacing: Spacing = "stride",
) -> tuple[int, ...]:
    """Returns the indices of the sampled frames in ascending order. Their number is a multiple of `multiple` (the
    family's temporal patch); the last one is repeated if necessary. For `keyframe` they stand in for the frames that
    the decoder finds (`choose_keyframes`), whose number is the same.

    `max_frames` is the number that the family and the token budget allow; the options' own limit holds too. `spacing`
    is the rule of the reference: `stride` steps evenly from the first frame and rounds the number down to a multiple
    (Qwen2-VL, Qwen2.5, Omni), and `ends` goes from the first to the last frame (Qwen3-VL). Each reduction halves the
    number. Raises InvalidMedia if the video has no frames, or if the way to sample is unknown."""
    if num_frames < 1:
        raise InvalidMedia("the video has no frames")
    most = min(options.max_frames, max_frames if max_frames is not None else options.max_frames)
    most = max(most // multiple, 1) * multiple
    if options.sampling == "fps":
        # The order of operations is the reference's, so that the result is a whole number in the same cases.
        wanted = max(seconds * options.fps, min_frames)
    elif options.sampling in ("uniform", "keyframe"):
        wanted = float(most)
    else:
        raise InvalidMedia(f"frames are sampled by `fps`, `uniform` or `keyframe`, not by {options.sampling!r}")
    count = max(int(min(wanted, most, num_frames)) >> options.reduction, 1)
    if spacing == "stride" and count > multiple:
        count = count // multiple * multiple
    indices = _strided(num_frames, count) if spacing == "stride" else _between_ends(num_frames, count)
    return padded(indices, math.ceil(count / multiple) * multiple)


def padded(indices: Sequence[int], count: int) -> tuple[int, ...]:
    """Returns the indices with the last one repeated up to `count`."""
    return (*indices, *[indices[-1]] * (count - len(indices)))


def _strided(num_frames: int, count: int) -> list[int]:
    """Returns the same indices as `torch.arange(0, num_frames, num_frames / count).int()`. Single precision rounds some
    numbers up to whole numbers that double precision leaves just below. The results are equal for up to 20,000 frames;
    for more, torch itself depends on the width of the processor's vectors. torch's last index is sometimes one too many
    and then lies beyond the video."""
    indices: list[int] = (np.arange(count) * (num_frames / count)).astype(np.float32).astype(np.int64).tolist()
    return indices


def _between_ends(num_frames: int, count: int) -> list[int]:
    indices: list[int] = np.linspace(0, num_frames - 1, count).round().astype(np.int64).tolist()
    return indices


# ------------------------------------------------------------ key frames

CUT_DIFFERENCE = 30.0
"""If the grey levels of two neighbouring probed frames differ by more than this on average, the later one is a key
frame (the article on multimodal routing in Dynamo, docs/references.md)."""
NUM_PROBES = 200
"""Counts approximately the frames that are compared to find key frames."""


def probed_frames(header: VideoHeader) -> tuple[int, ...]:
    """Returns the frames that are compared to find cuts, in ascending order and without repeats."""
    timeline = Timeline.of(header)
    slots = range(0, timeline.num_frames, max(1, timeline.num_frames // NUM_PROBES))
    return tuple(dict.fromkeys(timeline.frames(slots)))


def choose_keyframes(
    header: VideoHeader, probes: Sequence[int], differences: Sequence[float], count: int
) -> tuple[int, ...]:
    """Returns exactly `count` frames: the first, and those of `probes` that differ from the probe before by more than
    `CUT_DIFFERENCE`. `differences` holds these differences, and its first value is not used.

    If there are too many, those with the smallest differences are left out. If there are too few, the frame in the
    middle of the gap that lasts longest is added until there are enough. If the video is too short for that, the last
    frame is repeated."""
    if header.times_s is None:  # There is one time for each frame, and one for the end.
        times = np.arange(header.num_frames + 1, dtype=np.float64)
    else:
        times = np.append(header.times_s, max(header.seconds, header.times_s[-1]))
    cuts = [(change, at) for change, at in zip(differences[1:], probes[1:], strict=True) if change > CUT_DIFFERENCE]
    cuts.sort(key=lambda cut: (-cut[0], cut[1]))
    chosen = sorted({0, *(at for _, at in cuts[: count - 1])})
    # A gap is the frames between two chosen ones, or after the last one. Its tuple holds the negative duration, the
    # chosen frame before the gap, and the chosen frame after it (or the number of frames).
    gaps: list[tuple[float, int, int]] = []

    def add_gap(begin: int, end: int) -> None:
        if end - begin > 1:
            heapq.heappush(gaps, (float(times[begin] - times[end]), begin, end))

    for begin, end in zip(chosen, [*chosen[1:], header.num_frames], strict=True):
        add_gap(begin, end)
    while len(chosen) < count and gaps:
        _, begin, end = heapq.heappop(gaps)
        shown = int(np.searchsorted(times, (times[begin] + times[end]) / 2, side="right")) - 1
        middle = min(max(shown, begin + 1), end - 1)
        chosen.append(middle)
        add_gap(begin, middle)
        add_gap(middle, end)
    return padded(sorted(chosen), count)


# ------------------------------------------------------------ the rows that remain

UNIT_PATCHES = 1024
"""Limits the patches of a unit, approximately: it is about a picture of 512 x 512. A unit is encoded while the next is
still being decoded, and no unit is much larger than this."""


@dataclass(frozen=True, slots=True)
class VideoRows:
    """Says which rows of a video's steps remain and how many steps are averaged."""

    num_pooled: int
    """Counts the consecutive steps whose rows are averaged."""
    kept: tuple[int, ...]
    """Lists the rows of a step that are kept, in ascending order."""

    def num_rows(self, num_steps: int) -> int:
        return -(-num_steps // self.num_pooled) * len(self.kept)

    def geometry(self) -> tuple[int, ...]:
        """Returns the numbers in the form in which an encoder's input carries them."""
        return (self.num_pooled, *self.kept)

    @staticmethod
    def of_geometry(geometry: tuple[int, ...]) -> VideoRows:
        return VideoRows(geometry[0], geometry[1:])


def step_rows(num_rows: int, options: MediaOptions) -> VideoRows:
    """Returns which rows of a step are kept, out of the `num_rows` rows that the encoder makes; at least one row is
    kept."""
    num_kept = min(max(round(num_rows * options.keep_fraction), 1), num_rows)
    kept = tuple((2 * index + 1) * num_rows // (2 * num_kept) for index in range(num_kept))
    return VideoRows(max(options.num_pooled_frames, 1), kept)


def unit_steps(num_steps: int, num_patches: int, num_pooled: int) -> tuple[int, ...]:
    """Returns the number of steps in each unit, where a step has `num_patches` patches. Steps that are averaged stay
    together."""
    size = max(UNIT_PATCHES // num_patches // num_pooled, 1) * num_pooled
    whole, rest = divmod(num_steps, size)
    return (size,) * whole + ((rest,) if rest else ())

"""Which frames of a video are looked at, decided before any of them is decoded. Pure.

The number of frames is a contract: the plan counts tokens by it. Knows no family; those say by their arguments how
their reference processors count (transformers' `Qwen2VLVideoProcessor` and `Qwen3VLVideoProcessor`, `sample_frames`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from fabric.errors import InvalidMedia
from modalities.family import MediaOptions

CUT_DIFFERENCE = 30.0
"""Mean difference of grey levels from one probed frame to the next beyond which it is a key frame (seed 003)."""
NUM_PROBES = 200
"""Frames that are compared for that, about."""

Spacing = Literal["stride", "ends"]


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
    """Indices of frames, ascending; their number is a multiple of `multiple` (the family's temporal patch), for which
    the last one is repeated if need be. For `keyframe` they stand in for the frames that the decoder finds
    (`choose_keyframes`): as many as these.

    `max_frames` is what the family and the token budget allow; the options' own limit holds besides. `spacing` is the
    rule of the reference: `stride` steps evenly from the first frame and counts down to a multiple (Qwen2-VL,
    Qwen2.5, Omni), `ends` goes from the first to the last frame (Qwen3-VL). A reduction halves what would be taken.
    Raises InvalidMedia for a video without frames, or an unknown way to sample."""
    if num_frames < 1:
        raise InvalidMedia("the video has no frames")
    most = min(options.max_frames, max_frames if max_frames is not None else options.max_frames)
    most = max(most // multiple, 1) * multiple
    if options.sampling == "fps":
        # The order of operations is the reference's: what is a whole number there must be one here.
        wanted = max(seconds * options.fps, min_frames)
    elif options.sampling in ("uniform", "keyframe"):
        wanted = float(most)
    else:
        raise InvalidMedia(f"unknown way to sample frames: {options.sampling!r}")
    count = max(int(min(wanted, most, num_frames)) >> options.reduction, 1)
    if spacing == "stride" and count > multiple:
        count = count // multiple * multiple
    indices = _strided(num_frames, count) if spacing == "stride" else _between_ends(num_frames, count)
    return padded(indices, math.ceil(count / multiple) * multiple)


def padded(indices: Sequence[int], count: int) -> tuple[int, ...]:
    """The last one repeated up to `count`."""
    return (*indices, *[indices[-1]] * (count - len(indices)))


def _strided(num_frames: int, count: int) -> list[int]:
    """As `torch.arange(0, num_frames, num_frames / count).int()`: single precision, which rounds up to whole numbers
    what double precision leaves just below. Equal to it for up to 20,000 frames; for more, torch itself depends on
    the width of the processor's vectors. Its last index is at times one too many, and then beyond the video."""
    indices: list[int] = (np.arange(count) * (num_frames / count)).astype(np.float32).astype(np.int64).tolist()
    return indices


def _between_ends(num_frames: int, count: int) -> list[int]:
    indices: list[int] = np.linspace(0, num_frames - 1, count).round().astype(np.int64).tolist()
    return indices


def probed_frames(num_frames: int) -> range:
    """The frames that are compared to find cuts."""
    return range(0, num_frames, max(1, num_frames // NUM_PROBES))


def choose_keyframes(
    num_frames: int, probes: Sequence[int], differences: Sequence[float], count: int
) -> tuple[int, ...]:
    """Exactly `count` frames: the first, and those of `probes` that differ from the probe before by more than
    `CUT_DIFFERENCE` (`differences`, of which the first is not looked at).

    Of too many, those of the smallest differences are left out; if there are too few, the middle of the widest gap is
    added until there are enough; where the video is too short for that, the last frame is repeated."""
    cuts = [(change, at) for change, at in zip(differences[1:], probes[1:], strict=True) if change > CUT_DIFFERENCE]
    cuts.sort(key=lambda cut: (-cut[0], cut[1]))
    chosen = sorted({0, *(at for _, at in cuts[: count - 1])})
    # A gap is the frames between two chosen ones, or behind the last: (-how many, where it begins, where it ends).
    gaps = [(begin + 1 - end, begin, end) for begin, end in zip(chosen, [*chosen[1:], num_frames], strict=True)]
    heapq.heapify(gaps)
    while len(chosen) < count and gaps[0][0] < 0:
        _, begin, end = heapq.heappop(gaps)
        middle = (begin + end) // 2
        chosen.append(middle)
        for left, right in ((begin, middle), (middle, end)):
            heapq.heappush(gaps, (left + 1 - right, left, right))
    return padded(sorted(chosen), count)

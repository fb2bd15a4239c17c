"""Finds the largest medium of each modality that passes the limits, by asking the model family how it would process
the headers of many possible files.

Families scale, tile and sample in their own ways, so the module tries headers instead of deriving the largest one: it
tries aspect ratios of small numbers at several areas up to the limit, and several lengths of videos and sounds. A
medium between those that it tries may need one more row of patches or tokens; if such a medium does not fit, the
cluster still refuses its request cleanly when it arrives. The module decodes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from encoder_pool.planning import split_cost
from fabric.contracts import InvalidMedia
from llm_workers.scheduling import LargestItem
from modalities.family import (
    DEFAULT_OPTIONS,
    AudioHeader,
    Family,
    ImageHeader,
    ItemPlan,
    MediaHeader,
    MediaOptions,
    VideoHeader,
)
from modalities.media import MediaLimits

MAX_RATIO = 16
MAX_VIDEO_RATIO = 4
"""Limits the aspect ratios of videos. It is lower than for pictures, because each ratio is tried at several lengths
too."""
NUM_AREAS = 8
"""Counts the areas that are tried; each is a quarter of the previous one, because some families make the most tokens of
a picture that needs no scaling."""
NUM_LENGTHS = 6
"""Counts the lengths that are tried; each is half of the previous one, because some families make frames smaller when
there are many."""
VIDEO_FPS = 25
SAMPLE_RATE = 16_000


def largest_item(
    family: Family, modality: str, limits: MediaLimits, options: MediaOptions = DEFAULT_OPTIONS
) -> LargestItem | None:
    """Returns the largest item of a modality, or None if this module can't enumerate the modality's headers or the
    family does not take the modality. `options` are the options of videos."""
    if modality not in family.max_items or modality not in ("image", "video", "audio"):
        return None
    plans = list(_plans(family, _headers(modality, limits, options), options))
    if not plans:
        return None
    return LargestItem(
        modality,
        num_tokens=max(sum(plan.unit_tokens) for plan in plans),
        max_unit_tokens=max(max(plan.unit_tokens) for plan in plans),
        cost=max(plan.cost for plan in plans),
        max_unit_cost=max(max(split_cost(plan.cost, plan.unit_tokens)) for plan in plans),
        num_levels=plans[0].num_levels,
    )


def largest_items(
    family: Family, modalities: Sequence[str], limits: MediaLimits, options: MediaOptions = DEFAULT_OPTIONS
) -> list[LargestItem]:
    found = [largest_item(family, modality, limits, options) for modality in modalities]
    return [item for item in found if item is not None]


def _plans(family: Family, headers: Iterator[MediaHeader], options: MediaOptions) -> Iterator[ItemPlan]:
    for header in headers:
        try:
            yield family.plan(header, options if isinstance(header, VideoHeader) else DEFAULT_OPTIONS)
        except InvalidMedia:  # The family refuses this aspect ratio or length.
            continue


def _headers(modality: str, limits: MediaLimits, options: MediaOptions) -> Iterator[MediaHeader]:
    if modality == "image":
        for width, height in _sizes(limits.max_image_pixels, MAX_RATIO):
            yield ImageHeader("PNG", width, height, "RGB")
    elif modality == "video":
        longest_s = min(limits.max_video_seconds, limits.max_video_frames / VIDEO_FPS, options.max_frames / options.fps)
        for seconds in _lengths(longest_s):
            num_frames = max(1, math.ceil(seconds * VIDEO_FPS))
            for width, height in _sizes(limits.max_video_pixels, MAX_VIDEO_RATIO):
                yield VideoHeader("mp4", width, height, num_frames, num_frames / VIDEO_FPS)
    else:
        for seconds in _lengths(limits.max_audio_seconds):
            yield AudioHeader("wav", SAMPLE_RATE, 1, max(1, int(seconds * SAMPLE_RATE)))


def _lengths(longest_s: float) -> Iterator[float]:
    for halving in range(NUM_LENGTHS):
        yield longest_s / 2**halving


def _sizes(max_pixels: int, max_ratio: int) -> Iterator[tuple[int, int]]:
    for quartering in range(NUM_AREAS):
        for across in range(1, max_ratio + 1):
            for down in range(1, max_ratio + 1):
                if math.gcd(across, down) == 1:
                    side = math.isqrt((max_pixels >> (2 * quartering)) // (across * down))
                    yield max(1, across * side), max(1, down * side)

"""The largest medium of each modality that passes the limits, found by asking the family what headers would become.

Families scale and tile in their own ways, so sizes are tried rather than derived: every aspect ratio of small
numbers, at several areas up to the limit. What a family makes of a size between them may be a row larger; such a
request is still refused cleanly when it comes. Decodes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fabric.errors import InvalidMedia
from llm_workers.scheduling.budget import LargestItem
from modalities.family import Family, ImageHeader, ItemPlan
from modalities.plugin import MediaLimits

MAX_RATIO = 16
NUM_AREAS = 8
"""Each a quarter of the one before: some families make most tokens of a picture that needs no scaling."""


def largest_item(family: Family, modality: str, limits: MediaLimits) -> LargestItem | None:
    """None for a modality whose headers can't be enumerated here, or that the family does not take."""
    if modality != "image" or modality not in family.max_items:
        return None
    plans = list(_image_plans(family, limits))
    most = max(plans, key=lambda plan: sum(plan.unit_tokens))
    return LargestItem(
        modality,
        num_tokens=sum(most.unit_tokens),
        max_unit_tokens=max(max(plan.unit_tokens) for plan in plans),
        cost=max(plan.cost for plan in plans),
    )


def largest_items(family: Family, modalities: Sequence[str], limits: MediaLimits) -> list[LargestItem]:
    found = [largest_item(family, modality, limits) for modality in modalities]
    return [item for item in found if item is not None]


def _image_plans(family: Family, limits: MediaLimits) -> Iterator[ItemPlan]:
    for width, height in _sizes(limits.max_image_pixels):
        try:
            yield family.plan(ImageHeader("PNG", width, height, "RGB"))
        except InvalidMedia:  # an aspect ratio that the family refuses
            continue


def _sizes(max_pixels: int) -> Iterator[tuple[int, int]]:
    for quartering in range(NUM_AREAS):
        for across in range(1, MAX_RATIO + 1):
            for down in range(1, MAX_RATIO + 1):
                if math.gcd(across, down) == 1:
                    side = math.isqrt((max_pixels >> (2 * quartering)) // (across * down))
                    yield max(1, across * side), max(1, down * side)

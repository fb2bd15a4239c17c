"""Turns a probed medium into the item that is sent to encoders and workers: the family plans it, and its content
identifies it. This module knows nothing of file formats.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from fabric.digest import content_digest, mm_hash
from fabric.errors import InvalidMedia
from fabric.messages import MediaItem
from modalities.decode_memory import decode_bytes
from modalities.family import DEFAULT_OPTIONS, Family, ItemPlan, MediaHeader, MediaOptions


class PlannedMedium(NamedTuple):
    plan: ItemPlan
    item: MediaItem


def plan_media(
    family: Family,
    data: bytes,
    header: MediaHeader,
    index: int,
    part: str,
    cache_salt: str = "",
    options: MediaOptions = DEFAULT_OPTIONS,
    anchor: int = -1,
    digest: bytes | None = None,
) -> PlannedMedium:
    """Returns the plan and the item of a medium. `index` is its position among the request's media, and `part` is its
    place in the request. `anchor` is the index of the video whose sound track the medium is, and `digest` is the digest
    of `data` if the caller knows it. The hash covers the bytes, the model, the processing options, the decoded size and
    the tenant's salt. Raises InvalidMedia (naming the part) if the family refuses the medium."""
    try:
        plan = dataclasses.replace(family.plan(header, options), anchor=anchor)
    except InvalidMedia as error:
        raise InvalidMedia(f"{part}: {error.message}", param=part) from error
    identity = mm_hash(
        content_digest(data) if digest is None else digest,
        namespace=family.model_id,
        modality=plan.modality,
        options=family.options(plan.modality) + options.encode(),
        geometry=plan.geometry,
        salt=cache_salt,
    )
    item = MediaItem(
        index=index,
        modality=plan.modality,
        mm_hash=identity,
        grid=plan.grid,
        unit_tokens=plan.unit_tokens,
        cost=plan.cost,
        part=part,
        options=options.encode(),
        row_seconds=plan.row_seconds,
        anchor=anchor,
        num_levels=plan.num_levels or family.shape.num_levels,
        decode_bytes=decode_bytes(header, len(data), plan.cost),
    )
    return PlannedMedium(plan, item)

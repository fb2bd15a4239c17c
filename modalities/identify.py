"""From a probed medium to the item that travels: planned by the family, identified by its content."""

from __future__ import annotations

from fabric.digest import mm_hash
from fabric.errors import InvalidMedia
from fabric.messages import MediaItem
from modalities.family import Family, MediaHeader
from modalities.plugin import ModalityPlugin


def plan_media(
    family: Family,
    plugin: ModalityPlugin,
    data: bytes,
    header: MediaHeader,
    index: int,
    part: str,
    cache_salt: str = "",
) -> MediaItem:
    """`index` among the request's media, `part` its place in the request. The hash covers the bytes, the model, the
    processing options, the decoded size and the tenant's salt. Raises InvalidMedia (naming the part) for what the
    family refuses."""
    try:
        plan = family.plan(header)
    except InvalidMedia as error:
        raise InvalidMedia(f"{part}: {error.message}", param=part) from error
    identity = mm_hash(
        data,
        namespace=family.model_id,
        modality=plugin.modality,
        options=family.options(plugin.modality),
        geometry=plan.geometry,
        salt=cache_salt,
    )
    return MediaItem(
        index=index,
        modality=plan.modality,
        mm_hash=identity,
        grid=plan.grid,
        unit_tokens=plan.unit_tokens,
        cost=plan.cost,
        part=part,
    )

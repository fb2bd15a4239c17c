"""Units one by one, from families that can preprocess them so: the first part of a long video is encoded while the rest
is still being decoded. Knows no family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from fabric.messages import MediaItem
from modalities.family import EncoderInput, Family


@runtime_checkable
class StreamsUnits(Protocol):
    """What a family may offer beside `Family.preprocess`."""

    def preprocess_units(self, data: bytes, item: MediaItem) -> Iterator[EncoderInput]:
        """As `preprocess`, each unit as soon as it is ready. An error may come after the first units."""
        ...


def stream_units(family: Family, data: bytes, item: MediaItem) -> Iterator[EncoderInput]:
    """The units of `item` in order; all of them at the end, if the family has no other way. Raises as
    `Family.preprocess` does."""
    if isinstance(family, StreamsUnits):
        yield from family.preprocess_units(data, item)
    else:
        yield from family.preprocess(data, item)

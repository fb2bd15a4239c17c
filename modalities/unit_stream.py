"""Yields units (the parts of an item that are encoded on their own) one by one, from families that can preprocess them
in this way. The first part of a long video is then encoded while the rest is still being decoded. This module knows
nothing of particular families.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from fabric.messages import MediaItem
from modalities.family import EncoderInput, Family


@runtime_checkable
class StreamsUnits(Protocol):
    """A family may offer this in addition to `Family.preprocess`."""

    def preprocess_units(self, data: bytes, item: MediaItem) -> Iterator[EncoderInput]:
        """Preprocesses like `preprocess`, but yields each unit as soon as it is ready. An error may follow the first
        units."""
        ...


def stream_units(family: Family, data: bytes, item: MediaItem) -> Iterator[EncoderInput]:
    """Yields the units of `item` in order. They all arrive at the end if the family only offers `preprocess`. Raises
    the same errors as `Family.preprocess`."""
    if isinstance(family, StreamsUnits):
        yield from family.preprocess_units(data, item)
    else:
        yield from family.preprocess(data, item)

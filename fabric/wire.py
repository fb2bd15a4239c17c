"""Defines how structs look on the wire. They are immutable and positional, so fields are only ever appended. The module
knows nothing of what the structs mean.
"""

from __future__ import annotations

import msgspec


class Wire(msgspec.Struct, frozen=True, array_like=True):
    """A `Wire` is a struct on the wire. It is immutable and positional, so fields are only ever appended."""


class PlaneWire(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A `PlaneWire` is a struct that travels alone on the message plane; it is tagged with its class name."""

"""How structs look on the wire: immutable, positional, so fields are only ever appended."""

from __future__ import annotations

import msgspec


class Wire(msgspec.Struct, frozen=True, array_like=True):
    """A struct on the wire: immutable and positional, so fields are only ever appended."""


class PlaneWire(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A struct that travels alone on the message plane: tagged with its class name."""

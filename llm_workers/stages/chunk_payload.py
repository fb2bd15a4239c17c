"""Encodes the chunks that travel from stage to stage, and the keys under which they travel.

    | length of the header, 4 bytes | header (msgpack) | padding | array | padding | array | ...

The header holds numbers, strings, and the names, dtypes and shapes of the arrays; each array begins at a multiple of 64
bytes, so that a reader uses it where it lies. The header also holds the `age` of the request, which tells a request
from an earlier one of the same key. This module knows nothing of connectors, threads or requests.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from fabric.contracts import ErrorInfo, ProtocolError, StageKey
from llm_workers.stages.stage_model import StageChunk

_ALIGNMENT_BYTES = 64
_LENGTH_BYTES = 4
_DTYPES = frozenset("?bBhHiIlLqQefd")
_KEY = re.compile(r"(?s:(?P<request>.+))_(?P<stage>\d{1,9})_(?P<number>\d{1,9})")


class ArrayLayout(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    """Names the dtype and the order of its bytes as numpy does, for example `<i8`."""
    shape: tuple[int, ...]


class ChunkHeader(msgspec.Struct, frozen=True, array_like=True):
    key: StageKey
    number: int
    is_last: bool
    age: tuple[float, str]
    scalars: dict[str, str | int | float | bool]
    arrays: tuple[ArrayLayout, ...]
    error: ErrorInfo | None = None
    """Is the error with which the producer has ended the request; the chunk has no payload then."""


class ReceivedChunk(NamedTuple):
    chunk: StageChunk
    age: tuple[float, str]
    error: ErrorInfo | None


class ChunkName(NamedTuple):
    """A `ChunkName` is the key of a chunk in a connector, `{request}_{stage}_{number}`."""

    key: StageKey
    stage_id: int
    """Names the stage that has made the chunk."""
    number: int

    def __str__(self) -> str:
        return f"{self.key}_{self.stage_id}_{self.number}"

    @classmethod
    def parse(cls, text: str) -> ChunkName | None:
        """Returns the name that a connector's key stands for, or None if the key is not that of a chunk."""
        found = _KEY.fullmatch(text)
        if found is None:
            return None
        return cls(StageKey(found["request"]), int(found["stage"]), int(found["number"]))


_DECODER = msgspec.msgpack.Decoder(ChunkHeader)


def encode_chunk(chunk: StageChunk, age: tuple[float, str], error: ErrorInfo | None = None) -> bytes:
    """Returns the bytes of a chunk. The arrays are copied, so the caller may change them afterwards. Raises
    ProtocolError for a dtype that is not a plain number."""
    layouts: list[ArrayLayout] = []
    arrays: list[npt.NDArray[np.generic]] = []
    scalars: dict[str, str | int | float | bool] = {}
    for name, value in chunk.payload.items():
        if isinstance(value, np.ndarray):
            if value.dtype.char not in _DTYPES:
                raise ProtocolError(f"the array `{name}` of a chunk has the dtype {value.dtype}, which can't travel")
            layouts.append(ArrayLayout(name, value.dtype.str, value.shape))
            arrays.append(value)
        else:
            scalars[name] = value
    header = ChunkHeader(chunk.key, chunk.number, chunk.is_last, age, scalars, tuple(layouts), error)
    encoded = msgspec.msgpack.encode(header)
    data = bytearray(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)
    for array in arrays:
        data += bytes(-len(data) % _ALIGNMENT_BYTES)
        data += array.tobytes()
    return bytes(data)


def decode_chunk(data: bytes) -> ReceivedChunk:
    """Returns the chunk. Its arrays are read-only views of `data`. Raises ProtocolError for bytes that are not a
    chunk."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    place = _LENGTH_BYTES + length
    try:
        header = _DECODER.decode(memoryview(data)[_LENGTH_BYTES:place])
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the header of a chunk can't be read: {error}") from error
    payload: dict[str, npt.NDArray[np.generic] | str | int | float | bool] = dict(header.scalars)
    for layout in header.arrays:
        place += -place % _ALIGNMENT_BYTES
        payload[layout.name], place = _array(layout, data, place)
    if place != len(data):
        raise ProtocolError(f"a chunk has {len(data)} bytes, but its header describes {place}")
    return ReceivedChunk(StageChunk(header.key, header.number, header.is_last, payload), header.age, header.error)


def _array(layout: ArrayLayout, data: bytes, place: int) -> tuple[npt.NDArray[np.generic], int]:
    """Returns the array that begins at `place`, and the place behind it."""
    try:
        dtype = np.dtype(layout.dtype)
    except TypeError as error:
        raise ProtocolError(f"a chunk names the unknown dtype {layout.dtype!r}") from error
    if dtype.char not in _DTYPES or any(size < 0 for size in layout.shape):
        raise ProtocolError(f"a chunk has an array of dtype {layout.dtype!r} and shape {layout.shape}")
    count = 1
    for size in layout.shape:
        count *= size
    end = place + count * dtype.itemsize
    if end > len(data):
        raise ProtocolError(f"the array `{layout.name}` of a chunk ends after the chunk")
    return np.frombuffer(data, dtype, count, place).reshape(layout.shape), end

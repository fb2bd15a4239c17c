"""Sends messages between processes without copying their arrays: writes them from their own memory and reads them into
new memory.

A unit of a video takes some megabytes. Pickled as one string it would be copied four times, two of them under the
interpreter's lock, and the forward pass of the receiving process would stand still meanwhile. Here arrays travel next
to the pickle (protocol 5, PEP 574) and without that lock. The module knows nothing of media.
"""

from __future__ import annotations

import os
import pickle
import struct
from multiprocessing.connection import Connection

import numpy as np

_MARK = b"weft"
"""Begins every message, so that other bytes on the pipe are noticed."""
_HEAD = struct.Struct("<4sIQ")
"""Packs the head of a message: the mark, the number of arrays and the bytes of the pickle. The bytes of each array and
the pickle follow, and then the arrays."""
_UNPICKLING_ERRORS = (
    pickle.UnpicklingError,
    AttributeError,
    ImportError,
    LookupError,
    OverflowError,
    TypeError,
    ValueError,
)
"""Lists what unpickling raises for bytes that are no pickle, as the library documents it and as damaged pickles do."""


class NotAMessage(Exception):
    """Means that the other side wrote something that is no message."""


def send(pipe: Connection, message: object) -> None:
    """Sends a message; blocks until the other side has taken nearly all of it. Raises OSError if the other side is
    gone, and MemoryError before anything was sent."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    sizes = struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views))
    head = _HEAD.pack(_MARK, len(views), len(body)) + sizes + body
    for view in (memoryview(head), *views):
        while view:
            view = view[os.write(pipe.fileno(), view) :]


def receive(pipe: Connection) -> object:
    """Blocks for the next message and returns it; its arrays belong to this process and are writable. Raises EOFError
    if the other side is gone, even in the middle of a message, or OSError, or NotAMessage. After any error the pipe is
    unusable."""
    file = pipe.fileno()
    mark, num_arrays, num_bytes = _HEAD.unpack(_read(file, _HEAD.size))
    if mark != _MARK:
        raise NotAMessage(f"the message begins with {mark!r}, not with {_MARK!r}")
    sizes = struct.unpack(f"<{num_arrays}Q", _read(file, 8 * num_arrays))
    body = _read(file, num_bytes)
    arrays = [_read(file, size) for size in sizes]
    try:
        return pickle.loads(body, buffers=arrays)
    except _UNPICKLING_ERRORS as error:
        raise NotAMessage(f"the message can't be unpickled: {error}") from error


def _read(file: int, num_bytes: int) -> memoryview:
    """Returns the next bytes in memory that is not cleared before, unlike that of a bytearray. Raises NotAMessage for
    more bytes than an array can have: only a broken or hostile process announces so many."""
    try:
        whole = np.empty(num_bytes, np.uint8).data
    except (OverflowError, ValueError) as error:
        raise NotAMessage(f"the message announces {num_bytes} bytes: {error}") from error
    left = whole
    while left:
        count = os.readv(file, [left])
        if not count:
            raise EOFError
        left = left[count:]
    return whole

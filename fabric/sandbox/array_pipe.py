"""Sends messages between processes without copying their arrays: writes them from their own memory and reads them into
new memory.

A unit of a video takes some megabytes. Pickled as one string it would be copied four times, two of them under the
interpreter's lock, and the forward pass of the receiving process would stand still meanwhile. Here arrays travel next
to the message's other values (`message_values`) and without that lock. The module knows nothing of media.
"""

from __future__ import annotations

import os
import struct
from multiprocessing.connection import Connection

import numpy as np

from fabric.sandbox.message_values import NotAMessage, decode_values, encode_values

_MARK = b"weft"
"""Begins every message, so that other bytes on the pipe are noticed."""
_HEAD = struct.Struct("<4sIQ")
"""Packs the head of a message: the mark, the number of arrays and the size of the other values. The sizes of the arrays
follow, then the other values, and then the arrays."""


def send(pipe: Connection, message: object) -> None:
    """Sends a message; blocks until the other side has taken nearly all of it. Raises OSError if the other side is
    gone, and TypeError (for what is no value) or MemoryError before anything was sent."""
    body, arrays = encode_values(message)
    sizes = struct.pack(f"<{len(arrays)}Q", *(array.nbytes for array in arrays))
    head = _HEAD.pack(_MARK, len(arrays), len(body)) + sizes + body
    for view in (memoryview(head), *arrays):
        while view:
            view = view[os.write(pipe.fileno(), view) :]


def receive(pipe: Connection, most_bytes: int) -> object:
    """Blocks for the next message and returns it; its arrays belong to this process and are writable. Raises EOFError
    if the other side is gone, even in the middle of a message, or OSError, or NotAMessage, also for a message that
    announces more than `most_bytes`. After any error the pipe is unusable."""
    file = pipe.fileno()
    mark, num_arrays, num_bytes = _HEAD.unpack(_read(file, _HEAD.size))
    if mark != _MARK:
        raise NotAMessage(f"the message begins with {mark!r}, not with {_MARK!r}")
    _check_size(8 * num_arrays + num_bytes, most_bytes)
    sizes = struct.unpack(f"<{num_arrays}Q", _read(file, 8 * num_arrays))
    _check_size(8 * num_arrays + num_bytes + sum(sizes), most_bytes)
    body = _read(file, num_bytes)
    arrays = [_read(file, size) for size in sizes]
    return decode_values(body, arrays)


def _check_size(num_bytes: int, most_bytes: int) -> None:
    if num_bytes > most_bytes:
        raise NotAMessage(f"the message announces {num_bytes} bytes, and at most {most_bytes} are allowed")


def _read(file: int, num_bytes: int) -> memoryview:
    """Returns the next bytes in memory that is not cleared before, unlike that of a bytearray."""
    left = whole = np.empty(num_bytes, np.uint8).data
    while left:
        count = os.readv(file, [left])
        if not count:
            raise EOFError
        left = left[count:]
    return whole

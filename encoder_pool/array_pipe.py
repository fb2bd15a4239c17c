"""Sends messages between processes without copying their arrays: writes them from their own memory and reads them into
new memory.

A unit of a video takes some megabytes. Pickled as one string it would be copied four times, two of them under the
interpreter's lock, and the forward pass of the receiving process would stand still meanwhile. Here arrays travel next
to the pickle (protocol 5, PEP 574) and without that lock. The module knows nothing of media.
"""

from __future__ import annotations

import os
import pickle
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt


def send(pipe: Connection, message: object) -> None:
    """Sends a message; blocks until the other side has taken nearly all of it. Raises OSError if the other side is
    gone, and MemoryError before anything was sent."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    pipe.send([view.nbytes for view in views])
    pipe.send_bytes(body)
    for view in views:
        while view:
            view = view[os.write(pipe.fileno(), view) :]


def receive(pipe: Connection) -> object:
    """Blocks for the next message and returns it; its arrays belong to this process and are writable. Raises EOFError
    if the other side is gone, even in the middle of a message, or OSError. After any error the pipe is unusable."""
    sizes = pipe.recv()
    body = pipe.recv_bytes()
    return pickle.loads(body, buffers=[_read(pipe.fileno(), size) for size in sizes])


def _read(file: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    buffer = np.empty(num_bytes, np.uint8)
    left = memoryview(buffer)
    while left:
        count = os.readv(file, [left])
        if not count:
            raise EOFError
        left = left[count:]
    return buffer

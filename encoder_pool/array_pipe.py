"""Messages between processes whose arrays travel as they lie: written from their memory, read into new memory.

A unit of a video is some megabytes. Pickled as one string it is copied four times, half of that under the interpreter's
lock, and the forward of the process that receives it stands still meanwhile. Here arrays go beside the pickle (protocol
5, PEP 574), past that lock. Knows nothing of media.
"""

from __future__ import annotations

import os
import pickle
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt


def send(pipe: Connection, message: object) -> None:
    """Blocks until the other side has taken nearly all of it. Raises OSError if it is gone, MemoryError before
    anything was sent."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    pipe.send([view.nbytes for view in views])
    pipe.send_bytes(body)
    for view in views:
        while view:
            view = view[os.write(pipe.fileno(), view) :]


def receive(pipe: Connection) -> object:
    """Blocks for the next message; its arrays are this process's own, and may be written. Raises EOFError if the other
    side is gone, also in the middle of it; or OSError. After any error the pipe is of no more use."""
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

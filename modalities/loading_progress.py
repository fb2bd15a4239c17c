"""Says how much of the weights of a part has been read while transformers loads it.

A loader reads each weight when it is used, so the share of the bytes whose reading has begun is the progress.
`watched_loading` names who hears of it, `counted` wraps the weights. The module knows nothing of checkpoints, or of who
listens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any

LoadingListener = Callable[[int, int], None]
"""Takes the bytes of the weights whose reading has begun, and those of all weights of the part. Any thread calls it."""
_LISTENER: ContextVar[LoadingListener | None] = ContextVar("loading_listener", default=None)
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "BOOL": 1}
"""Maps dtypes in the spelling of safetensors to the bytes of a value."""


@contextmanager
def watched_loading(listener: LoadingListener) -> Iterator[None]:
    """Has `listener` hear of what is loaded within the block, in this context."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def counted(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the weights with every slice of a file replaced by one that tells the listener when it is read. Tensors
    are in memory already, so they do not count. Without a listener the weights stay as they are."""
    listener = _LISTENER.get()
    if listener is None:
        return dict(tensors)
    sizes = {name: num_bytes(value) for name, value in tensors.items() if hasattr(value, "get_shape")}
    count = LoadedCount(listener, sum(sizes.values()))
    return {
        name: CountedSlice(value, sizes[name], count) if name in sizes else value for name, value in tensors.items()
    }


def num_bytes(weight: Any) -> int:
    """Returns the bytes of a slice of a file in the dtype in which it is read."""
    return int(prod(weight.get_shape())) * _BYTES.get(weight.get_dtype(), 1)


class LoadedCount:
    """A `LoadedCount` adds up what was read of one part, in whichever thread."""

    def __init__(self, listener: LoadingListener, total_bytes: int) -> None:
        self._listener, self._total_bytes = listener, total_bytes
        self._read_bytes = 0
        self._lock = threading.Lock()

    def add(self, read_bytes: int) -> None:
        with self._lock:
            self._read_bytes += read_bytes
            self._listener(self._read_bytes, self._total_bytes)


class CountedSlice:
    """A `CountedSlice` is a slice of a file that counts once, when its values are read for the first time. It has the
    interface of the file slices that transformers reads."""

    def __init__(self, weight: Any, size: int, count: LoadedCount) -> None:
        """Takes the slice, its bytes, and what adds them up."""
        self._weight, self._size, self._count = weight, size, count
        self._is_counted = False

    def get_shape(self) -> list[int]:
        return list(self._weight.get_shape())

    def get_dtype(self) -> str:
        return str(self._weight.get_dtype())

    def __getitem__(self, index: Any) -> Any:
        """Returns the values at `index`."""
        if not self._is_counted:
            self._is_counted = True
            self._count.add(self._size)
        return self._weight[index]

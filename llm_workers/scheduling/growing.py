"""Provides a numpy array that grows at its end: an append copies nothing of what is there (except when the buffer is
full and doubles), and reading a slice costs nothing. It knows nothing of what its numbers mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class GrowingArray:
    """A `GrowingArray` is an int64 array with one axis."""

    def __init__(self, values: Sequence[int] | npt.NDArray[np.int64] = (), spare: int = 64) -> None:
        self._length = len(values)
        self._buffer = np.empty(self._length + spare, dtype=np.int64)
        self._buffer[: self._length] = values

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self._length
        return int(self._buffer[index])

    def append(self, value: int) -> None:
        self._reserve(1)
        self._buffer[self._length] = value
        self._length += 1

    def extend(self, values: Sequence[int]) -> None:
        self._reserve(len(values))
        self._buffer[self._length : self._length + len(values)] = values
        self._length += len(values)

    def replace(self, start: int, values: Sequence[int]) -> None:
        """Overwrites the values at `[start, start + len(values))`."""
        assert start + len(values) <= self._length
        self._buffer[start : start + len(values)] = values

    def truncate(self, length: int) -> None:
        assert length <= self._length
        self._length = length

    def view(self, start: int = 0, end: int | None = None) -> npt.NDArray[np.int64]:
        """Returns the values at `[start, end)`, with shape `(end - start,)`, and not a copy: growth leaves the view
        unchanged, and `replace` shows in it."""
        end = self._length if end is None else end
        assert end <= self._length
        return self._buffer[start:end]

    def _reserve(self, count: int) -> None:
        if self._length + count > len(self._buffer):
            grown = np.empty(max(2 * len(self._buffer), self._length + count), dtype=np.int64)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown

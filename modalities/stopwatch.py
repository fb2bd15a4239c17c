"""Measures how much of the preprocessing time is decoding: decoders note their time here, separately for each thread.

This module knows nothing of formats or families. It is pure.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_thread = threading.local()


def take_decode_s() -> float:
    """Returns the seconds that this thread has decoded since the last call."""
    seconds: float = getattr(_thread, "seconds", 0.0)
    _thread.seconds = 0.0
    return seconds


def decoding(decode: Callable[P, T]) -> Callable[P, T]:
    """Wraps `decode` to note the time of each call."""

    @functools.wraps(decode)
    def timed(*arguments: P.args, **options: P.kwargs) -> T:
        started_s = time.perf_counter()
        try:
            return decode(*arguments, **options)
        finally:
            _note(started_s)

    return timed


def decoding_piecewise(decode: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Wraps `decode` to note the time that each item takes to arrive, without the time that the caller spends between
    items."""

    @functools.wraps(decode)
    def timed(*arguments: P.args, **options: P.kwargs) -> Iterator[T]:
        pieces = decode(*arguments, **options)
        while True:
            started_s = time.perf_counter()
            try:
                piece = next(pieces)
            except StopIteration:
                return
            finally:
                _note(started_s)
            yield piece

    return timed


def _note(started_s: float) -> None:
    _thread.seconds = getattr(_thread, "seconds", 0.0) + time.perf_counter() - started_s

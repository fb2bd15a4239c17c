"""Provides clocks that callers pass as arguments. No code that makes decisions reads the time by itself, so tests and
the simulator control it. The module knows nothing of what the time is used for.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A `Clock` returns the seconds since a fixed, arbitrary moment; it never goes back."""

    def now(self) -> float: ...


class SystemClock:
    """A `SystemClock` reads CLOCK_MONOTONIC, which is the same for all processes of one host, so their traces can be
    compared."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A `ManualClock` moves only when `advance` is called. It is for tests and ships with the product."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Moves the clock forward. Raises ValueError for a negative step."""
        if seconds < 0:
            raise ValueError(f"a clock can't go back, but it was advanced by {seconds} s")
        self._now_s += seconds

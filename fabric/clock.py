"""Time as an argument. Nothing that decides reads the time by itself, so tests and the simulator own it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since a fixed, arbitrary moment; never goes back."""

    def now(self) -> float: ...


class SystemClock:
    """CLOCK_MONOTONIC: the same for all processes of one host, so their traces can be laid side by side."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told. The seam for tests ships with the product."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Moves forward; raises ValueError for a negative step."""
        if seconds < 0:
            raise ValueError(f"a clock can't go back ({seconds} s)")
        self._now_s += seconds

"""Keeps sums over an encoder's life, for reports: items received, items decoded, time in forward passes. It has no
clock.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EncoderTally:
    """Keeps counters that only grow. Seconds are of wall time."""

    num_items: int = 0
    """Counts the items that calls ask for; a content that occurs several times in one call counts once."""
    num_items_encoded: int = 0
    num_items_failed: int = 0
    """Counts the failed items, refused ones included; an item counts once for each call that asks for it."""
    num_cache_hits: int = 0
    cache_hit_bytes: int = 0
    num_decoded: int = 0
    decode_s: float = 0.0
    preprocess_s: float = 0.0
    """Sums preprocessing time in decode processes and on the device."""
    num_batches: int = 0
    num_units: int = 0
    """Counts the units that went through a forward pass."""
    encoded_cost: int = 0
    """Sums the cost of these units."""
    forward_s: float = 0.0

    def batch_ended(self, num_units: int, cost: int, seconds: float) -> None:
        self.num_batches += 1
        self.num_units += num_units
        self.encoded_cost += cost
        self.forward_s += seconds


class BusyTime:
    """Measures how much of the time the forward pass keeps the device busy. Callers pass the time in."""

    def __init__(self, window_s: float = 1.0) -> None:
        self._window_s = window_s
        self._done_s = 0.0
        self._since_s: float | None = None
        self._window: tuple[float, float] | None = None
        """Holds the time when the window began, and how long the device had been busy by then."""
        self.fraction = 0.0
        """Holds the busy share of the last complete window."""

    def started(self, now_s: float) -> None:
        self._since_s = now_s

    def ended(self, now_s: float) -> None:
        assert self._since_s is not None
        self._done_s += now_s - self._since_s
        self._since_s = None

    def current_s(self, now_s: float) -> float:
        """Returns for how long the present forward pass has run; returns 0 if there is none."""
        return 0.0 if self._since_s is None else now_s - self._since_s

    def roll(self, now_s: float) -> None:
        """Begins a new window if the last one is over. Callers must call it often."""
        busy_s = self._done_s + (now_s - self._since_s if self._since_s is not None else 0.0)
        if self._window is None:
            self._window = (now_s, busy_s)
        elif now_s - self._window[0] >= self._window_s:
            self.fraction = (busy_s - self._window[1]) / (now_s - self._window[0])
            self._window = (now_s, busy_s)

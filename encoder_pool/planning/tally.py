"""Sums over an encoder's life, for reports: what came, what was decoded, what forwards took. Knows no clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """All of these only grow. Seconds are of wall time."""

    num_items: int = 0
    """Asked for, each content of a call once."""
    num_items_encoded: int = 0
    num_items_failed: int = 0
    """For whoever asked for them; refused ones included."""
    num_cache_hits: int = 0
    cache_hit_bytes: int = 0
    num_decoded: int = 0
    decode_s: float = 0.0
    preprocess_s: float = 0.0
    """In whatever process."""
    num_batches: int = 0
    num_units: int = 0
    """That went through a forward."""
    encoded_cost: int = 0
    """Of these units."""
    forward_s: float = 0.0

    def batch_ended(self, num_units: int, cost: int, seconds: float) -> None:
        self.num_batches += 1
        self.num_units += num_units
        self.encoded_cost += cost
        self.forward_s += seconds


class BusyTime:
    """How much of the time the forward was busy. Times are handed in."""

    def __init__(self, window_s: float = 1.0) -> None:
        self._window_s = window_s
        self._done_s = 0.0
        self._since_s: float | None = None
        self._window: tuple[float, float] | None = None
        """When it began, and how long the forward had been busy by then."""
        self.fraction = 0.0
        """Of the last window that is over."""

    def started(self, now_s: float) -> None:
        self._since_s = now_s

    def ended(self, now_s: float) -> None:
        assert self._since_s is not None
        self._done_s += now_s - self._since_s
        self._since_s = None

    def current_s(self, now_s: float) -> float:
        """How long the forward has been busy by now; 0 if it is idle."""
        return 0.0 if self._since_s is None else now_s - self._since_s

    def roll(self, now_s: float) -> None:
        """Begins a new window if the last is over. To be called often."""
        busy_s = self._done_s + (now_s - self._since_s if self._since_s is not None else 0.0)
        if self._window is None:
            self._window = (now_s, busy_s)
        elif now_s - self._window[0] >= self._window_s:
            self.fraction = (busy_s - self._window[1]) / (now_s - self._window[0])
            self._window = (now_s, busy_s)

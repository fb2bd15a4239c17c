"""Measures how long a sequence waited, was computed, and was at its doorstep (waiting for the feature of its next
token). It reads no clock: every moment is passed in.
"""

from __future__ import annotations

from llm_workers.scheduling.events import SequenceTimes


class Stopwatch:
    """Adds up one sequence's durations. Moments are seconds of one clock that never goes back."""

    def __init__(self, added_at_s: float) -> None:
        self._added_at_s = added_at_s
        self._queue_s: float | None = None
        self._first_token_s = 0.0
        self._prefill_s = 0.0
        self._held_s = 0.0
        self._held_since_s: float | None = None

    @property
    def has_begun(self) -> bool:
        return self._queue_s is not None

    def begin(self, now_s: float) -> None:
        """Notes that the first chunk was planned."""
        self._queue_s = now_s - self._added_at_s

    def add_prefill(self, seconds: float) -> None:
        self._prefill_s += seconds

    def first_token(self, now_s: float) -> None:
        """Notes the moment of the first token; later calls change nothing."""
        self._first_token_s = self._first_token_s or now_s - self._added_at_s

    def hold(self, is_held: bool, now_s: float) -> None:
        """Sets whether the sequence is at its doorstep from now on."""
        if self._held_since_s is not None:
            self._held_s += now_s - self._held_since_s
        self._held_since_s = now_s if is_held else None

    def times(self, now_s: float) -> SequenceTimes:
        queue_s = now_s - self._added_at_s if self._queue_s is None else self._queue_s
        held_s = self._held_s + (now_s - self._held_since_s if self._held_since_s is not None else 0.0)
        return SequenceTimes(queue_s, self._prefill_s, held_s, self._first_token_s, now_s - self._added_at_s)

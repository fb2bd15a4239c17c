"""Holds a router's series about spoken answers, and measures one answer as a listener hears it.

`HeardAnswer` stands for a listener who plays the sound as soon as the first of it is there, at its own speed. The
module knows nothing of how speech is made or delivered.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

AUDIO_SECONDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0)
FACTORS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 4.0)
PIECE_SECONDS = (0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 2.0, 4.0, 8.0, 16.0, 60.0)


class SpeechSeries:
    """Holds the series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.first_audio = Histogram(
            "weft_router_first_audio_seconds",
            "Time from the arrival of a request to the first sound of its answer.",
            buckets=AUDIO_SECONDS,
            registry=registry,
        )
        self.real_time_factor = Histogram(
            "weft_router_real_time_factor_ratio",
            "Time from the arrival of a request to the end of its sound, divided by the length of the sound.",
            buckets=FACTORS,
            registry=registry,
        )
        self.gap = Histogram(
            "weft_router_audio_gap_seconds",
            "Time between two pieces of the sound of one answer.",
            buckets=PIECE_SECONDS,
            registry=registry,
        )
        self.piece = Histogram(
            "weft_router_audio_piece_seconds",
            "Length of the pieces in which the sound of an answer comes.",
            buckets=PIECE_SECONDS,
            registry=registry,
        )
        self.underruns = Counter(
            "weft_router_audio_underruns",
            "Pauses of a listener who had heard everything that was there.",
            registry=registry,
        )
        self.seconds = Counter("weft_router_audio_seconds", "Sound that was delivered.", registry=registry)


class HeardAnswer:
    """A `HeardAnswer` measures the sound of one request."""

    def __init__(self, series: SpeechSeries, arrived_at_s: float) -> None:
        self._series, self._arrived_at_s = series, arrived_at_s
        self._first_at_s: float | None = None
        self._last_at_s = 0.0
        self._heard_until_s = 0.0
        """Is the time at which the listener has heard everything that is there."""
        self._length_s = 0.0
        self.num_underruns = 0

    @property
    def first_audio_s(self) -> float | None:
        """Returns the time from the arrival to the first sound, or None while there is none."""
        return None if self._first_at_s is None else self._first_at_s - self._arrived_at_s

    def note_piece(self, length_s: float, now_s: float) -> None:
        """Takes a piece of sound that is there now."""
        series = self._series
        if self._first_at_s is None:
            self._first_at_s = self._heard_until_s = now_s
            series.first_audio.observe(now_s - self._arrived_at_s)
        else:
            series.gap.observe(now_s - self._last_at_s)
            if now_s > self._heard_until_s:
                self.num_underruns += 1
                series.underruns.inc()
                self._heard_until_s = now_s
        self._heard_until_s += length_s
        self._last_at_s = now_s
        self._length_s += length_s
        series.piece.observe(length_s)
        series.seconds.inc(length_s)

    def facts(self) -> dict[str, object]:
        """Returns what the record of the request says of its sound; nothing if there was none."""
        if self._first_at_s is None:
            return {}
        took_s = self._last_at_s - self._arrived_at_s
        heard = {"audio_s": self._length_s, "first_audio_s": self.first_audio_s, "last_audio_s": took_s}
        return {"speech": heard | {"underruns": self.num_underruns}}

    def close(self) -> None:
        """Records the whole answer."""
        if self._length_s:
            self._series.real_time_factor.observe((self._last_at_s - self._arrived_at_s) / self._length_s)

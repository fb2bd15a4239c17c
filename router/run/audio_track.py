"""Keeps the sound of one answer: it puts samples in order over all attempts, and hands them to the reader.

An attempt that replaces a failed one makes the same samples again, because each draw of the talker depends on the seed
and the frame alone. So samples count from the beginning of the answer, duplicates are dropped, and a listener hears
neither a gap nor a repetition. The module knows nothing of formats, of members, or of how sound is made.
"""

from __future__ import annotations

SAMPLE_BYTES = 2
"""Is the size of one sample: int16, little-endian, one channel."""


class AudioTrack:
    """An `AudioTrack` belongs to one request."""

    def __init__(self, sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self.num_samples = 0
        """Counts the samples that are there without a gap from the beginning."""
        self.is_ended = False
        """Says that no more samples come."""
        self._fresh: list[bytes] = []
        self._held: dict[int, bytes] = {}
        """Holds samples behind a gap, by the index of their first one."""

    def push(self, first_sample: int, samples: bytes) -> bool:
        """Takes samples, int16 little-endian, of which the first has the given index. Returns whether new ones became
        readable."""
        self._held[first_sample] = samples
        before = self.num_samples
        for first in sorted(self._held):
            if first > self.num_samples:
                break
            piece = self._held.pop(first)[(self.num_samples - first) * SAMPLE_BYTES :]
            if piece:
                self._fresh.append(piece)
                self.num_samples += len(piece) // SAMPLE_BYTES
        return self.num_samples > before

    def restart(self) -> None:
        """Prepares for a new attempt: drops samples behind a gap."""
        self._held.clear()

    def end(self) -> None:
        self.is_ended = True

    @property
    def has_fresh(self) -> bool:
        return bool(self._fresh)

    def take(self) -> bytes:
        """Returns the samples that no earlier call has returned."""
        taken = b"".join(self._fresh)
        self._fresh.clear()
        return taken

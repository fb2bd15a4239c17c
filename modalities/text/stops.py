"""Finds stop strings in streamed text. It knows nothing of tokens and uses only the standard library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fabric.errors import InvalidRequest


class StopResult(NamedTuple):
    text: str
    """Holds the text that may be shown now, because it is part of no stop string."""
    hit: str | None
    """Names the stop string that ended the text, or is None."""


class StopStrings:
    """Ends a text at the stop string that is complete first; if several end at the same place, the longest one counts.

    The result for a text does not depend on how it is cut into pushes: it is as if the text came letter by letter.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequest for an empty stop string."""
        if not all(stops):
            raise InvalidRequest("a stop string can't be empty", param="stop")
        self._stops = tuple(dict.fromkeys(stops))
        self._prefixes = frozenset(stop[:end] for stop in self._stops for end in range(1, len(stop)))
        self._max_held = max((len(stop) - 1 for stop in self._stops), default=0)
        self._held = ""
        self._hit: str | None = None

    def push(self, text: str) -> StopResult:
        """Returns the text before a stop string, but never the stop string or the text after it. After a hit every push
        returns that hit and no text."""
        if self._hit is not None:
            return StopResult("", self._hit)
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self._hit = min(found)
            self._held = ""
            return StopResult(text[:start], self._hit)
        cut = len(text) - self._num_held(text)
        self._held = text[cut:]
        return StopResult(text[:cut], None)

    def flush(self) -> str:
        """Returns the text that was held back; call it when the stream ends without completing a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Returns the length of the longest suffix of the text that begins a stop string."""
        lengths = range(min(self._max_held, len(text)), 0, -1)
        return next((length for length in lengths if text[-length:] in self._prefixes), 0)

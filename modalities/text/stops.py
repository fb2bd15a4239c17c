"""Stop strings over streamed text. Does not know tokens; standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fabric.errors import InvalidRequest


class StopResult(NamedTuple):
    text: str
    """May be shown now: it is no part of a stop string."""
    hit: str | None
    """The stop string that ended the text, or None."""


class StopStrings:
    """Ends a text at the stop string that is complete first (of several that end together, the longest).

    The same result for the same text, however it is cut into pushes: as if the text came letter by letter.
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
        """Text in front of a stop string is given out, the stop string and what follows never. After a hit every
        push answers with that hit and no text."""
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
        """The text that was held back; the stream has ended without completing a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        lengths = range(min(self._max_held, len(text)), 0, -1)
        return next((length for length in lengths if text[-length:] in self._prefixes), 0)

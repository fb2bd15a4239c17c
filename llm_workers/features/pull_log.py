"""Keeps when the worker's pulls began and ended, so that its reports can say what shared a link.

A pull begins when the transfer is posted, after the wait for room in the inbox. Pulls that are under way together share
the worker's link, so the time of one of them says little about the link. The log therefore reports *windows*: a time in
which at least one pull was under way, with every pull of that time. It is pure: the caller passes the times in. It
knows nothing of links, encoders or requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

from fabric.contracts import PullTime, PullWindow

MAX_PULLS = 32
"""Limits the pulls of one window. A worker that never stops pulling cuts its time into several windows."""
MAX_WINDOWS = 16
"""Limits the windows that wait for a report; later ones replace earlier ones."""


class _Pulled(NamedTuple):
    source: str
    num_bytes: int
    start_s: float
    end_s: float

    def within(self, from_s: float, until_s: float) -> PullTime:
        """Returns the part of the pull in `[from_s, until_s)`, as if its bytes had moved at an even pace."""
        start_s, end_s = max(self.start_s, from_s), min(self.end_s, until_s)
        length_s = self.end_s - self.start_s
        share = (end_s - start_s) / length_s if length_s > 0.0 else 1.0
        return PullTime(self.source, round(share * self.num_bytes), start_s - from_s, end_s - from_s)


class PullLog:
    """Keeps the pulls of the present window and the windows that have ended."""

    def __init__(self) -> None:
        self._running: dict[Hashable, tuple[str, int, float]] = {}
        self._ended: list[_Pulled] = []
        self._from_s = 0.0
        """Holds when the present window began."""
        self._is_spoiled = False
        """Says that the bytes of the present window are not known, because a pull failed."""
        self._windows: deque[PullWindow] = deque(maxlen=MAX_WINDOWS)

    def begin(self, pull: Hashable, source: str, num_bytes: int, now_s: float) -> None:
        """Records that a pull from `source` begins."""
        if not self._running:
            self._from_s = now_s
        self._running[pull] = (source, num_bytes, now_s)

    def end(self, pull: Hashable, seconds: float) -> None:
        """Records that a pull has ended after `seconds`. Unknown pulls are ignored."""
        if pull in self._running:
            source, num_bytes, start_s = self._running.pop(pull)
            self._ended.append(_Pulled(source, num_bytes, start_s, start_s + max(0.0, seconds)))
            self._cut()

    def fail(self, pull: Hashable) -> None:
        """Records that a pull has failed. How much of it shared the link is unknown, so the window is not reported."""
        if self._running.pop(pull, None) is not None:
            self._is_spoiled = True
            self._cut()

    def windows(self) -> tuple[PullWindow, ...]:
        """Returns the windows that have ended since `forget_windows` was called."""
        return tuple(self._windows)

    def forget_windows(self) -> None:
        """Forgets the windows that have ended, because a report with them has gone to all routers."""
        self._windows.clear()

    def _cut(self) -> None:
        """Ends the window if no pull is under way. A window with many pulls ends where the oldest running pull began,
        because only until then all bytes are known."""
        if not self._running:
            self._close(max((pull.end_s for pull in self._ended), default=self._from_s))
            self._ended.clear()
            self._is_spoiled = False
        elif len(self._ended) >= MAX_PULLS:
            until_s = min(start_s for _, _, start_s in self._running.values())
            if until_s > self._from_s:
                self._close(until_s)
                self._ended = [pull for pull in self._ended if pull.end_s > until_s]
                self._from_s = until_s
            elif len(self._ended) >= 2 * MAX_PULLS:  # One pull has lasted since the window began.
                self._ended.clear()
                self._is_spoiled = True

    def _close(self, until_s: float) -> None:
        pulls = [pull.within(self._from_s, until_s) for pull in self._ended if pull.start_s < until_s]
        if pulls and not self._is_spoiled:
            self._windows.append(PullWindow(tuple(pulls)))

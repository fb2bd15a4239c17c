"""Finds out how old a member's report is when it comes, and keeps the order of its reports. The module knows nothing of
what reports contain.

A report says when its numbers were taken, on the member's own clock. The two clocks differ by an unknown time, which
does not change but for a slow drift. A report that contains an attempt was made after this router dispatched the
attempt, which bounds that difference from above, and the least of these bounds is close: an idle member reports an
attempt within milliseconds. What comes by a quick way bounds what comes by a slow one, so a constant delay of all
reports is found too.
"""

from __future__ import annotations

MAX_DRIFT = 1e-4
"""The bound grows by this many seconds per second, because clocks drift apart."""
MAX_AGE_S = 10.0
"""No report counts as older than this when it comes."""


class ReportAge:
    """A `ReportAge` belongs to one member of one epoch."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None
        """Bounds from above by how much the member's clock is ahead of the router's, as of `_bounded_at_s`."""
        self._bounded_at_s = 0.0

    def state_at_s(self, at_s: float, now: float, dispatched_s: float | None, before_s: float = 0.0) -> float:
        """Returns the moment on the router's clock that a report describes which came at `now`. The report was made at
        `at_s` on the member's clock, or does not say when if that is 0, and its numbers were taken `before_s` earlier.
        `dispatched_s` is when the router dispatched the latest attempt that the report acknowledges, or None if it
        acknowledges none."""
        if not at_s:
            return now
        if dispatched_s is not None:
            bound_s, known_s = at_s - dispatched_s, self._ahead_at(now)
            if known_s is None or bound_s < known_s:
                self._ahead_s, self._bounded_at_s = bound_s, now
        ahead_s = self._ahead_at(now)
        found_s = now if ahead_s is None else min(max(at_s - ahead_s, now - MAX_AGE_S), now)
        found_s -= before_s
        return found_s if dispatched_s is None else max(found_s, min(dispatched_s, now))

    def _ahead_at(self, now: float) -> float | None:
        return None if self._ahead_s is None else self._ahead_s + MAX_DRIFT * max(now - self._bounded_at_s, 0.0)


class Freshness:
    """Keeps the order of one member's reports."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None

    def accept(self, epoch: int, seq: int) -> bool:
        """Records a report. Returns False for a report that is not newer than the last one."""
        if self._last is not None and (epoch, seq) <= self._last:
            return False
        self._last = (epoch, seq)
        return True

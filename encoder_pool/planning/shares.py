"""How much of a pool one worker may hold, so that a worker that gives nothing back leaves room for the others; and who
may pass what finds no room, so that it has its turn too.

The rule is the dynamic threshold of shared-memory switches (Choudhury and Hahne, 1998): a holder may take more while it
holds no more than what stays free. Nobody has to say who will want something: one stuck holder ends with a half, two
with three quarters, and there is always something free.

What has its share and finds no room is passed by others, at first by all that have some. Then it is *due*: room is kept
for it, and others pass only beside that room, as in the backfilling of batch schedulers (EASY, Lifka 1995). So it waits
for what was there before it was due, and for nothing that came later. Knows nothing of what is held.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


def is_within_share(held: float, more: float, free: float) -> bool:
    """Whether a holder of `held` may take `more` of the `free` part of a pool. One that holds nothing always may: what
    is larger than any share must be had at some time, too."""
    return held == 0 or held + more <= free - more


class FirstRefused(Generic[T]):
    """The one thing that room is to be kept for: it found none before any other that still waits did."""

    def __init__(self, passed_s: float) -> None:
        """`passed_s`: how long it is passed by everything that has room."""
        self._passed_s = passed_s
        self._since_s = 0.0
        self.thing: T | None = None

    def refuse(self, thing: T, now_s: float) -> None:
        """A thing found no room. Ignored while there is another."""
        if self.thing is None:
            self.thing, self._since_s = thing, now_s

    def is_due(self, now_s: float) -> bool:
        """Whether there is such a thing, and it was passed for long enough."""
        return self.thing is not None and now_s - self._since_s >= self._passed_s

    def forget(self) -> None:
        """It has its room, or waits no more."""
        self.thing = None

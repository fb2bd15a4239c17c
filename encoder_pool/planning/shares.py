"""Limits how much of a pool one worker may hold, so that a worker that returns nothing leaves room for the others, and
decides when room is kept for a thing that finds none.

The limit is the dynamic threshold of shared-memory switches (Choudhury and Hahne, 1998): a holder may take more while
it holds no more than what stays free. The rule needs no knowledge of future demand. One stuck holder ends with half of
the pool, two together end with three quarters, and some of the pool is always free.

A thing that is within its worker's share and finds no room is at first passed by all things that do find room. After a
while it is *due*: room is kept for it, and other things pass it only if they fit next to that room, as in the
backfilling of batch schedulers (EASY, Lifka 1995). So it waits for things that were there before it was due, and for
nothing that came later. This module knows nothing of what the holders hold.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


def is_within_share(held: float, more: float, free: float) -> bool:
    """Returns whether a holder of `held` may take `more` of the `free` part of a pool. A holder of nothing always may,
    because a thing that is larger than every share must be served at some time, too."""
    return held == 0 or held + more <= free - more


class FirstRefused(Generic[T]):
    """A `FirstRefused` keeps the one thing that room is kept for: the thing that found no room before any other waiting
    thing did."""

    def __init__(self, passed_s: float) -> None:
        """`passed_s` is the number of seconds for which every thing that finds room may pass it."""
        self._passed_s = passed_s
        self._since_s = 0.0
        self.thing: T | None = None

    def refuse(self, thing: T, now_s: float) -> None:
        """Records that a thing found no room. Does nothing while another thing is recorded."""
        if self.thing is None:
            self.thing, self._since_s = thing, now_s

    def is_due(self, now_s: float) -> bool:
        """Returns whether a thing is recorded and others have passed it for at least `passed_s`."""
        return self.thing is not None and now_s - self._since_s >= self._passed_s

    def forget(self) -> None:
        """Clears the record, because the thing has its room or no longer waits."""
        self.thing = None

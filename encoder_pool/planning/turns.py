"""Ranks calls at one encoder: by priority, then by shortest remaining work, with aging.

A call is one encode request that a router sends to this encoder. Priority (the lowest number first) is strict, as it is
in the worker that waits for the features. Otherwise a request of high priority would wait in the worker for features
that are queued here behind others.

Among calls of equal priority, the rank is `waiting since + patience * remaining encoding time`, and the lowest rank
goes first. So the shorter call goes first, and a call is overtaken only by calls that arrive within `patience` times
its own encoding time. No call starves, and no timer is needed. The encoder serves units rather than whole calls, so a
long video gives way to a picture between two of its units. Two rules keep this true at every moment of the video's
life:

- Time in the forward pass does not count as waiting, and each second of the call's own work takes `patience` seconds
  off the wait that has accumulated. So a video that is served continuously never looks old, and a video that had to
  wait spends its accumulated wait on the service that it gets.
- A call never counts as shorter than half of its original work. Otherwise the last units of a video would count as
  shorter than a picture, and the picture would wait for all of them.

This module knows nothing of clocks, memory, models or units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Rank(NamedTuple):
    """A `Rank` orders calls and items; the smaller rank goes first. The age order of the requests breaks ties, then the
    item's place in its request."""

    priority: int
    virtual_s: float
    age: tuple[float, str]
    item_index: int


@dataclass(slots=True, eq=False)
class CallTurn:
    """A `CallTurn` records how long one call has waited and how much forward time it has received. It is mutable, and
    all items of the call share it."""

    call: int
    """Identifies the call on this encoder."""
    age: tuple[float, str]
    waiting_since_s: float
    done_s: float = 0.0
    """Sums the predicted forward time of the units that the call has already received."""
    priority: int = 0

    def served(self, seconds: float, worth_s: float, now_s: float, patience: float) -> None:
        """Records a forward pass that ended at `now_s`, took `seconds`, and made units of this call that were predicted
        to take `worth_s`."""
        self.done_s += worth_s
        self.waiting_since_s = min(now_s, self.waiting_since_s + seconds + patience * min(worth_s, seconds))

    def rank(self, remaining_s: float, patience: float, item_index: int) -> Rank:
        """Returns the rank of one item of this call while all items of the call together need `remaining_s` on this
        encoder."""
        needed_s = max(remaining_s, (remaining_s + self.done_s) / 2)
        return Rank(self.priority, self.waiting_since_s + patience * needed_s, self.age, item_index)

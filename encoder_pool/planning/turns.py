"""A call's place in line at one encoder: by priority, then shortest remaining first, with aging.

Priority (the lowest number first) is strict, as in the worker that waits for the features: else a request of high
priority would wait there for what stands here behind others.

Among calls of equal priority, a call's rank is `waiting since + patience * what it still needs`, so the shorter goes
first, and a call is overtaken only by ones that came within `patience` times its own encoding time: nobody starves,
without any timer. Units are ranked, not calls, so a long video gives way to a picture between two of its units. Two
rules keep that so at any moment of the video's life:

- Being served is not waiting, and it is what the wait was for: time in the forward does not count, and each second of
  own work takes `patience` seconds off the wait that has added up. A video that is served all the time never looks
  old; one that had to wait spends its claim on what it gets.
- A call never counts as shorter than half of what it was: else the last units of a video would be shorter than a
  picture, and make it wait for all of them.

Knows nothing of clocks, memory, models or units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Rank(NamedTuple):
    """Smaller goes first. Ties go by the age order of requests, then by the item's place in its request."""

    priority: int
    virtual_s: float
    age: tuple[float, str]
    item_index: int


@dataclass(slots=True, eq=False)
class Turn:
    """Mutable: what one call has waited and got. All its items share it."""

    call: int
    """Number of the call."""
    age: tuple[float, str]
    waiting_since_s: float
    done_s: float = 0.0
    """Forward time, as predicted, of the units that it already got."""
    priority: int = 0

    def served(self, seconds: float, worth_s: float, now_s: float, patience: float) -> None:
        """A forward that ended now and took `seconds` made units of this call that were predicted to take
        `worth_s`."""
        self.done_s += worth_s
        self.waiting_since_s = min(now_s, self.waiting_since_s + seconds + patience * min(worth_s, seconds))

    def rank(self, remaining_s: float, patience: float, item_index: int) -> Rank:
        """Of one item of this call, while all its items need `remaining_s` on this encoder."""
        needed_s = max(remaining_s, (remaining_s + self.done_s) / 2)
        return Rank(self.priority, self.waiting_since_s + patience * needed_s, self.age, item_index)

"""Keeps calls in order of rank, and shares out a pool fairly where some of its holders return nothing.

`CallQueue` orders the calls of one worker at one stage. `is_within_share` limits how much of a pool (decoded inputs,
the queue, the arena) one worker may hold, so that a worker that takes no features leaves room for the others.
`FirstRefused` decides when room is kept for a thing that found none. Together they are the three rules of fairness
between calls and between workers: `EncodeJobs` uses the queue, and `DecodeLine`, `FeatureTable` and the device queue
use one or both of the others.

The module has no clock, so callers pass the time in. It knows nothing of what a call waits for, or of what the holders
hold.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

from fabric.contracts import Rank

T = TypeVar("T")
_Entry = tuple[int, float, tuple[float, str], int]
_LEAST_STALE = 16


class CallQueue:
    """A `CallQueue` is a heap in which a changed rank is a new entry. The old entry is then stale: it is skipped, and
    it is dropped when it reaches the top or when more than half of the heap is stale. So a change takes amortised
    logarithmic time."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._call_to_entry: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return len(self._call_to_entry)

    def put(self, call: int, rank: Rank) -> None:
        """Adds a call, or corrects its rank."""
        entry = (rank.priority, rank.virtual_s, rank.age, call)
        if self._call_to_entry.get(call) == entry:
            return
        self._call_to_entry[call] = entry
        heapq.heappush(self._heap, entry)
        self._drop_stale()

    def drop(self, call: int) -> None:
        """Removes a call; does nothing if the call is not in the queue."""
        self._call_to_entry.pop(call, None)
        self._drop_stale()

    def first(self) -> int | None:
        return next(self.in_order(), None)

    def in_order(self) -> Iterator[int]:
        """Yields calls lazily, smallest rank first. The queue must not change during the iteration."""
        while self._heap and not self._is_valid(self._heap[0]):
            heapq.heappop(self._heap)
        heap = self._heap
        ahead = [(heap[0], 0)] if heap else []
        while ahead:
            entry, place = heapq.heappop(ahead)
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heapq.heappush(ahead, (heap[child], child))
            if self._is_valid(entry):
                yield entry[-1]

    def _drop_stale(self) -> None:
        if len(self._heap) > 2 * len(self._call_to_entry) + _LEAST_STALE:
            self._heap = list(self._call_to_entry.values())
            heapq.heapify(self._heap)

    def _is_valid(self, entry: _Entry) -> bool:
        # The test is on identity, because an equal stale entry may remain from an earlier time in the queue.
        return self._call_to_entry.get(entry[-1]) is entry


# ------------------------------------------------------------ shares of a pool


def is_within_share(held: float, more: float, free: float) -> bool:
    """Returns whether a holder of `held` may take `more` of the `free` part of a pool. A holder of nothing always may,
    because a thing that is larger than every share must be served at some time, too.

    The limit is the dynamic threshold of shared-memory switches (Choudhury and Hahne, 1998): a holder may take more
    while it holds no more than what stays free. The rule needs no knowledge of future demand. One stuck holder ends
    with half of the pool, two together end with three quarters, and some of the pool is always free.
    """
    return held == 0 or held + more <= free - more


class FirstRefused(Generic[T]):
    """A `FirstRefused` keeps the one thing that room is kept for: the thing that found no room before any other waiting
    thing did.

    A thing that is within its worker's share and finds no room is at first passed by all things that do find room.
    After a while it is *due*: room is kept for it, and other things pass it only if they fit next to that room, as in
    the backfilling of batch schedulers (EASY, Lifka 1995). So it waits for things that were there before it was due,
    and for nothing that came later.
    """

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

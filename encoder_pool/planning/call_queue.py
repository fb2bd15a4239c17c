"""Keeps calls in order of their ranks, which change while the calls wait. It knows nothing of what a call waits for."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from encoder_pool.planning.turns import Rank

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

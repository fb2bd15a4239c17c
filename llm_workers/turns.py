"""Keeps keys in the order of their turns while turns change and keys leave. It finds the first key in logarithmic time.

The queue is a heap that forgets late: a changed or discarded entry stays in the heap until it would come first, or
until more than half of the heap consists of such entries. This module knows nothing of what the keys are.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from fabric.ids import AttemptId, UnitKey
from llm_workers.scheduling.events import NextRead

Rank = tuple[int, float, str]
"""Holds priority (the lowest number first), wall time of admission, and request id, so that requests have the same
order everywhere."""


class ReadTurn(NamedTuple):
    """A `ReadTurn` is the place of one attempt's read of a unit in the order of all reads. A unit is one separately
    encoded part of a media item."""

    is_silent: bool
    """Says that the attempt is admitted but the engine does not report it as a reader: the attempt requested the unit
    and has found its positions in the prefix cache since. No unit with a reported reader is evicted for such a read."""
    rank: Rank
    read: NextRead


class Backwards(NamedTuple):
    """Reverses the order of a turn: in a queue of `Backwards` entries, the last turn comes first."""

    turn: ReadTurn

    def __lt__(self, other: tuple[ReadTurn, ...]) -> bool:
        return other[0] < self.turn

    def __gt__(self, other: tuple[ReadTurn, ...]) -> bool:
        return other[0] > self.turn


Key = TypeVar("Key", AttemptId, UnitKey)
Order = TypeVar("Order", ReadTurn, Backwards)
SPARE = 16
"""Limits the forgotten entries that may always stay in the heap."""


class TurnQueue(Generic[Key, Order]):
    """Holds each key once, with its order. Among equal orders the smaller key comes first."""

    def __init__(self) -> None:
        self._orders: dict[Key, Order] = {}
        self._heap: list[tuple[Order, Key]] = []

    def __len__(self) -> int:
        return len(self._orders)

    def __iter__(self) -> Iterator[Key]:
        """Iterates over the keys in no particular order."""
        return iter(self._orders)

    def put(self, key: Key, order: Order) -> None:
        """Adds a key, or changes the order of a key that is present."""
        if self._orders.get(key) == order:
            return
        self._orders[key] = order
        if len(self._heap) > 2 * len(self._orders) + SPARE:
            self._heap = [(order, key) for key, order in self._orders.items()]
            heapify(self._heap)
        else:
            heappush(self._heap, (order, key))

    def discard(self, key: Key) -> None:
        """Removes a key. A key that is not present is ignored."""
        self._orders.pop(key, None)

    def first(self) -> tuple[Order, Key] | None:
        """Returns the first key with its order, without removing it. Returns None if the queue is empty."""
        heap = self._heap
        while heap and self._orders.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0] if heap else None

"""Keys in the order of their turns, where turns change and keys leave: what comes first is found in logarithmic time.

A heap that forgets late: a changed or discarded entry stays in it until it would come first, or until more than half
of the heap is such entries. Knows nothing of what the keys are.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from fabric.ids import AttemptId, UnitKey
from llm_workers.scheduling.events import NextRead

Rank = tuple[int, float, str]
"""Priority (the lowest number first), wall time of admission, request id: requests have one order everywhere."""


class Turn(NamedTuple):
    """Whose read comes first, over all attempts."""

    is_silent: bool
    """Of an admitted attempt that the engine does not name as a reader: it asked for the unit and found its positions
    in the prefix cache since. Nothing makes room for it."""
    rank: Rank
    read: NextRead


class Backwards(NamedTuple):
    """A turn in the opposite order: of a queue of these, the last turn comes first."""

    turn: Turn

    def __lt__(self, other: tuple[Turn, ...]) -> bool:
        return other[0] < self.turn

    def __gt__(self, other: tuple[Turn, ...]) -> bool:
        return other[0] > self.turn


Key = TypeVar("Key", AttemptId, UnitKey)
Order = TypeVar("Order", Turn, Backwards)
SPARE = 16
"""Forgotten entries that are always allowed to stay."""


class TurnQueue(Generic[Key, Order]):
    """Each key once, with its order. Of equals the smaller key comes first."""

    def __init__(self) -> None:
        self._orders: dict[Key, Order] = {}
        self._heap: list[tuple[Order, Key]] = []

    def __len__(self) -> int:
        return len(self._orders)

    def __iter__(self) -> Iterator[Key]:
        """In no order."""
        return iter(self._orders)

    def put(self, key: Key, order: Order) -> None:
        """Adds a key, or gives it another order."""
        if self._orders.get(key) == order:
            return
        self._orders[key] = order
        if len(self._heap) > 2 * len(self._orders) + SPARE:
            self._heap = [(order, key) for key, order in self._orders.items()]
            heapify(self._heap)
        else:
            heappush(self._heap, (order, key))

    def discard(self, key: Key) -> None:
        """A key that is not there is ignored."""
        self._orders.pop(key, None)

    def first(self) -> tuple[Order, Key] | None:
        """The first key with its order, which stays; None if there is none."""
        heap = self._heap
        while heap and self._orders.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0] if heap else None

"""Provides two collections that stay in order: a heap for waiting items, and a list for running items.

This module knows nothing of what the items are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class RankedHeap(Generic[Item]):
    """Holds items with one key each, the smallest key first. Adding, moving and removing an item costs the logarithm of
    their number: an item that is moved or removed leaves its old entry in the heap, where it is skipped."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, Item]] = []
        self._item_to_serial: dict[Item, int] = {}
        """Holds the serial number of each item's valid entry; the number also orders items of equal key by the time
        when they were added."""
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._item_to_serial)

    def __contains__(self, item: Item) -> bool:
        return item in self._item_to_serial

    def __iter__(self) -> Iterator[Item]:
        """Yields the items in no particular order."""
        return iter(self._item_to_serial)

    def put(self, item: Item, key: Any) -> None:
        """Adds the item, or gives it another key."""
        self._item_to_serial[item] = self._next_serial
        heappush(self._entries, (key, self._next_serial, item))
        self._next_serial += 1
        if len(self._entries) > 2 * len(self._item_to_serial) + 16:
            self._entries = [one for one in self._entries if self._counts(one)]
            heapify(self._entries)

    def discard(self, item: Item) -> None:
        """Removes the item if it is here."""
        self._item_to_serial.pop(item, None)

    def peek(self) -> tuple[Any, Item] | None:
        """Returns the key and item that come first, or None."""
        while self._entries:
            key, _, item = self._entries[0]
            if self._counts(self._entries[0]):
                return key, item
            heappop(self._entries)
        return None

    def pop(self) -> tuple[Any, Item]:
        """Removes and returns the key and item that come first; there must be one."""
        first = self.peek()
        assert first is not None, "it is empty"
        heappop(self._entries)
        del self._item_to_serial[first[1]]
        return first

    def _counts(self, entry: tuple[Any, int, Item]) -> bool:
        return self._item_to_serial.get(entry[2]) == entry[1]


class RankedList(Generic[Item]):
    """Holds items in the order of a rank that no two of them share and that never changes. It is meant for
    running items, which are few, because adding one moves the items after it in memory."""

    def __init__(self, rank: Callable[[Item], Any]) -> None:
        self._rank = rank
        self._items: list[Item] = []
        self._members: set[Item] = set()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: Item) -> bool:
        return item in self._members

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def add(self, item: Item) -> None:
        """Adds the item; nothing happens if it is here already."""
        if item not in self._members:
            self._members.add(item)
            self._items.insert(self._place(item), item)

    def discard(self, item: Item) -> None:
        """Removes the item if it is here."""
        if item in self._members:
            self._members.remove(item)
            del self._items[self._place(item)]

    def has_below(self, item: Item) -> bool:
        """Returns whether an item ranks behind `item`, which need not be here."""
        return bool(self._items) and self._rank(self._items[-1]) > self._rank(item)

    def below(self, item: Item) -> list[Item]:
        """Returns the items that rank behind `item`, which need not be here; the lowest-ranked one is last."""
        at = self._place(item)
        return self._items[at + (item in self._members) :]

    def _place(self, item: Item) -> int:
        return bisect_left(self._items, self._rank(item), key=self._rank)

"""Keeps items in the order of keys that change.

A `RankedHeap` finds the first of many items while items come, go and change their keys. The scheduler keeps the
prompts and the tenants that wait in such heaps, and the worker's feature store the units to pull and to evict. The
module knows nothing of what the items or their keys are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Key = TypeVar("Key")
SPARE = 16
"""This many stale entries may always stay in a heap."""


class RankedHeap(Generic[Item, Key]):
    """Holds items with one key each, the smallest key first. Among equal keys, the item that got its key first comes
    first.

    Adding, moving and removing an item costs the logarithm of their number. An item that is moved or removed leaves its
    old entry in the heap. Such a stale entry is skipped, and it is dropped when it would come first, or when more than
    half of the heap is stale."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, Item]] = []
        self._item_to_entry: dict[Item, tuple[Any, int, Item]] = {}
        """Holds the valid entry of each item: its key, a serial number, and the item. The number also orders items of
        equal key."""
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._item_to_entry)

    def __contains__(self, item: Item) -> bool:
        return item in self._item_to_entry

    def __iter__(self) -> Iterator[Item]:
        """Yields the items in no particular order."""
        return iter(self._item_to_entry)

    def put(self, item: Item, key: Key) -> None:
        """Adds the item, or gives it another key. Nothing happens if the item has an equal key already."""
        entry = self._item_to_entry.get(item)
        if entry is not None and entry[0] == key:
            return
        entry = self._item_to_entry[item] = (key, self._next_serial, item)
        self._next_serial += 1
        if len(self._entries) > 2 * len(self._item_to_entry) + SPARE:
            self._entries = list(self._item_to_entry.values())
            heapify(self._entries)
        else:
            heappush(self._entries, entry)

    def discard(self, item: Item) -> None:
        """Removes the item if it is here."""
        self._item_to_entry.pop(item, None)

    def peek(self) -> tuple[Key, Item] | None:
        """Returns the key and item that come first, or None."""
        entries = self._entries
        while entries:
            entry = entries[0]
            if self._item_to_entry.get(entry[2]) is entry:
                return entry[0], entry[2]
            heappop(entries)
        return None

    def pop(self) -> tuple[Key, Item]:
        """Removes and returns the key and item that come first; there must be one."""
        first = self.peek()
        assert first is not None, "the heap is empty"
        heappop(self._entries)
        del self._item_to_entry[first[1]]
        return first

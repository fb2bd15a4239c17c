"""Keeps a set of numbers as ranges `[start, end)` that never touch, and finds them by place and by size.

It knows nothing of what the numbers are; the arena keeps its free memory and its reclaimable memory in this form.
"""

from __future__ import annotations

from collections.abc import Iterator

from fabric.ordered_integers import OrderedIntegers


class Ranges:
    """Keeps ranges over `[0, total)`; the set is empty at first. No operation's time grows with the number of
    ranges."""

    def __init__(self, total: int) -> None:
        self._span = total + 1
        self._start_to_end: dict[int, int] = {}
        self._end_to_start: dict[int, int] = {}
        self._starts = OrderedIntegers(total)
        self._sizes = OrderedIntegers(total * self._span + total)
        """Holds `size * span + start` of each range, so the ranges are ordered by size and then by place."""

    def add(self, start: int, end: int) -> None:
        """Adds a range and joins it with the neighbours that it touches. No part of it may be in the set."""
        before = self._end_to_start.get(start)
        if before is not None:
            self._drop(before, start)
            start = before
        after = self._start_to_end.get(end)
        if after is not None:
            self._drop(end, after)
            end = after
        self._put(start, end)

    def remove(self, start: int, end: int) -> None:
        """Removes a range, all of which must be in the set. The rest of the range that contained it stays, in one or
        two pieces."""
        outer_start, outer_end = self.around(start)
        assert end <= outer_end, f"[{start}, {end}) is not in [{outer_start}, {outer_end})"
        self._drop(outer_start, outer_end)
        if outer_start < start:
            self._put(outer_start, start)
        if end < outer_end:
            self._put(end, outer_end)

    def around(self, number: int) -> tuple[int, int]:
        """Returns the range that contains a number of the set."""
        start = self._starts.at_most(number)
        assert start is not None
        assert number < self._start_to_end[start], f"{number} is not in the set"
        return start, self._start_to_end[start]

    def starting_at(self, start: int) -> int | None:
        """Returns the end of the range that starts at `start`, or None."""
        return self._start_to_end.get(start)

    def ending_at(self, end: int) -> int | None:
        """Returns the start of the range that ends at `end`, or None."""
        return self._end_to_start.get(end)

    def best_fit(self, size: int) -> tuple[int, int] | None:
        """Returns the smallest range of at least that size, the first of equal ones, or None."""
        found = self._sizes.at_least(size * self._span)
        if found is None:
            return None
        start = found % self._span
        return start, self._start_to_end[start]

    def largest(self) -> tuple[int, int] | None:
        """Returns the largest range, the last of equal ones, or None if the set is empty."""
        found = self._sizes.at_most(self._span * self._span - 1)
        if found is None:
            return None
        start = found % self._span
        return start, self._start_to_end[start]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterates over the ranges in order of place. It is for checks, and walks all ranges."""
        return iter(sorted(self._start_to_end.items()))

    def _put(self, start: int, end: int) -> None:
        self._start_to_end[start] = end
        self._end_to_start[end] = start
        self._starts.add(start)
        self._sizes.add((end - start) * self._span + start)

    def _drop(self, start: int, end: int) -> None:
        del self._start_to_end[start]
        del self._end_to_start[end]
        self._starts.discard(start)
        self._sizes.discard((end - start) * self._span + start)

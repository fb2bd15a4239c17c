"""Keeps a sorted set of integers and finds the member nearest to a number, in a time that does not grow
with the number of members.

The set is a tree of bitmaps, with 512 children to a node, held sparsely in one dict per level (the idea of van Emde
Boas trees, with fixed fan-out). Its depth follows from the largest allowed member, which is known beforehand. The
module knows nothing of what the integers stand for.
"""

from __future__ import annotations

_BITS = 9
_MASK = (1 << _BITS) - 1


class OrderedIntegers:
    """Keeps members in `[0, largest]`. Each operation looks at one node per level: 3 levels for 2**27, and 6 for
    2**54."""

    def __init__(self, largest: int) -> None:
        num_levels = max(1, -(-largest.bit_length() // _BITS))
        self._levels: list[dict[int, int]] = [{} for _ in range(num_levels)]
        """Level 0 maps the upper bits of a member to a bitmap of its lowest bits. In the same way, each further level
        says which nodes of the level below contain members."""

    def add(self, member: int) -> None:
        """Adds a member. It does nothing for a member that is in the set."""
        for level in self._levels:
            node, bit = member >> _BITS, member & _MASK
            bitmap = level.get(node, 0)
            level[node] = bitmap | 1 << bit
            if bitmap:
                return
            member = node

    def discard(self, member: int) -> None:
        """Removes a member. It does nothing for a member that is not in the set."""
        for level in self._levels:
            node, bit = member >> _BITS, member & _MASK
            bitmap = level.get(node, 0) & ~(1 << bit)
            if bitmap:
                level[node] = bitmap
                return
            level.pop(node, None)
            member = node

    def at_least(self, number: int) -> int | None:
        """Returns the smallest member that is `number` or more, or None."""
        for height, level in enumerate(self._levels):
            node, bit = number >> _BITS, number & _MASK
            rest = level.get(node, 0) >> bit
            if rest:
                return self._descend(height, number + _lowest(rest), is_lowest=True)
            number = node + 1
        return None

    def at_most(self, number: int) -> int | None:
        """Returns the largest member that is `number` or less, or None."""
        for height, level in enumerate(self._levels):
            if number < 0:
                return None
            node, bit = number >> _BITS, number & _MASK
            rest = level.get(node, 0) & ((2 << bit) - 1)
            if rest:
                return self._descend(height, (node << _BITS) + rest.bit_length() - 1, is_lowest=False)
            number = node - 1
        return None

    def _descend(self, height: int, node: int, *, is_lowest: bool) -> int:
        """Returns the lowest or highest member below a node of the level under `height`."""
        for level in reversed(self._levels[:height]):
            bitmap = level[node]
            node = (node << _BITS) + (_lowest(bitmap) if is_lowest else bitmap.bit_length() - 1)
        return node


def _lowest(bitmap: int) -> int:
    return (bitmap & -bitmap).bit_length() - 1

"""Where things lie in one block of memory: a best-fit allocator over offsets.

Pure bookkeeping: it knows neither the memory itself, nor threads (the owner locks), nor what is stored. Every
byte is in exactly one of three states: free, used, or quarantined (given up by its owner, but something may still
be written there, so it must not be handed out).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from fabric.channel import ArenaUsage
from fabric.errors import ArenaFull, UnitTooLarge


class Slot(NamedTuple):
    """`[offset, offset + nbytes)` belongs to the holder. Ids and generations are never used twice."""

    slot_id: int
    offset: int
    nbytes: int
    generation: int


class Arena:
    """Slots in `[0, total_bytes)`, each aligned to `alignment` bytes and padded to a multiple of it."""

    def __init__(self, total_bytes: int, alignment: int = 64, first_generation: int = 1) -> None:
        """`first_generation`: generations count up from here; a random start keeps two lives of one address apart."""
        if alignment < 1 or total_bytes < alignment:
            raise ValueError(f"an arena of {total_bytes} bytes can't hold one unit of {alignment} bytes")
        self.total_bytes = total_bytes - total_bytes % alignment
        self.alignment = alignment
        self._next_slot_id = 0
        self._next_generation = first_generation
        self._used: dict[int, Slot] = {}
        self._quarantined: dict[int, Slot] = {}
        self._free_offsets: list[int] = [0]
        self._free_offset_to_nbytes: dict[int, int] = {0: self.total_bytes}

    def allocate(self, nbytes: int) -> Slot:
        """The smallest free range that fits, lowest offset first. Raises ArenaFull, or UnitTooLarge when it could
        not fit an empty arena either; ValueError for less than one byte."""
        if nbytes < 1:
            raise ValueError(f"can't allocate {nbytes} bytes")
        needed = self._padded(nbytes)
        if needed > self.total_bytes:
            raise UnitTooLarge(f"{nbytes} bytes never fit an arena of {self.total_bytes}")
        fitting = [(size, offset) for offset, size in self._free_offset_to_nbytes.items() if size >= needed]
        if not fitting:
            raise ArenaFull(f"no {nbytes} contiguous bytes are free of {self.total_bytes}")
        size, offset = min(fitting)
        self._remove_free(offset)
        if size > needed:
            self._add_free(offset + needed, size - needed)
        slot = Slot(self._next_slot_id, offset, nbytes, self._next_generation)
        self._next_slot_id += 1
        self._next_generation += 1
        self._used[slot.slot_id] = slot
        return slot

    def free(self, slot_id: int) -> bool:
        """Makes a used slot's memory reusable. False, and nothing happens, for one that is not in use (freed
        before, or quarantined)."""
        slot = self._used.pop(slot_id, None)
        if slot is None:
            return False
        self._give_back(slot)
        return True

    def quarantine(self, slot_id: int) -> bool:
        """Takes a used slot out of use without making its memory reusable. False if it is not in use."""
        slot = self._used.pop(slot_id, None)
        if slot is None:
            return False
        self._quarantined[slot_id] = slot
        return True

    def release_quarantine(self, slot_id: int) -> bool:
        """Nothing writes there any more: makes a quarantined slot's memory reusable. False if it is not one."""
        slot = self._quarantined.pop(slot_id, None)
        if slot is None:
            return False
        self._give_back(slot)
        return True

    def is_used(self, slot_id: int) -> bool:
        return slot_id in self._used

    def usage(self) -> ArenaUsage:
        """`used_bytes` and `quarantined_bytes` with padding, so that free = total - used - quarantined."""
        return ArenaUsage(
            used_bytes=sum(self._padded(slot.nbytes) for slot in self._used.values()),
            total_bytes=self.total_bytes,
            num_slots=len(self._used),
            quarantined_bytes=sum(self._padded(slot.nbytes) for slot in self._quarantined.values()),
            num_quarantined=len(self._quarantined),
        )

    def check_invariants(self) -> None:
        """Asserts that free, used and quarantined ranges tile the arena, and that no two free ranges touch."""
        assert self._free_offsets == sorted(self._free_offset_to_nbytes), "free list and map differ"
        ranges = [(offset, size, "free") for offset, size in self._free_offset_to_nbytes.items()]
        held = (*self._used.values(), *self._quarantined.values())
        ranges += [(slot.offset, self._padded(slot.nbytes), "held") for slot in held]
        end, previous = 0, "held"
        for offset, size, kind in sorted(ranges):
            assert offset == end, f"gap or overlap at {end}..{offset}"
            assert not (kind == previous == "free"), f"free ranges touch at {offset}"
            assert size > 0, f"empty range at {offset}"
            assert offset % self.alignment == 0, f"{offset} is not aligned"
            end, previous = offset + size, kind
        assert end == self.total_bytes, f"the tail {end}..{self.total_bytes} is lost"

    def _padded(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def _give_back(self, slot: Slot) -> None:
        """Adds the slot's range to the free ones, joined with free neighbours."""
        offset, size = slot.offset, self._padded(slot.nbytes)
        after = bisect_left(self._free_offsets, offset)
        if after < len(self._free_offsets) and self._free_offsets[after] == offset + size:
            size += self._remove_free(offset + size)
        if after > 0:
            before = self._free_offsets[after - 1]
            if before + self._free_offset_to_nbytes[before] == offset:
                size += self._remove_free(before)
                offset = before
        self._add_free(offset, size)

    def _add_free(self, offset: int, nbytes: int) -> None:
        insort(self._free_offsets, offset)
        self._free_offset_to_nbytes[offset] = nbytes

    def _remove_free(self, offset: int) -> int:
        del self._free_offsets[bisect_left(self._free_offsets, offset)]
        return self._free_offset_to_nbytes.pop(offset)

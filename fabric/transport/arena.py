"""Decides where slots lie in one block of memory: an `Arena` is a best-fit allocator over offsets.

Every byte of an arena is in exactly one of four states. It is free, busy, idle (in use, but its owner would give it up
for another allocation) or quarantined (given up by its owner, but a transfer may still write there, so it must not be
handed out).

    | busy | idle | free | idle | busy | free | idle | idle | quarantined | ...
           <----- open ----->      <----- open ----->

A request that no free range can hold succeeds exactly if it fits an open range: the idle and free memory between two
slots that must stay. `victims` says which idle slots to give up for it, and names none that would not help. For a
request that fits no open range, one range may be *claimed*: nothing else is placed there, so it becomes free once the
slots that lie there have been freed.

The arena keeps its free memory and its open memory as `Ranges`, which find a range by its place and by its size. These
in turn stand on `OrderedIntegers`, a sorted set of numbers. So no operation's time grows with the number of slots
(`docs/adr/0029-arena-by-ranges.md`).

This module is pure bookkeeping: it knows nothing of the memory itself, of threads (the owner locks), or of what is
stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from fabric.contracts import ArenaFull, UnitTooLarge

# ------------------------------------------------------------ slots in an arena


class ArenaUsage(NamedTuple):
    used_bytes: int
    total_bytes: int
    num_slots: int
    quarantined_bytes: int
    num_quarantined: int


class Slot(NamedTuple):
    """A `Slot` is the memory `[offset, offset + nbytes)`, which belongs to its holder. Ids and generations are never
    reused."""

    slot_id: int
    offset: int
    nbytes: int
    generation: int


NUM_OLDEST = 16
"""Limits how many of the least recently used slots `victims` looks at for a place; it also looks at no more than about
an eighth of all idle slots. If no such slot suits, it takes any place that is large enough."""


class Arena:
    """Keeps slots in `[0, total_bytes)`, each aligned to `alignment` bytes and padded to a multiple of it."""

    def __init__(self, total_bytes: int, alignment: int = 64, first_generation: int = 1) -> None:
        """Creates an empty arena. Generations count up from `first_generation`; a random start keeps slots of two
        successive arenas at one address apart."""
        if alignment < 1 or total_bytes < alignment:
            raise ValueError(f"an arena of {total_bytes} bytes can't hold one unit of {alignment} bytes")
        self.total_bytes = total_bytes - total_bytes % alignment
        self.alignment = alignment
        self._next_slot_id = 0
        self._next_generation = first_generation
        self._used: dict[int, Slot] = {}
        """Holds busy and idle slots."""
        self._quarantined: dict[int, Slot] = {}
        self._used_bytes = self._quarantined_bytes = 0
        self._idle: OrderedDict[int, int] = OrderedDict()
        """Maps the ids of idle slots, the least recently used first, to a number that grows with each slot that becomes
        idle."""
        self._num_idled = 0
        self._start_to_slot_id: dict[int, int] = {}
        """Maps the first unit of each slot in use to its id. All places below are in units of `alignment`."""
        self._end_to_slot_id: dict[int, int] = {}
        num_units = self.total_bytes // alignment
        self._free = Ranges(num_units)
        self._open = Ranges(num_units)
        """Holds the ranges that are free or idle."""
        self._free.add(0, num_units)
        self._open.add(0, num_units)
        self._claim: tuple[int, int] | None = None
        self._claimed_slots: dict[int, tuple[int, int]] = {}
        """Maps the slots that lie at least partly in the claimed range, in use or quarantined, to their places."""

    def allocate(self, nbytes: int, *, is_claimed: bool = False) -> Slot:
        """Returns a busy slot in the smallest free range that fits, the one with the lowest offset first. With
        `is_claimed`, the slot lies in the claimed range, and the claim ends. Raises ArenaFull if there is no room,
        UnitTooLarge if the slot would not fit even an empty arena, and ValueError for less than one byte."""
        num_units = self._num_units(nbytes)
        if num_units * self.alignment > self.total_bytes:
            raise UnitTooLarge(
                f"{nbytes} bytes do not fit into an arena of {self.total_bytes} bytes, even if it is empty"
            )
        if is_claimed and (self._claim is None or self._claimed_slots):
            raise ArenaFull("the claimed range is not free yet")
        claim = self._claim
        if is_claimed:
            self.unclaim()
        found = claim if is_claimed else self._free.best_fit(num_units)
        if found is None:
            raise ArenaFull(f"the arena of {self.total_bytes} bytes has no free range of {nbytes} bytes")
        start, end = found[0], found[0] + num_units
        self._free.remove(start, end)
        self._open.remove(start, end)
        slot = Slot(self._next_slot_id, start * self.alignment, nbytes, self._next_generation)
        self._next_slot_id += 1
        self._next_generation += 1
        self._used[slot.slot_id] = slot
        self._start_to_slot_id[start] = self._end_to_slot_id[end] = slot.slot_id
        self._used_bytes += num_units * self.alignment
        return slot

    def claim(self, nbytes: int) -> list[int] | None:
        """Keeps a range for `nbytes` in which nothing is placed any more, until that much is allocated there or
        `unclaim` is called. Returns the slots in use that lie there, at least in part; the range becomes free when they
        are freed. The range is the largest open range, extended by its neighbours, the smaller neighbour first. Returns
        None and claims nothing if quarantined slots leave no such range. The caller must not call it while there is
        another claim, or if an open range is large enough."""
        assert self._claim is None, "one range is claimed at a time"
        num_units = self._num_units(nbytes)
        start, end = self._open.largest() or (0, 0)
        is_grown_up = True
        while end - start < num_units:
            before, after = self._open.ending_at(start), self._open.starting_at(end)
            if before is not None or after is not None:
                start, end = start if before is None else before, end if after is None else after
                continue
            sides = [self._end_to_slot_id.get(start), self._start_to_slot_id.get(end)]
            near = [self._used[slot_id] for slot_id in sides if slot_id is not None]
            if not near:
                return None
            place = self._place(min(near, key=lambda slot: slot.nbytes))
            is_grown_up = place[0] == end
            start, end = min(start, place[0]), max(end, place[1])
        self._claimed_slots = self._slots_between(start, end)
        self._claim = (start, start + num_units) if is_grown_up else (end - num_units, end)
        self._claimed_slots = {one: place for one, place in self._claimed_slots.items() if self._is_in_claim(*place)}
        for slot_id, place in self._claimed_slots.items():
            if slot_id in self._idle:
                self._open.remove(*place)
        for gap in self._gaps_in_claim():
            self._free.remove(*gap)
            self._open.remove(*gap)
        return list(self._claimed_slots)

    def unclaim(self) -> None:
        """Ends the claim, if there is one: the free and idle memory of its range is ordinary memory again."""
        if self._claim is None:
            return
        for gap in self._gaps_in_claim():
            self._free.add(*gap)
            self._open.add(*gap)
        for slot_id, place in self._claimed_slots.items():
            if slot_id in self._idle:
                self._open.add(*place)
        self._claim, self._claimed_slots = None, {}

    def free(self, slot_id: int) -> bool:
        """Makes a used slot's memory reusable. Returns False and does nothing for a slot that is not in use (because it
        was freed before, or is quarantined)."""
        slot = self._take_out(slot_id)
        if slot is None:
            return False
        self._give(slot)
        return True

    def quarantine(self, slot_id: int) -> bool:
        """Takes a used slot out of use without making its memory reusable. Returns False if the slot is not in use."""
        slot = self._take_out(slot_id)
        if slot is None:
            return False
        self._quarantined[slot_id] = slot
        self._quarantined_bytes += self._padded(slot.nbytes)
        return True

    def release_quarantine(self, slot_id: int) -> bool:
        """Makes a quarantined slot's memory reusable, because nothing writes there any more. Returns False if the slot
        is not quarantined."""
        slot = self._quarantined.pop(slot_id, None)
        if slot is None:
            return False
        self._quarantined_bytes -= self._padded(slot.nbytes)
        self._give(slot)
        return True

    def set_idle(self, slot_id: int) -> None:
        """Lets the slot in use be given up for another from now on. The slot becomes the most recently used of the idle
        slots."""
        if self._idle.pop(slot_id, None) is None and slot_id not in self._claimed_slots:
            self._open.add(*self._place(self._used[slot_id]))
        self._num_idled += 1
        self._idle[slot_id] = self._num_idled

    def set_busy(self, slot_id: int) -> None:
        """Keeps the slot in use from being given up. It does nothing for a slot that is busy."""
        if self._idle.pop(slot_id, None) is not None and slot_id not in self._claimed_slots:
            self._open.remove(*self._place(self._used[slot_id]))

    def victims(self, nbytes: int) -> list[int] | None:
        """Returns idle slots that, together with the free memory around them, make room for `nbytes`. They are
        neighbours: the choice starts at one of the least recently used slots and grows towards the older side. Of these
        starts it takes the one in the smallest open range, so that large ranges stay. Without the largest of them, the
        victims are smaller than `nbytes`. Returns an empty list if a free range fits, and None if no choice of idle
        slots makes room."""
        num_units = self._num_units(nbytes)
        if self._free.best_fit(num_units) is not None:
            return []
        place = self._open.best_fit(num_units)
        if place is None:
            return None
        found: tuple[int, int] | None = None
        for slot_id in islice(self._idle, min(NUM_OLDEST, 1 + len(self._idle) // 8)):
            if slot_id in self._claimed_slots:
                continue
            start, end = self._open.around(self._place(self._used[slot_id])[0])
            if end - start >= num_units and (found is None or end - start < found[0]):
                found = (end - start, slot_id)
        if found is None:
            return self._grow(place[0], place[0], num_units, [])
        return self._grow(*self._place(self._used[found[1]]), num_units, [found[1]])

    def is_used(self, slot_id: int) -> bool:
        return slot_id in self._used

    def is_idle(self, slot_id: int) -> bool:
        return slot_id in self._idle

    def usage(self) -> ArenaUsage:
        """Returns the usage. `used_bytes` and `quarantined_bytes` include padding, so that free = total - used -
        quarantined."""
        return ArenaUsage(
            used_bytes=self._used_bytes,
            total_bytes=self.total_bytes,
            num_slots=len(self._used),
            quarantined_bytes=self._quarantined_bytes,
            num_quarantined=len(self._quarantined),
        )

    def check_invariants(self) -> None:
        """Asserts that free, claimed, used and quarantined ranges tile the arena, that no two free ranges touch, and
        that open ranges are exactly what is free or idle and not claimed. It walks all slots and ranges."""
        ranges = [(start, end, "free") for start, end in self._free]
        ranges += [(start, end, "busy") for start, end in self._gaps_in_claim()]
        for slot in self._used.values():
            is_open = self.is_idle(slot.slot_id) and slot.slot_id not in self._claimed_slots
            ranges.append((*self._place(slot), "idle" if is_open else "busy"))
        held = (*self._used.values(), *self._quarantined.values())
        in_claim = {slot.slot_id: self._place(slot) for slot in held if self._is_in_claim(*self._place(slot))}
        assert in_claim == self._claimed_slots
        ranges += [(*self._place(slot), "busy") for slot in self._quarantined.values()]
        at, previous = 0, "busy"
        open_ranges: list[tuple[int, int]] = []
        for start, end, kind in sorted(ranges):
            assert start == at, f"gap or overlap at {at}..{start}"
            assert not (kind == previous == "free"), f"free ranges touch at {start}"
            assert end > start, f"empty range at {start}"
            if kind != "busy" and previous != "busy" and open_ranges:
                open_ranges[-1] = (open_ranges[-1][0], end)
            elif kind != "busy":
                open_ranges.append((start, end))
            at, previous = end, kind
        assert at == self.total_bytes // self.alignment, f"the tail from {at} is lost"
        assert open_ranges == list(self._open), "open ranges are not what is free or idle"
        places = {slot_id: self._place(slot) for slot_id, slot in self._used.items()}
        assert self._start_to_slot_id == {start: slot_id for slot_id, (start, _) in places.items()}
        assert self._end_to_slot_id == {end: slot_id for slot_id, (_, end) in places.items()}
        assert self._used_bytes == sum(self._padded(slot.nbytes) for slot in self._used.values())
        assert self._quarantined_bytes == sum(self._padded(slot.nbytes) for slot in self._quarantined.values())
        assert self._idle.keys() <= self._used.keys()

    def _grow(self, start: int, end: int, num_units: int, victims: list[int]) -> list[int]:
        """Adds neighbours of `[start, end)` until the range is large enough: free memory first, otherwise the older
        slot. The range must lie in one open range that is large enough."""
        while end - start < num_units:
            free_start, free_end = self._free.ending_at(start), self._free.starting_at(end)
            if free_start is not None or free_end is not None:
                start = start if free_start is None else free_start
                end = end if free_end is None else free_end
                continue
            before, after = self._idle_at(self._end_to_slot_id, start), self._idle_at(self._start_to_slot_id, end)
            slot_id = min((one for one in (before, after) if one is not None), key=self._idle.__getitem__)
            victims.append(slot_id)
            place = self._place(self._used[slot_id])
            start, end = min(start, place[0]), max(end, place[1])
        return victims

    def _idle_at(self, place_to_slot_id: dict[int, int], place: int) -> int | None:
        slot_id = place_to_slot_id.get(place)
        return slot_id if slot_id in self._idle and slot_id not in self._claimed_slots else None

    def _is_in_claim(self, start: int, end: int) -> bool:
        return self._claim is not None and start < self._claim[1] and self._claim[0] < end

    def _gaps_in_claim(self) -> list[tuple[int, int]]:
        """Returns the parts of the claimed range that are neither in use nor quarantined."""
        if self._claim is None:
            return []
        at, end = self._claim
        gaps = []
        for slot_start, slot_end in [*sorted(self._claimed_slots.values()), (end, end)]:
            if slot_start > at:
                gaps.append((at, slot_start))
            at = max(at, slot_end)
        return gaps

    def _slots_between(self, at: int, end: int) -> dict[int, tuple[int, int]]:
        """Maps the slots in use between two edges of slots to their places. Nothing between the edges may be
        quarantined."""
        found = {}
        while at < end:
            slot_id = self._start_to_slot_id.get(at)
            if slot_id is not None:
                found[slot_id] = self._place(self._used[slot_id])
                at = found[slot_id][1]
            else:
                free_end = self._free.starting_at(at)
                assert free_end is not None
                at = free_end
        return found

    def _give(self, slot: Slot) -> None:
        """Frees the place of a slot that was taken out, except for the part of it that is claimed."""
        start, end = self._place(slot)
        if self._claimed_slots.pop(slot.slot_id, None) is None:
            self._free.add(start, end)
            self._open.add(start, end)
            return
        assert self._claim is not None
        for piece in ((start, min(end, self._claim[0])), (max(start, self._claim[1]), end)):
            if piece[0] < piece[1]:
                self._free.add(*piece)
                self._open.add(*piece)

    def _take_out(self, slot_id: int) -> Slot | None:
        """Takes a slot out of use, and its memory out of the open ranges. Returns None for a slot that is not in
        use."""
        slot = self._used.get(slot_id)
        if slot is None:
            return None
        self.set_busy(slot_id)
        del self._used[slot_id]
        start, end = self._place(slot)
        del self._start_to_slot_id[start]
        del self._end_to_slot_id[end]
        self._used_bytes -= self._padded(slot.nbytes)
        return slot

    def _num_units(self, nbytes: int) -> int:
        if nbytes < 1:
            raise ValueError(f"the arena can't allocate {nbytes} bytes; a slot has at least 1 byte")
        return -(-nbytes // self.alignment)

    def _padded(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def _place(self, slot: Slot) -> tuple[int, int]:
        start = slot.offset // self.alignment
        return start, start + self._num_units(slot.nbytes)


# ------------------------------------------------------------ ranges by place and by size


class Ranges:
    """Keeps a set of numbers in `[0, total)` as ranges `[start, end)` that never touch, and finds them by place and by
    size. The set is empty at first. No operation's time grows with the number of ranges."""

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


# ------------------------------------------------------------ a sorted set of integers

_BITS = 9
_MASK = (1 << _BITS) - 1


class OrderedIntegers:
    """Keeps a sorted set of integers in `[0, largest]` and finds the member nearest to a number.

    The set is a tree of bitmaps, with 512 children to a node, held sparsely in one dict per level (the idea of van Emde
    Boas trees, with fixed fan-out). Its depth follows from the largest allowed member, which is known beforehand. Each
    operation looks at one node per level, 3 levels for 2**27 and 6 for 2**54, so its time does not grow with the number
    of members.
    """

    def __init__(self, largest: int) -> None:
        num_levels = max(1, -(-largest.bit_length() // _BITS))
        self._largest = largest
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
        """Returns the largest member that is `number` or less, or None. `number` may be more than the largest allowed
        member."""
        number = min(number, self._largest)
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

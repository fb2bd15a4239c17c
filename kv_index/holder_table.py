"""Keeps which members hold which block of a tree of prefixes, in a bounded table that evicts what was not used for
long.

Two tables do the same. `NativeTable` is C code (`holder_table.c`, which describes the method). `PlainTable` is Python
and is used where there is no compiler; it is told of every `ANCHOR_STRIDE`-th block only, because a block takes three
times the memory there. `new_table` chooses.

A block is known by its hash, 16 bytes, of which a table keeps 64 bits. Members are known by numbers that the table
gives out, and each has a slot, which is the caller's number for it. This module knows nothing of events, of epochs, and
of what a block contains.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fabric.c_library import load_c_library
from fabric.contracts import ANCHOR_STRIDE, KV_HASH_BYTES

_LOG = logging.getLogger(__name__)
Depths = npt.NDArray[np.int32]
SWEPT_PER_CALL = 4096
"""A call of `sweep` looks at this many entries, which takes a tenth of a millisecond in C."""


class TableStats(NamedTuple):
    num_keys: int
    num_evicted: int
    """Counts the entries that were evicted since the start, to make room for others."""
    num_refused: int
    """Counts the blocks that were not recorded since the start: mostly because the block ahead of them was evicted."""
    num_bytes: int
    num_sets: int
    """Counts the different sets of holders."""
    num_rescued: int
    """Counts the entries that were moved from the end of the order of use because others were below them."""


class HolderTable(Protocol):
    """A `HolderTable` maps blocks to the members that hold them. It has at most `max_keys` entries. A new entry in a
    full table evicts the least recently used one that has no block below it, so every entry can be reached from the
    root at any time. `stride` says which blocks of a chain the caller must name: every one, or every `stride`-th."""

    @property
    def stride(self) -> int: ...

    @property
    def max_keys(self) -> int: ...

    def join(self, slot: int) -> int:
        """Adds a member with the caller's number `slot`, and returns the table's number for it."""
        ...

    def leave(self, member: int) -> None:
        """Forgets the member at once. `sweep` later clears what the table still knows of it."""
        ...

    def sweep(self, num_entries: int = SWEPT_PER_CALL) -> None:
        """Takes members that left out of this many entries, and deletes those without a holder."""
        ...

    def store(self, member: int, parent: bytes | None, hashes: bytes) -> bool:
        """Records that the member holds a run of blocks below `parent`. Blocks whose parent is unknown are refused.
        Returns False if not even the first block was recorded."""
        ...

    def remove(self, member: int, hashes: bytes) -> None:
        """Records that the member no longer holds these blocks."""
        ...

    def lookup(self, hashes: bytes, depths: Depths) -> None:
        """Sets the entry of each slot in `depths` to the number of leading blocks that its member holds, and all other
        entries to 0. The last block that is found counts as used. Raises ValueError if a slot has no entry there."""
        ...

    def holders(self, block: bytes) -> list[int]:
        """Returns the slots of the members that hold the block, which then counts as used."""
        ...

    def holders_of(self, blocks: Sequence[bytes]) -> list[list[int]]:
        """Returns what `holders` returns for each of these blocks."""

    def stats(self) -> TableStats: ...

    def check_invariants(self) -> None:
        """Raises AssertionError unless the table is consistent. It takes time in proportion to the table."""
        ...


def new_table(max_keys: int, stride: int = ANCHOR_STRIDE) -> HolderTable:
    """Returns a table in C for `max_keys` blocks. Where it can't be compiled, returns one in Python for as many blocks,
    of which the caller names every `stride`-th."""
    library = _library()
    return PlainTable(max_keys, stride) if library is None else NativeTable(max_keys, library)


# ------------------------------------------------------------ in C


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_c_library(Path(__file__).with_name("holder_table.c"))
    if library is None:
        _LOG.info("the index of prefixes runs in Python and knows every %dth block of a prompt", ANCHOR_STRIDE)
        return None
    u32, i32, pointer, text = ctypes.c_uint32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p
    signatures = {
        "ht_new": ([u32], pointer),
        "ht_free": ([pointer], None),
        "ht_join": ([pointer, i32], u32),
        "ht_leave": ([pointer, u32], None),
        "ht_sweep": ([pointer, u32], u32),
        "ht_store": ([pointer, u32, text, text, u32], u32),
        "ht_remove": ([pointer, u32, text, u32], None),
        "ht_lookup": ([pointer, text, u32, pointer, u32], None),
        "ht_holders": ([pointer, text, pointer], u32),
        "ht_holders_of": ([pointer, text, u32, pointer, pointer], u32),
        "ht_stats": ([pointer, pointer], None),
        "ht_check": ([pointer], ctypes.c_int),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    _LOG.info("the index of prefixes runs in C")
    return library


class NativeTable:
    """A `NativeTable` is a `HolderTable` in C. A block takes about 50 bytes."""

    stride = 1

    def __init__(self, max_keys: int, library: ctypes.CDLL) -> None:
        """Raises MemoryError."""
        self.max_keys = max_keys
        self._table = library.ht_new(max_keys)
        if not self._table:
            raise MemoryError(f"there is no memory for an index of {max_keys} blocks")
        weakref.finalize(self, library.ht_free, self._table)
        self._library = library
        self._lookup = library.ht_lookup
        self._is_sweep_due = False
        """Says whether members left since the last call of `sweep` that found nothing left to do."""
        self._num_slots = 0
        self._slots = (ctypes.c_int32 * 0)()
        """Has room for the holders of as many blocks as `_counts` has."""
        self._counts = (ctypes.c_uint32 * 0)()
        self._depths: Depths | None = None
        """Holds the array of the latest lookup, so that the next one with the same array need not check it."""
        self._depths_at = 0

    def join(self, slot: int) -> int:
        member = int(self._library.ht_join(self._table, slot))
        if member == 0xFFFFFFFF:
            raise MemoryError("there is no memory for one more member of the index")
        if slot >= self._num_slots:
            self._num_slots, self._depths = slot + 1, None
            self._slots, self._counts = (ctypes.c_int32 * 0)(), (ctypes.c_uint32 * 0)()
        return member

    def leave(self, member: int) -> None:
        self._library.ht_leave(self._table, member)
        self._is_sweep_due = True

    def sweep(self, num_entries: int = SWEPT_PER_CALL) -> None:
        if self._is_sweep_due:
            self._is_sweep_due = self._library.ht_sweep(self._table, num_entries) != 0

    def store(self, member: int, parent: bytes | None, hashes: bytes) -> bool:
        count = len(hashes) // KV_HASH_BYTES
        return bool(self._library.ht_store(self._table, member, parent, hashes, count) > 0 or not count)

    def remove(self, member: int, hashes: bytes) -> None:
        self._library.ht_remove(self._table, member, hashes, len(hashes) // KV_HASH_BYTES)

    def lookup(self, hashes: bytes, depths: Depths) -> None:
        if depths is not self._depths:
            _check_depths(depths, self._num_slots)
            self._depths, self._depths_at = depths, depths.ctypes.data
        self._lookup(self._table, hashes, len(hashes) // KV_HASH_BYTES, self._depths_at, len(depths))

    def holders(self, block: bytes) -> list[int]:
        return self.holders_of([block])[0]

    def holders_of(self, blocks: Sequence[bytes]) -> list[list[int]]:
        num, total = len(blocks), 0
        if num > len(self._counts):
            self._counts, self._slots = (ctypes.c_uint32 * num)(), (ctypes.c_int32 * (num * self._num_slots))()
        if not self._library.ht_holders_of(self._table, b"".join(blocks), num, self._counts, self._slots):
            return [[] for _ in blocks]
        found = []
        for count in self._counts[:num]:
            found.append(self._slots[total : total + count])
            total += count
        return found

    def stats(self) -> TableStats:
        numbers = np.zeros(7, dtype=np.uint64)
        self._library.ht_stats(self._table, numbers.ctypes.data)
        return TableStats(*numbers.tolist()[:6])

    def check_invariants(self) -> None:
        broken = self._library.ht_check(self._table)
        assert broken == 0, f"the table of holders breaks rule {broken} of ht_check"


def _check_depths(depths: Depths, num_slots: int) -> None:
    if depths.dtype != np.int32 or depths.ndim != 1 or not depths.flags.c_contiguous or len(depths) < num_slots:
        message = f"depths must be a contiguous int32 array with at least {num_slots} entries, one per slot"
        raise ValueError(f"{message}, not {depths.dtype} with shape {depths.shape}")


# ------------------------------------------------------------ in Python

_KEY_FACTOR = np.uint64(0x9E37_79B9_7F4A_7C15)
_FREE = 0xFFFF_FFFF
_RESCUES_AHEAD, _SWEPT_WHEN_FULL = 2, 32
_MAX_IDLE_MASKS = 1024
_PLAIN_SWEPT_PER_CALL = 256


class PlainTable:
    """A `PlainTable` is a `HolderTable` in Python. Its entries are rows of arrays, a set of holders is an integer with
    a bit per member, and equal integers exist once. The method is that of `holder_table.c`."""

    def __init__(self, max_keys: int, stride: int) -> None:
        self.stride = stride
        self.max_keys = -(-max_keys // stride)
        self._key_to_row: dict[int, int] = {}
        self._key, self._parent, self._children = array("Q", [0]), array("I", [0]), array("I", [0])
        self._newer, self._older = array("I", [0]), array("I", [0])
        self._masks: list[int] = [0]
        self._mask_to_itself: dict[int, int] = {}
        self._free_row = 0
        self._num_evicted = self._num_refused = self._num_rescued = 0
        self._slots: list[int] = []
        self._num_slots = 0
        self._free_members: list[int] = []
        self._live = self._stored = self._leaving = self._left = 0
        self._cursor = 0

    # -------------------------------------------------------- members

    def join(self, slot: int) -> int:
        if self._free_members:
            member = self._free_members.pop()
            self._slots[member] = slot
        else:
            member = len(self._slots)
            self._slots.append(slot)
        self._num_slots = max(self._num_slots, slot + 1)
        self._live |= 1 << member
        return member

    def leave(self, member: int) -> None:
        bit = 1 << member
        self._live &= ~bit
        if not self._stored & bit:
            self._free_members.append(member)
            return
        self._left |= bit
        if not self._cursor:
            self._begin_sweep()

    def _begin_sweep(self) -> None:
        self._leaving, self._left = self._left, 0
        self._stored &= ~self._leaving
        self._cursor = 1 if self._leaving else 0

    def sweep(self, num_entries: int = _PLAIN_SWEPT_PER_CALL) -> None:
        for _ in range(num_entries):
            row = self._cursor
            if not row:
                return
            if row >= len(self._key):
                self._free_members += _bits(self._leaving)
                self._begin_sweep()
                continue
            self._cursor += 1
            if self._masks[row] & self._leaving and self._parent[row] != _FREE:
                self._set_mask(row, self._masks[row] & ~self._leaving)
                self._delete_if_void(row)

    # -------------------------------------------------------- blocks

    def store(self, member: int, parent: bytes | None, hashes: bytes) -> bool:
        keys, at, added, bit = _keys(hashes), 0, 0, 1 << member
        if parent is not None:
            at = self._key_to_row.get(_keys(parent)[0], 0)
            if not at:
                self._num_refused += len(keys)
                return not keys
        self._stored |= bit
        for index, key in enumerate(keys):
            row = self._key_to_row.get(key, 0)
            if row and self._parent[row] != at:  # Another block has the same key.
                row = 0
            elif row:
                added = 0
            else:
                self._children[at] += 1  # This keeps the parent from being evicted.
                if not added:
                    self._make_room(len(keys) - index)
                row = added = self._add(key, at, added)
                self._children[at] -= 1
            if not row:
                self._num_refused += len(keys) - index
                if not added and self._delete_if_void(at):
                    return index > 0
                if at and not added:
                    self._touch(at)
                return index > 0
            if not self._masks[row] & bit:
                self._set_mask(row, self._masks[row] | bit)
            at = row
        if at and not added:
            self._touch(at)
        return True

    def remove(self, member: int, hashes: bytes) -> None:
        bit = 1 << member
        for key in _keys(hashes):
            row = self._key_to_row.get(key, 0)
            if row and self._masks[row] & bit:
                self._set_mask(row, self._masks[row] & ~bit)
                self._delete_if_void(row)

    def lookup(self, hashes: bytes, depths: Depths) -> None:
        _check_depths(depths, self._num_slots)
        depths[:] = 0
        held, last, at, depth = self._live, -1, 0, 0
        get, parents, masks = self._key_to_row.get, self._parent, self._masks
        for key in _keys(hashes):
            row = get(key, 0)
            if not row or parents[row] != at:
                break
            mask = masks[row]
            if mask is not last:
                rest = held & mask
                if rest != held and depth:
                    for member in _bits(held & ~mask):
                        depths[self._slots[member]] = depth
                held, last = rest, mask
                if not held:
                    break
            at = row
            depth += 1
        if at:
            self._touch(at)
            for member in _bits(held):
                depths[self._slots[member]] = depth

    def holders(self, block: bytes) -> list[int]:
        row = self._key_to_row.get(_keys(block)[0], 0)
        if not row:
            return []
        self._touch(row)
        return [self._slots[member] for member in _bits(self._masks[row] & self._live)]

    # -------------------------------------------------------- rows

    def holders_of(self, blocks: Sequence[bytes]) -> list[list[int]]:
        return [self.holders(block) for block in blocks]

    def _set_mask(self, row: int, mask: int) -> None:
        self._masks[row] = self._mask_to_itself.setdefault(mask, mask)
        if len(self._mask_to_itself) > 2 * len(self._key) + _MAX_IDLE_MASKS:
            self._mask_to_itself = {mask: mask for mask in self._masks}

    def _make_room(self, count: int) -> None:
        while self.max_keys - len(self._key_to_row) < count:
            if self._cursor:
                before = len(self._key_to_row)
                self.sweep(_SWEPT_WHEN_FULL)
                if len(self._key_to_row) < before:
                    continue
            if not self._evict():
                return

    def _add(self, key: int, parent: int, ahead: int) -> int:
        row = self._free_row
        if row:
            self._free_row = self._children[row]
            self._key[row], self._parent[row], self._children[row] = key, parent, 0
        elif len(self._key) <= self.max_keys:
            row = len(self._key)
            self._key.append(key)
            self._parent.append(parent)
            for column in (self._children, self._newer, self._older):
                column.append(0)
            self._masks.append(0)
        else:
            return 0
        self._children[parent] += 1
        self._key_to_row[key] = row
        self._attach(row, ahead)
        for _ in range(_RESCUES_AHEAD if len(self._key_to_row) > self.max_keys // 2 else 0):
            if not self._children[self._newer[0]]:
                break
            self._touch(self._newer[0])
        return row

    def _evict(self) -> bool:
        for _ in range(len(self._key_to_row) + 1):
            row = self._newer[0]
            if not row:
                return False
            if not self._children[row]:
                before = len(self._key_to_row)
                self._delete(row)
                self._num_evicted += before - len(self._key_to_row)
                return True
            self._touch(row)
            self._num_rescued += 1
        return False

    def _delete_if_void(self, row: int) -> bool:
        """Deletes the entry if it has neither holders nor children. Returns whether it did."""
        is_void = bool(row and not self._masks[row] and not self._children[row])
        if is_void:
            self._delete(row)
        return is_void

    def _delete(self, row: int) -> None:
        """Deletes an entry without children, and then those of its ancestors that have neither holders nor children."""
        while True:
            parent = self._parent[row]
            del self._key_to_row[self._key[row]]
            self._detach(row)
            self._masks[row] = 0
            self._parent[row], self._children[row] = _FREE, self._free_row
            self._free_row = row
            self._children[parent] -= 1
            if self._children[parent] or not parent or self._masks[parent]:
                return
            row = parent

    def _touch(self, row: int) -> None:
        if self._older[0] != row:
            self._detach(row)
            self._attach(row, 0)

    def _detach(self, row: int) -> None:
        newer, older = self._newer[row], self._older[row]
        self._older[newer], self._newer[older] = older, newer

    def _attach(self, row: int, ahead: int) -> None:
        behind = self._older[ahead]
        self._newer[row], self._older[row] = ahead, behind
        self._older[ahead] = self._newer[behind] = row

    # -------------------------------------------------------- what is known about the table

    def stats(self) -> TableStats:
        num_sets = len(self._mask_to_itself)
        num_bytes = len(self._key) * (8 + 4 * 4 + 8) + len(self._key_to_row) * 110 + num_sets * 150
        num_keys = len(self._key_to_row)
        return TableStats(num_keys, self._num_evicted, self._num_refused, num_bytes, num_sets, self._num_rescued)

    def check_invariants(self) -> None:
        rows = [row for row in range(1, len(self._key)) if self._parent[row] != _FREE]
        assert sorted(self._key_to_row.values()) == rows, "keys and rows differ"
        assert len(rows) <= self.max_keys, "the table has more rows than it may have"
        children = dict.fromkeys([0, *rows], 0)
        for row in rows:
            assert self._parent[row] in children, f"row {row} has lost its parent"
            children[self._parent[row]] += 1
        assert all(self._children[row] == count for row, count in children.items()), "numbers of children differ"
        assert all(self._masks[row] or self._children[row] for row in rows), "a row has neither holders nor children"
        listed, row = [], self._older[0]
        while row:
            assert self._newer[self._older[row]] == row, "the order of use is broken"
            listed.append(row)
            row = self._older[row]
        assert sorted(listed) == rows, "the order of use leaves rows out"


def _keys(hashes: bytes) -> list[int]:
    halves = np.frombuffer(hashes, dtype="<u8").reshape(-1, 2)
    keys: list[int] = (halves[:, 0] ^ halves[:, 1] * _KEY_FACTOR).tolist()
    return keys


def _bits(mask: int) -> Iterator[int]:
    """Yields the numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low

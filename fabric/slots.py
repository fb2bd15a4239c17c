"""Cuts memory into slots, each with a header and a payload. The sources' and the sinks' sides share it.

    slot.offset                    + HEADER_BYTES
    | generation word (8 bytes) ...| payload, `nbytes` as asked for, 64-byte aligned ... |

A source keeps the slot's generation in the header; a sink has room there into which it reads a copy of the generation.
This module knows nothing of which component reads or writes, or of any transport.
"""

from __future__ import annotations

import math
import threading

import numpy as np
import numpy.typing as npt

from fabric.arena import Arena, Slot
from fabric.channel import ArenaUsage
from fabric.dtypes import DTYPE_TO_BYTES

ALIGNMENT_BYTES = 64
HEADER_BYTES = ALIGNMENT_BYTES
WORD_BYTES = 8


def feature_nbytes(shape: tuple[int, int, int], dtype: str) -> int:
    """Returns the bytes of a C-contiguous feature. Raises ValueError for an unknown dtype or a dimension below one."""
    if dtype not in DTYPE_TO_BYTES or min(shape) < 1:
        raise ValueError(f"not a feature: shape {shape}, dtype {dtype!r}")
    return math.prod(shape) * DTYPE_TO_BYTES[dtype]


class SlotMemory:
    """A `SlotMemory` is an arena with its bytes. It is thread-safe, except that a payload's bytes belong to its holder
    alone."""

    def __init__(self, total_bytes: int, first_generation: int = 1) -> None:
        self._lock = threading.Lock()
        self._arena = Arena(total_bytes, ALIGNMENT_BYTES, first_generation)
        raw = np.empty(self._arena.total_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
        skip = -raw.ctypes.data % ALIGNMENT_BYTES
        self.memory: npt.NDArray[np.uint8] = raw[skip : skip + self._arena.total_bytes]
        self.address: int = self.memory.ctypes.data
        self._words = self.memory.view(np.uint64)

    def reserve(self, nbytes: int, *, is_claimed: bool = False) -> Slot:
        """Returns a slot with `nbytes` of payload; with `is_claimed`, it lies in the claimed range. Raises ArenaFull or
        UnitTooLarge (both also count the header), and ValueError for less than one byte."""
        if nbytes < 1:
            raise ValueError(f"a payload of {nbytes} bytes")
        with self._lock:
            return self._arena.allocate(HEADER_BYTES + nbytes, is_claimed=is_claimed)

    def claim(self, nbytes: int) -> list[int] | None:
        """Keeps a range for `nbytes` of payload. Returns the slots in use there, or None if there is no such range."""
        with self._lock:
            return self._arena.claim(HEADER_BYTES + nbytes)

    def unclaim(self) -> None:
        with self._lock:
            self._arena.unclaim()

    def payload(self, slot: Slot) -> npt.NDArray[np.uint8]:
        """Returns a writable view, uint8 with shape `(slot.nbytes - HEADER_BYTES,)`."""
        return self.memory[slot.offset + HEADER_BYTES : slot.offset + slot.nbytes]

    def word(self, slot: Slot) -> int:
        return int(self._words[slot.offset // WORD_BYTES])

    def set_word(self, slot: Slot, value: int) -> None:
        self._words[slot.offset // WORD_BYTES] = value

    def retire(self, slot: Slot) -> bool:
        """Raises the slot's generation word and then frees the slot, as one step. Returns False if the slot was not in
        use."""
        with self._lock:
            if not self._arena.is_used(slot.slot_id):
                return False
            self.set_word(slot, slot.generation + 1)
            return self._arena.free(slot.slot_id)

    def free(self, slot_id: int) -> bool:
        with self._lock:
            return self._arena.free(slot_id)

    def quarantine(self, slot_id: int) -> bool:
        with self._lock:
            return self._arena.quarantine(slot_id)

    def release_quarantine(self, slot_id: int) -> bool:
        with self._lock:
            return self._arena.release_quarantine(slot_id)

    def set_idle(self, slot_id: int) -> None:
        """Lets the slot in use be given up for another. The slot becomes the most recently used of the idle slots."""
        with self._lock:
            self._arena.set_idle(slot_id)

    def set_busy(self, slot_id: int) -> None:
        with self._lock:
            self._arena.set_busy(slot_id)

    def victims(self, nbytes: int) -> list[int] | None:
        """Returns the idle slots to free so that `nbytes` of payload can be reserved, or None if that is impossible
        now."""
        with self._lock:
            return self._arena.victims(HEADER_BYTES + nbytes)

    def is_used(self, slot_id: int) -> bool:
        with self._lock:
            return self._arena.is_used(slot_id)

    def usage(self) -> ArenaUsage:
        with self._lock:
            return self._arena.usage()

    def check_invariants(self) -> None:
        with self._lock:
            self._arena.check_invariants()

"""Keeps which blocks workers compute for open attempts, so that requests with equal beginnings find each other before a
worker has reported the blocks. The module knows nothing of how long an attempt is open.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fabric.contracts import KV_HASH_BYTES
from router.planning.member_columns import Floats

_STRIDE = 8
"""Prompts in flight are known at each block whose number is a multiple of this, so that a dispatch costs little."""
_MARK_BYTES = _STRIDE * KV_HASH_BYTES


class PromisedPrompts:
    """Keeps the prompts of one scheme that workers compute for open attempts, by the hash of every eighth block."""

    def __init__(self) -> None:
        self._hash_to_slots: dict[bytes, dict[int, int]] = {}
        """Maps a block's hash to the worker slots that compute it, each with the number of attempts."""

    def add(self, marks: Sequence[bytes], slot: int) -> None:
        """Adds the marks of a prompt (`marks_of`)."""
        for mark in marks:
            slots = self._hash_to_slots.setdefault(mark, {})
            slots[slot] = slots.get(slot, 0) + 1

    def remove(self, marks: Sequence[bytes], slot: int) -> None:
        for mark in marks:
            slots = self._hash_to_slots[mark]
            slots[slot] -= 1
            if not slots[slot]:
                del slots[slot]
            if not slots:
                del self._hash_to_slots[mark]

    def depth_on(self, slot: int, marks: Sequence[bytes]) -> int:
        """Returns how many leading blocks of a prompt with these marks one worker computes. It counts
        whole marks only, so the number is a multiple of eight."""
        num_marks = 0
        for mark in marks:
            if slot not in self._hash_to_slots.get(mark, ()):
                break
            num_marks += 1
        return num_marks * _STRIDE

    def depths(self, hashes: bytes, num_workers: int) -> Floats | None:
        """Returns how many leading blocks of a prompt each worker computes, or None if none does."""
        depths: Floats | None = None
        for end in range(_MARK_BYTES, len(hashes) + 1, _MARK_BYTES):
            slots = self._hash_to_slots.get(hashes[end - KV_HASH_BYTES : end])
            if slots is None:
                break  # A block's hash contains those before it, so no later block is known either.
            if depths is None:
                depths = np.zeros(num_workers)
            for slot in slots:
                depths[slot] = end // KV_HASH_BYTES
        return depths


def marks_of(hashes: bytes) -> list[bytes]:
    """Returns the hash of every eighth block of a prompt."""
    return [hashes[end - KV_HASH_BYTES : end] for end in range(_MARK_BYTES, len(hashes) + 1, _MARK_BYTES)]

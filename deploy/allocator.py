"""Memory of processes that compute: what one step frees is kept for the next, and large tensors lie in large pages.

By default glibc gives large blocks back to the kernel as soon as they are free, so that every step's tensors are new
pages, each of which faults when it is first touched. Measured: a prefill of 1,024 tokens of a 180M model takes a tenth
less time without. In pages of 2 MB decoding reads its keys and values in a sixth less time.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of parameters in malloc.h."""
LARGEST_KEPT_BYTES = 32 * 2**20
"""Larger blocks still go straight back. glibc's own upper bound."""
KEPT_BYTES = 128 * 2**20
"""So much free memory at the top of the heap is kept."""


def keep_freed_memory() -> bool:
    """Sets both thresholds for this process; False where the C library has no such thing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES))


def ask_for_large_pages() -> None:
    """Of torch, for this process, unless the environment says otherwise. Torch looks when it first allocates."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

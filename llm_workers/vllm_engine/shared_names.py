"""Removes the names of shared memory that this process maps, once every process that shares it has mapped it.

vLLM's engine core and its ranks exchange messages through named shared memory, which keeps its name until its creator
ends in order. Memory without a name stays mapped, and the system frees it with the last process that maps it. So a
worker that is killed leaves nothing behind.

This module knows nothing of vLLM.
"""

from __future__ import annotations

import contextlib
import gc
from multiprocessing.shared_memory import SharedMemory


def remove_shared_names() -> list[str]:
    """Removes the name of each `SharedMemory` object of this process, and returns the names. No process can map the
    memory from then on. A later call of the object's `unlink` does nothing."""
    names, is_frozen = [], gc.get_freeze_count() > 0
    gc.unfreeze()  # vLLM freezes what lives after its start, and frozen objects are not listed.
    found = [each for each in gc.get_objects() if issubclass(type(each), SharedMemory)]
    if is_frozen:
        gc.freeze()
    for shared in found:
        with contextlib.suppress(FileNotFoundError):  # Another process has removed it.
            shared.unlink()
            names.append(shared.name)
        shared.unlink = _do_nothing  # vLLM calls it when its queue ends.
    return names


def _do_nothing() -> None: ...

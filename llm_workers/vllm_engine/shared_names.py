"""Removes the names of shared memory that this process maps, once every process that shares it has mapped it.

vLLM's engine core and its ranks exchange messages through named shared memory, and so do ranks on a CPU, which exchange
tensors. Memory keeps its name until its creator ends in order, and that of tensors even then. Memory without a name
stays mapped, and the system frees it with the last process that maps it. The same holds for semaphores, such as the
lock that each rank has for its progress bars. So a worker that is killed leaves nothing behind.

This module knows nothing of vLLM.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable
from multiprocessing import util
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import SemLock
from pathlib import Path

FOLDER = "/dev/shm/"
"""Linux keeps the names of POSIX shared memory and semaphores in this folder."""


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


def remove_mapped_names(mark: str) -> list[str]:
    """Removes the names that contain `mark` of the shared memory that this process maps, and returns them. It is for
    memory that a library of C++ has mapped. Where there is no `/proc`, it finds nothing."""
    maps, names = Path("/proc/self/maps"), []
    for name in names_in(maps.read_text().splitlines() if maps.exists() else ()):
        if mark in name:
            with contextlib.suppress(FileNotFoundError):  # Another process has removed it, or this one has before.
                Path(FOLDER, name).unlink()
                names.append(name)
    return names


def remove_semaphore_names() -> list[str]:
    """Removes the names of the semaphores that this process has made with `multiprocessing` and whose names are still
    there, and returns them. It is for a process that hands them to no child any more: locks go on working here and
    where they are open, and no process can open them from then on."""
    names = []
    for each in list(util._finalizer_registry.values()):  # type: ignore[attr-defined]
        if each._callback is SemLock._cleanup:  # type: ignore[attr-defined]
            names.append(each._args[0].removeprefix("/"))
            each()  # It removes the name, and does nothing when the process ends.
    return names


def names_in(maps: Iterable[str]) -> list[str]:
    """Returns the names of the shared memory in the lines of a `/proc/PID/maps`, each once. A name that was removed
    ends in `(deleted)`."""
    return list(dict.fromkeys(name for line in maps if (name := line.partition(FOLDER)[2])))


def _do_nothing() -> None: ...

"""Binds a process's life to its parent's, and sets limits that the kernel enforces.

The kernel must enforce them, because a codec that hangs or grows does not react to anything else. The process itself
calls these functions. This module knows nothing of what the process is for.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1
"""Selects the option of prctl(2) that sets the signal which a process receives when its parent ends."""


def bind_to_parent(parent_pid: int) -> None:
    """Ends this process when its parent ends, and leaves interrupts of the terminal to the parent.

    The signal of prctl(2) follows the thread that spawned this process, so that thread has to live as long as the
    parent wants this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # The parent died before the signal was set.
        os._exit(1)


def limit_memory(num_bytes: int) -> None:
    """Limits the data of this process, as Linux counts it; the interpreter's own data is a part of it. Beyond the
    limit, allocations fail (with MemoryError in Python)."""
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))


@contextmanager
def limited(cpu_s: float, more_bytes: int) -> Iterator[None]:
    """Limits what this process may spend within the block: seconds of processor time, over all its threads, and bytes
    of data beyond what it has now. The limit of `limit_memory` holds as well.

    When the time is spent, the kernel ends the process by SIGPROF. Time that other processes spend does not count, so a
    busy machine ends no process. When the memory is spent, allocations fail.
    """
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    # A job that may take as many bytes as the whole process has only the limit of the process.
    if sys.platform == "linux" and (hard == resource.RLIM_INFINITY or more_bytes < hard):
        wanted = data_bytes() + more_bytes
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def data_bytes() -> int:
    """Returns what Linux counts as this process's data now, which is what RLIMIT_DATA limits."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[5]) * resource.getpagesize()

"""What every spawned helper does first: bind its life to its parent's, and accept limits that the kernel enforces.

A codec that hangs or grows listens to nobody else. Knows nothing of what the helper is for.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

PR_SET_PDEATHSIG = 1
"""prctl(2)."""
LOW_PRIORITY = 10
"""nice(2): about a tenth of a processor that another wants too."""


def bind_to_parent(parent_pid: int) -> None:
    """Ends this process when its parent ends, and leaves interrupts of the terminal to the parent.

    The signal of prctl(2) follows the thread that spawned this process: it has to live as long as the parent wants
    its helper."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the signal was set
        os._exit(1)


def limit_memory(num_bytes: int) -> None:
    """Of this process's data, as Linux counts it; the interpreter's own is a part of it. Beyond it, allocations fail
    (MemoryError in Python)."""
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))


def yielding_thread() -> ThreadPoolExecutor:
    """One thread, whose work leaves the processors to whoever else wants them. Only on Linux: elsewhere niceness is a
    process's, and nobody gets it back."""
    if sys.platform != "linux":
        return ThreadPoolExecutor(1)
    return ThreadPoolExecutor(1, initializer=os.nice, initargs=(LOW_PRIORITY,))

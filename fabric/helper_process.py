"""What every spawned helper does first: bind its life to its parent's, and accept limits that the kernel enforces.

A codec that hangs or grows listens to nobody else. Knows nothing of what the helper is for.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

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


@contextmanager
def limited(cpu_s: float, more_bytes: int = 0) -> Iterator[None]:
    """Limits what this process may spend within the block: seconds of processor time, over all its threads, and bytes
    of data beyond what it has now (0: only what `limit_memory` says).

    Out of time, the kernel ends the process (see `is_out_of_cpu`): time that others spend does not count, so a busy
    machine ends nothing. Out of memory, allocations fail."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if more_bytes and sys.platform == "linux":
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
    """What Linux counts as this process's data now: what RLIMIT_DATA limits."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


def exit_code_of(process: BaseProcess, timeout_s: float = 5.0) -> int | None:
    """Blocks until a child process has ended, and returns how: as `Process.exitcode`, None if nobody can tell.

    Each start of a process asks the kernel about all children (`multiprocessing` looks after them then). If a thread
    that starts one hears first that this one has ended, the thread that waits is told nothing, and the exit code is
    noted a moment later."""
    process.join()
    deadline_s = time.monotonic() + timeout_s
    while process.exitcode is None and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return process.exitcode


def is_out_of_cpu(exit_code: int | None) -> bool:
    """Whether a process ended because its block in `limited` was out of processor time."""
    return exit_code == -signal.SIGPROF


def is_killed_by_system(exit_code: int | None) -> bool:
    """Whether a process was killed; unless its parent did so, the machine was out of memory."""
    return exit_code == -signal.SIGKILL


def yielding_thread() -> ThreadPoolExecutor:
    """One thread, whose work leaves the processors to whoever else wants them. Only on Linux: elsewhere niceness is a
    process's, and nobody gets it back."""
    if sys.platform != "linux":
        return ThreadPoolExecutor(1)
    return ThreadPoolExecutor(1, initializer=os.nice, initargs=(LOW_PRIORITY,))

"""Does what every spawned helper process does first: it binds the helper's life to its parent's, and sets
limits that the kernel enforces.

The kernel must enforce them, because a codec that hangs or grows does not react to anything else. This module knows
nothing of what the helper is for.
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
"""Selects the option of prctl(2) that sets the signal which a process receives when its parent ends."""
LOW_PRIORITY = 10
"""Sets the niceness (nice(2)) of work that yields. Such work gets about a tenth of a processor that another process
also wants."""


def bind_to_parent(parent_pid: int) -> None:
    """Ends this process when its parent ends, and leaves interrupts of the terminal to the parent.

    The signal of prctl(2) follows the thread that spawned this process, so that thread has to live as long as the
    parent wants its helper.
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
def limited(cpu_s: float, more_bytes: int = 0) -> Iterator[None]:
    """Limits what this process may spend within the block: seconds of processor time, over all its threads, and bytes
    of data beyond what it has now (0 means only the limit of `limit_memory`).

    When the time is spent, the kernel ends the process (see `is_out_of_cpu`). Time that other processes spend does not
    count, so a busy machine ends no process. When the memory is spent, allocations fail.
    """
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
    """Returns what Linux counts as this process's data now, which is what RLIMIT_DATA limits."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


def exit_code_of(process: BaseProcess, timeout_s: float = 5.0) -> int | None:
    """Blocks until a child process has ended, and returns its exit code, as in `Process.exitcode`. It returns None if
    the code is still unknown after `timeout_s`.

    Each start of a process makes `multiprocessing` ask the kernel about all children. If a thread that starts a process
    learns first that this child has ended, the thread that waits gets no exit code, and the code is recorded a moment
    later.
    """
    process.join()
    deadline_s = time.monotonic() + timeout_s
    while process.exitcode is None and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return process.exitcode


def is_out_of_cpu(exit_code: int | None) -> bool:
    """Returns whether a process ended because its block in `limited` spent its processor time."""
    return exit_code == -signal.SIGPROF


def is_killed_by_system(exit_code: int | None) -> bool:
    """Returns whether a process was killed. Unless its parent killed it, the machine was out of memory."""
    return exit_code == -signal.SIGKILL


def yielding_thread() -> ThreadPoolExecutor:
    """Returns an executor with one thread, whose work yields the processors to all other work. It does so only on
    Linux: elsewhere niceness applies to the whole process, and the process cannot take it back."""
    if sys.platform != "linux":
        return ThreadPoolExecutor(1)
    return ThreadPoolExecutor(1, initializer=os.nice, initargs=(LOW_PRIORITY,))

"""Reads what a process takes of its machine: processor time, memory and open files. Members put it into their reports,
and routers show it of themselves.

The numbers come from `/proc`, so on other systems they stay 0. Helper processes (those that decode, probe and fetch)
and the other ranks of a worker are processes of their own and are not counted. The module knows nothing of metrics.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from fabric.contracts import Clock, ProcessStats

MIN_AGE_S = 1.0
"""A reading is used again for this long: reports come many times a second, and counting open files takes longer the
more there are."""
_OWN = Path("/proc/self")


class ProcessMeter:
    """Reads the numbers of this process, at most once in `MIN_AGE_S`."""

    def __init__(self, clock: Clock, proc: Path = _OWN) -> None:
        self._clock, self._proc = clock, proc
        self._read_at_s = float("-inf")
        self._stats = ProcessStats()

    def read(self) -> ProcessStats:
        """Returns the latest numbers. They are 0 on a system that does not tell them."""
        now_s = self._clock.now()
        if now_s - self._read_at_s >= MIN_AGE_S:
            self._read_at_s, self._stats = now_s, read_process(self._proc)
        return self._stats


def read_process(proc: Path) -> ProcessStats:
    """Returns the numbers of the process that `proc` describes (`/proc/self`, for example)."""
    try:
        # The fields behind the name begin with the third one of proc(5): utime and stime are its fields 14 and 15.
        fields = (proc / "stat").read_text().rpartition(")")[2].split()
        num_ticks = int(fields[11]) + int(fields[12])
        num_pages = int((proc / "statm").read_text().split()[1])
        num_files = len(os.listdir(proc / "fd"))
    except (OSError, ValueError, IndexError):
        return ProcessStats()
    return ProcessStats(
        cpu_s=num_ticks / os.sysconf("SC_CLK_TCK"),
        resident_bytes=num_pages * os.sysconf("SC_PAGE_SIZE"),
        num_open_files=num_files,
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )

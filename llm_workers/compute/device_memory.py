"""Says how much memory a device has and what a step takes of it. Every question to CUDA about memory is asked here.

On a CPU the same questions are answered from the system's own files. This module knows nothing of models, pages or
configs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from llm_workers.scheduling import DeviceRoom

_PROFILING = threading.Lock()
"""Guards torch's profiler, because there is one per process, and it counts for the thread that started it."""


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Returns how many bytes `run` takes on the device at its peak, in addition to the memory in use before. On CUDA
    the allocator reports its peak. On a CPU every allocation of torch is counted; memory that a library allocates
    outside torch is not counted."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _PROFILING, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = profiled.profiler.kineto_results.events() if profiled.profiler else []
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return int(max(np.cumsum([0, *(nbytes for _, nbytes in changes)])))


def bytes_left(device: torch.device) -> int:
    """Returns the bytes that are left on the device, or in the machine (or control group) in which this process
    runs."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    left = _read_number(Path("/proc/meminfo"), "MemAvailable:") * 1024
    if not left:  # Only Linux says how much is available; elsewhere the size of the machine's memory stands for it.
        left = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup")
    limit, used = _read_number(group / "memory.max"), _read_number(group / "memory.current")
    return min(left, limit - used + _read_number(group / "memory.stat", "inactive_file")) if limit else left


def _read_number(path: Path, name: str = "") -> int:
    """Returns the number that follows `name` in the file, or the first number if `name` is empty. Returns 0 if there is
    none."""
    try:
        words = path.read_text().split()
        return int(words[words.index(name) + 1 if name else 0])
    except (OSError, ValueError):
        # There is no such file or line, or the value is "max".
        return 0


def give_back_cached(device: torch.device) -> None:
    """Returns to the device what torch's allocator keeps of it without use, so that later pages can lie in one
    piece."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_room(device: torch.device) -> DeviceRoom:
    """Returns what the device has, and what this process takes of it, at this moment."""
    free_bytes = bytes_left(device)
    if device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        return DeviceRoom(free_bytes, total_bytes, torch.cuda.memory_allocated(device))
    return DeviceRoom(free_bytes, free_bytes, 0)

"""Tests that the allocator keeps freed memory: a block that was freed is available again without new pages."""

from __future__ import annotations

import gc
import platform
import resource
import subprocess
import sys

import pytest

from deploy.process_setup import freeze_what_lives, keep_freed_memory

FAULTS = """
import ctypes, resource
from deploy.process_setup import keep_freed_memory
if {keeps}: assert keep_freed_memory()
libc = ctypes.CDLL(None)
PR_SET_THP_DISABLE = 41  # of linux/prctl.h: where all memory lies in large pages, far fewer are counted
assert libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
libc.malloc.restype, libc.free.argtypes, size = ctypes.c_void_p, [ctypes.c_void_p], 24 * 2**20
libc.malloc.argtypes, libc.memset.argtypes = [ctypes.c_size_t], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
for turn in range(11):
    if turn == 1: before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(size) for _ in range(3)]
    for block in blocks: libc.memset(block, 1, size)
    for block in reversed(blocks): libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
is_glibc = platform.libc_ver()[0] == "glibc"


def faults(*, keeps: bool) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(keeps=keeps)], capture_output=True, text=True, check=True, timeout=60
    )
    return int(done.stdout)


@pytest.mark.skipif(not is_glibc, reason="glibc's own parameters")
def test_freed_blocks_bring_no_new_pages() -> None:
    pages = 3 * 24 * 2**20 // resource.getpagesize()
    assert faults(keeps=False) > pages
    assert faults(keeps=True) < pages / 10


def test_it_can_be_called_again() -> None:
    assert keep_freed_memory() == keep_freed_memory() == is_glibc


def test_the_collector_looks_at_nothing_that_was_there_before_the_first_request() -> None:
    kept = [[number] for number in range(1_000)]
    try:
        freeze_what_lives()
        assert gc.get_freeze_count() > len(kept)
        later = [[]]
        seen = {id(each) for each in gc.get_objects()}
        assert id(later) in seen
        assert not seen & {id(each) for each in kept}
    finally:
        gc.unfreeze()

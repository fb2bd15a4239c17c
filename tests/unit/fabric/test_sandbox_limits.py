"""Tests how a sandbox process's end is read and how its own memory is counted; `tests/contract/test_fabric_sandbox.py`
tests its limits."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import sys
from threading import Timer

import pytest

from fabric.sandbox.limits import data_bytes
from fabric.sandbox.process import exit_code_of


@pytest.mark.parametrize("is_noted", [True, False])
def test_how_a_process_ended_is_known_when_another_thread_heard_of_it_first(is_noted: bool) -> None:
    process = multiprocessing.get_context("spawn").Process(target=sys.exit, args=(7,))
    process.start()
    _, status = os.waitpid(process.pid, 0)  # Another thread reads the status first.

    def note() -> None:
        process._popen.returncode = os.waitstatus_to_exitcode(status)  # The other thread records the status later.

    if is_noted:
        Timer(0.05, note).start()
    assert exit_code_of(process, timeout_s=60.0 if is_noted else 0.05) == (7 if is_noted else None)
    note()
    assert exit_code_of(process) == 7


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the data of a process in its own way")
def test_data_counts_what_a_process_maps_for_itself_alone() -> None:
    before = data_bytes()
    shared, own = (mmap.mmap(-1, 256 * 2**20, flags=flags) for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE))
    grown = data_bytes() - before
    shared.close()
    own.close()
    assert 256 * 2**20 <= grown < 512 * 2**20
    assert data_bytes() < before + 256 * 2**20

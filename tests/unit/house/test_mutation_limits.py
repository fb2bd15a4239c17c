"""Tests that a mutant's time limit reaches that mutant, and no later process with the same number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from mutation.run_mutmut import limit_time, out_of_time

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has handles of processes")
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_mutant_ends_when_its_time_is_over() -> None:
    with subprocess.Popen(SLEEP) as mutant:
        limit_time(mutant.pid, 0.01)
        assert mutant.wait(timeout=30) == -signal.SIGXCPU


def test_a_mutant_that_has_ended_is_not_signalled() -> None:
    """The handle of an ended mutant reaches no process, even if another process has its number."""
    with subprocess.Popen(SLEEP) as mutant:
        handle = os.pidfd_open(mutant.pid)
        mutant.kill()
    out_of_time(handle)
    assert not os.path.exists(f"/proc/self/fd/{handle}"), "the handle stays open"

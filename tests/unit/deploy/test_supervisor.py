"""Tests what the supervisor runs after a server that did not end by itself. Each test runs the supervisor in a process
of its own, because a supervisor ends every process below it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SUPERVISOR = """
import sys
from deploy.supervisor import supervise
server, clean_up = sys.argv[1:]
run = [sys.executable, "-c"]
sys.exit(supervise([*run, server], 30.0, [*run, clean_up] if clean_up else []))
"""
SAY_AND_WAIT = "import time; print('waiting', flush=True); time.sleep(60)"


@contextmanager
def supervised(server: str, clean_up: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SUPERVISOR, server, clean_up]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process


def wait_for_a_line(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"


@pytest.mark.parametrize(("status", "is_cleaned"), [(0, False), (3, True)])
def test_behind_a_server_that_fails_is_cleaned_up(tmp_path: Path, status: int, is_cleaned: bool) -> None:
    mark = tmp_path / "cleaned"
    with supervised(f"raise SystemExit({status})", f"open({str(mark)!r}, 'w')") as process:
        assert process.wait(60) == status
    assert mark.exists() == is_cleaned


def test_behind_a_server_that_was_killed_is_cleaned_up_before_the_supervisor_ends(tmp_path: Path) -> None:
    mark = tmp_path / "cleaned"
    with supervised(SAY_AND_WAIT, f"open({str(mark)!r}, 'w')") as process:
        wait_for_a_line(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert mark.exists()


def test_a_further_signal_ends_the_cleaning_too() -> None:
    with supervised("raise SystemExit(1)", SAY_AND_WAIT) as process:
        wait_for_a_line(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 1

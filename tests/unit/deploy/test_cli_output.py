"""Tests what the console script does if nothing reads its output any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import deploy.cli


def run_unread(*arguments: str) -> tuple[int, str]:
    """Runs a command whose output is a pipe that nothing reads. Returns its status and its errors."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "deploy.cli", *arguments]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writer)
    return done.returncode, done.stderr


LAPTOP = str(Path(deploy.cli.__file__).parent / "configs" / "laptop.yaml")


@pytest.mark.parametrize("arguments", [("version",), ("key", "new", "--operator"), ("check", LAPTOP)])
def test_a_command_whose_output_is_not_read_ends_without_a_traceback(arguments: tuple[str, ...]) -> None:
    status, errors = run_unread(*arguments)
    assert status == 1
    assert "Traceback" not in errors
    assert "BrokenPipeError" not in errors


def test_a_pipe_that_breaks_elsewhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(argv: list[str] | None) -> int:
        raise BrokenPipeError("a connection of the command")

    monkeypatch.setattr(deploy.cli, "_run", run)
    with pytest.raises(BrokenPipeError, match="a connection"):
        deploy.cli.main([])

"""Checks the command line as a user uses it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[2] / "deploy" / "configs"


def weft(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "deploy.cli", *arguments], capture_output=True, text=True, timeout=120)


def test_version() -> None:
    done = weft("version")
    assert (done.returncode, done.stdout) == (0, "weft 0.1.0\n")


@pytest.mark.parametrize("name", ["laptop.yaml", "gpu-node.yaml", "gpu-speech.yaml", "one-gpu.yaml"])
def test_shipped_configs_are_valid(name: str) -> None:
    done = weft("check", str(CONFIGS / name))
    assert done.returncode == 0, done.stderr
    assert ": the config is valid (" in done.stdout


def test_check_prints_the_memory_of_each_process() -> None:
    done = weft("check", str(CONFIGS / "laptop.yaml"))
    for line in ("memory of one replica (weft-demo, float32):", "  worker (x2)", "  encoder (x1)"):
        assert line in done.stdout.splitlines()
    assert "2048 blocks of 16 tokens" in done.stdout
    assert "of the largest image" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["weights"]]
    assert len(rows) == 2
    assert all(row[1][0] in "123456789" for row in rows), "the demo model's are counted as any other's"


def test_check_says_when_the_model_can_not_be_read() -> None:
    done = weft("check", str(CONFIGS / "gpu-node.yaml"))
    assert "the memory is not computed, because the model can't be read:" in done.stdout


def test_a_config_that_can_not_hold_one_request_is_refused_with_the_table(tmp_path: Path) -> None:
    small = tmp_path / "small.yaml"
    small.write_text("workers: {num_blocks: 4, inbox_bytes: 4KiB}\n")
    checked = weft("check", str(small))
    assert checked.returncode == 1
    assert "num_blocks must be at least" in checked.stderr
    assert "inbox_bytes is 4096, but one feature of the largest image takes" in checked.stderr
    assert ": the config is valid (" not in checked.stdout
    served = weft("serve", "--config", str(small))
    assert served.returncode == 1
    assert "the config can't hold the largest request that its limits allow:" in served.stderr
    assert "memory of one replica" in served.stderr
    assert "Traceback" not in served.stderr


def test_check_names_line_and_key(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("workers:\n  replica: 3\nencoders:\n  arena_bytes: 3Zi\n")
    done = weft("check", str(wrong))
    assert done.returncode == 1
    assert f"{wrong}: line 2, column 3: workers.replica: the key is unknown; did you mean replicas?" in done.stderr
    assert "line 4, column 3: encoders.arena_bytes: '3Zi' is not a size" in done.stderr


def test_serve_refuses_what_is_not_a_model(tmp_path: Path) -> None:
    done = weft("serve", "--model", str(tmp_path))
    assert done.returncode == 1
    assert "has no config.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_refuses_a_taken_port() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = weft("serve", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "can't listen on" in done.stderr

"""Runs the programs of the page `docs/first-request.md` against a real server of the whole cluster in one process: they
run, and the answers are those that the page promises."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.config import ClusterConfig
from deploy.local import serving

pytestmark = pytest.mark.torch
PAGE = Path(__file__).resolve().parents[2] / "docs" / "first-request.md"


def run_program(text: str, folder: Path) -> str:
    """Runs a program in a process of its own, as the page asks for, and returns what it printed."""
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_the_programs_of_the_page_run_and_print_what_it_says(tmp_path: Path) -> None:
    samples, *program = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    text = "".join(program)
    promised = re.findall(r"print\(ask\(.*  # (.+)$", text, re.MULTILINE)
    assert promised == ["red", "right", "three", "right", "red"]
    assert "http://127.0.0.1:8000/v1" in text
    run_program(samples, tmp_path)
    config = ClusterConfig.model_validate({"server": {"port": 0}, "encoders": {"decode_processes": 0}})
    async with serving(config) as (_, port):
        address = text.replace("http://127.0.0.1:8000/v1", f"http://127.0.0.1:{port}/v1")
        printed = await asyncio.to_thread(run_program, address, tmp_path)
    lines = printed.splitlines()
    assert lines[:4] == promised[:4]
    assert re.fullmatch(r"\s*[1-9]\d* tokens", lines[5]), "the last chunk of the stream has the usage"
    assert lines[6] == promised[4]
    assert re.search(r'\{\s*"colour":\s*"(red|green|blue)"\s*\}\s*$', printed)

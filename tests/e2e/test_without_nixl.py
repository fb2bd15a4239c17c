"""Checks a machine without NIXL, which has no wheel for macOS: one process serves, and a cluster refuses to start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chat_media import image_part, user
from cluster_process import start_cluster

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
HIDE_NIXL = """
import sys

class HidesNixl:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("nixl", "nixl_cu12", "nixl_cu13"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, HidesNixl)
"""


@pytest.fixture(autouse=True)
def _hides_nixl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides NIXL from the processes that a test starts: Python imports `sitecustomize` in each of them."""
    (tmp_path / "sitecustomize.py").write_text(HIDE_NIXL)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    for name in ("nixl", "nixl_cu12"):
        done = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True, timeout=300)
        assert f"No module named '{name}'" in done.stderr


def test_one_process_serves_a_picture() -> None:
    with start_cluster(in_process=True, workers={"replicas": 1}) as cluster, cluster.client() as client:
        messages = user(image_part(1), "What shape is it?")
        body = {"model": cluster.model, "messages": messages, "temperature": 0, "max_tokens": 16}
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "circle"


def test_a_cluster_names_what_is_missing() -> None:
    command = [sys.executable, "-m", "deploy.cli", "serve", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "weft: the package nixl-cu12 is not installed" in done.stderr
    assert "weft serve --in-process" in done.stderr
    assert "Traceback" not in done.stderr

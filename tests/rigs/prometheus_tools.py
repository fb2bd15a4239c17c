"""Finds Prometheus and promtool: those of the machine, or those that `make prometheus` has unpacked below `build/`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

UNPACKED = Path(__file__).resolve().parents[2] / "build" / "prometheus" / "usr" / "bin"


def prometheus_tool(name: str) -> str:
    """Returns the path of `prometheus` or `promtool`. Skips the test if there is none."""
    found = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if found is None:
        pytest.skip(f"there is no {name}; `make prometheus` gets it where apt does")
    return found

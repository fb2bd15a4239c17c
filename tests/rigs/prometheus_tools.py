"""Finds Prometheus and promtool: those of the machine, or those that `make prometheus` has unpacked below `build/`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

UNPACKED = Path(__file__).resolve().parents[2] / "build" / "prometheus" / "usr" / "bin"


def found_tool(name: str) -> str | None:
    """Returns the path of `prometheus` or `promtool`, if there is one."""
    return shutil.which(name) or shutil.which(name, path=str(UNPACKED))


def prometheus_tool(name: str) -> str:
    """Returns the path of `prometheus` or `promtool`. Skips the test if there is none."""
    found = found_tool(name)
    if found is None:
        pytest.skip(f"there is no {name}; `make prometheus` gets it where apt does")
    return found

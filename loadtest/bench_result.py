"""Defines what a bench returns and where it goes: a table on standard output, bars as JSON, and a file with machine and
commit.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Bar:
    """A `Bar` is a measured value and its target. With `is_max` the value must not exceed the target (times); otherwise
    it must reach the target (rates)."""

    name: str
    value: float
    target: float
    unit: str
    is_max: bool = False

    @property
    def ok(self) -> bool:
        return self.value <= self.target if self.is_max else self.value >= self.target

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "target": self.target,
            "unit": self.unit,
            "ok": self.ok,
        }


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Holds the rows of the table (the first row is the heading) and the bars."""

    rows: list[list[str]]
    bars: list[Bar]
    notes: list[str] = field(default_factory=list)
    variant: str = ""
    """Names the kind of run of a bench that has several; each kind has a file of its own."""
    profile: Mapping[str, object] = field(default_factory=dict)
    """Says in numbers where time went, for the file alone."""


def render_table(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def machine() -> dict[str, object]:
    """Describes the machine on which the numbers were taken."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cpu = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as info:
        cpu = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory_gib, 1),
        "python": platform.python_version(),
        **_gpu(),
    }


def _gpu() -> dict[str, str]:
    """Describes the GPU. Returns an empty dictionary if the bench did not import torch, or if torch finds no CUDA
    device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}


def gpu_name(device: str) -> str:
    """Returns a short name of the GPU, such as `h100`, for the variant of a result. It is empty if `device` is not
    `cuda`."""
    if device != "cuda":
        return ""
    import torch

    return torch.cuda.get_device_name().split()[1].lower()


def commit() -> str:
    """Returns the commit of the checkout that the bench runs from, with `-dirty` if it has changes, or `unknown`
    outside of a checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=RESULTS.parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def publish(name: str, result: BenchResult, *, as_json: bool) -> None:
    """Prints the table, or with `as_json` prints the bars as one line of JSON and the table on standard error. Also
    writes `loadtest/results/NAME.json` (the newest run replaces the last; git keeps the history)."""
    people = sys.stderr if as_json else sys.stdout
    name = f"{name}-{result.variant}" if result.variant else name
    print(f"bench {name}\n\n{render_table(result.rows)}\n", file=people)
    bars = [bar.to_json() for bar in result.bars]
    rows = [["bar", "value", "target", "unit", "ok"]]
    rows += [
        [bar.name, f"{bar.value:.3g}", f"{bar.target:g}", bar.unit, "yes" if bar.ok else "MISSED"]
        for bar in result.bars
    ]
    print(render_table(rows) + "\n", file=people)
    print("\n".join(result.notes), file=people)
    record = {
        "bench": name,
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        **asdict(result),
        "bars": bars,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    if as_json:
        print(json.dumps({"bench": name, "bars": bars}), flush=True)

"""Holds the table of what has been validated where to the repository: what it claims has a test or a result."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "support.md"
STATUSES = {"CI", "measured", "tested apart", "rendered", "never run"}
RUN_IN_CI = tuple(
    f"tests/{each}/" for each in ("unit", "property", "contract", "parity", "e2e", "fault", "vllm", "vllm_cluster")
)
"""Lists the folders of the tests that run where there is no GPU."""


class SupportRow(NamedTuple):
    """A `SupportRow` is one row of the page's tables."""

    what: str
    status: str
    evidence: tuple[str, ...]


def rows() -> list[SupportRow]:
    found = re.findall(r"^\| (.+) \| ([a-z A-Z]+) \| ((?:`[^`]+`(?:, )?)+|-) \|$", PAGE.read_text(), re.MULTILINE)
    return [SupportRow(what, status, tuple(re.findall(r"`([^`]+)`", evidence))) for what, status, evidence in found]


def test_every_row_is_read() -> None:
    """A row in another form would be checked by no test."""
    tables = PAGE.read_text().partition("\n## Platforms")[2]
    lines = [line for line in tables.splitlines() if line.startswith("| ")]
    headings = [line for line in lines if line.endswith("| status | evidence |")]
    assert len(rows()) == len(lines) - len(headings) > 40


def test_every_status_is_explained() -> None:
    explained = set(re.findall(r"^\| ([a-z A-Z]+) \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE)) - {"status"}
    assert explained == STATUSES == {row.status for row in rows()}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.what)
def test_a_claim_has_evidence_of_its_kind(row: SupportRow) -> None:
    assert bool(row.evidence) == (row.status != "never run")
    assert [path for path in row.evidence if not (ROOT / path).is_file()] == []
    if row.status == "CI":
        assert all(path.startswith((*RUN_IN_CI, ".github/")) for path in row.evidence)
    if row.status == "rendered":
        assert all(path.startswith("tests/chart/") for path in row.evidence)


def test_what_was_measured_on_a_gpu_names_it() -> None:
    claimed = {path: row.what for row in rows() for path in row.evidence if path.startswith("loadtest/results/")}
    for path, what in claimed.items():
        gpu = json.loads((ROOT / path).read_text())["machine"].get("gpu", "")
        assert ("H200" in what) <= ("H200" in gpu), path
    on_gpus = {path.name for path in (ROOT / "loadtest" / "results").glob("*.json") if '"gpu"' in path.read_text()}
    assert on_gpus == {Path(path).name for path in claimed if "h200" in path}, "a result on a GPU has no row"


def test_every_system_and_python_of_ci_has_a_row() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    listed = " ".join(row.what for row in rows() if ".github/workflows/ci.yml" in row.evidence)
    assert [each for each in set(re.findall(r'python: "([\d.]+)"', workflow)) if each not in listed] == []
    assert ("macos" in workflow) == ("macOS" in listed)


def test_what_the_project_says_of_kubernetes_agrees() -> None:
    (row,) = (row for row in rows() if row.what.startswith("real Kubernetes"))
    assert (row.status == "never run") == (
        "It has never run on a real Kubernetes" in (ROOT / "docs/kubernetes.md").read_text()
    )

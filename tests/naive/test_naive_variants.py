"""Shows that the tests of attacks can fail: each passes on Weft, and fails once a naive implementation stands in the
place of the guard. `docs/threats.md` lists the same attacks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from naive_variant import NaiveVariant
from naive_variants import VARIANTS

ROOT = Path(__file__).parents[2]
PASSED, FAILED = 0, 1
MOST_S = 120


def run_pytest(*words: str) -> tuple[int, str]:
    """Runs pytest in a process of its own. Returns its exit status and what it has printed."""
    found = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "naive_plugin", "-p", "no:cacheprovider", "-q", "-x", *words]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=outside | {"PYTHONPATH": os.pathsep.join(found)},
        capture_output=True,
        text=True,
        timeout=MOST_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_naive_implementation_fails_the_test(variant: NaiveVariant) -> None:
    status, output = run_pytest("--naive", variant.name, f"tests/{variant.test}")
    assert status == FAILED, output
    assert re.search(r"1 failed", output), output
    assert re.search(variant.symptom, output), output


def test_the_tests_pass_on_weft() -> None:
    status, output = run_pytest(*sorted({f"tests/{variant.test}" for variant in VARIANTS}))
    assert status == PASSED, output
    assert "skipped" not in output


def row_of(variant: NaiveVariant) -> str:
    """Returns the row of a variant in the documentation."""
    test = variant.test_name
    cells = (variant.attack, variant.known_from or "", f"`{variant.guard}`", f"`tests/{test}`", variant.words)
    return "| " + " | ".join(cells) + " |"


def test_the_documentation_has_a_row_for_each_variant() -> None:
    written = (ROOT / "docs/threats.md").read_text().splitlines()
    rows = [line for line in written if line.startswith("| ") and "`tests/" in line]
    assert rows == [row_of(variant) for variant in VARIANTS]
    assert [variant.guard for variant in VARIANTS if not (ROOT / variant.guard).is_file()] == []

"""Tests the page that `make gpu` prints for an issue."""

from __future__ import annotations

from pathlib import Path

from gpu_report import RanTest, facts, report, write

TESTS = [
    RanTest("tests/gpu/test_a.py::test_one", "passed", 1.25),
    RanTest("tests/gpu/test_a.py::test_two", "failed", 0.5, "assert 1 == 2\n | more"),
    RanTest("tests/gpu/test_b.py::test_three", "skipped", 0.0, "no CUDA device"),
]


def test_a_part_counts_and_names_every_test() -> None:
    lines = report("Weft's environment", [("GPUs", "a, 80 GB")], TESTS).splitlines()
    assert lines[0] == "## GPU tests in Weft's environment: 1 passed, 1 failed, 1 skipped"
    assert "- GPUs: a, 80 GB" in lines
    assert lines[-3:] == [
        "| `tests/gpu/test_a.py::test_one` | passed | 1.2 |  |",
        r"| `tests/gpu/test_a.py::test_two` | failed | 0.5 | assert 1 == 2 \| more |",
        "| `tests/gpu/test_b.py::test_three` | skipped | 0.0 | no CUDA device |",
    ]


def test_the_second_environment_adds_its_part(tmp_path: Path) -> None:
    path = tmp_path / "build" / "page.md"
    write("old\n", path, is_first=True)
    assert write("first\n", path, is_first=True) == "first\n"
    assert write("second\n", path, is_first=False) == "first\n\nsecond\n"


def test_facts_are_found_without_a_gpu() -> None:
    found = dict(facts())
    assert list(found) == ["machine", "GPUs", "versions", "commit"]
    assert "torch" in found["versions"]
    assert all(found.values())

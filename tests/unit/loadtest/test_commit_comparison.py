"""Tests how `weft bench compare` judges two commits: by the medians of their bars and by the spread of the earlier."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fabric.contracts import ConfigError
from loadtest.benches import commit_comparison
from loadtest.benches.commit_comparison import compare

COMMAND_LINE = """
import json, sys
assert sys.argv[1:3] == ["bench", "made-up"], sys.argv
print("chatter")
print(json.dumps({"bench": "made-up", "bars": [
    {"name": "rate", "value": %s, "target": 1.0, "unit": "x", "ok": True},
    {"name": "options", "value": float(len(sys.argv) - 4), "target": 9.0, "unit": "", "ok": True},
]}))
"""


def test_a_rate_that_falls_is_worse() -> None:
    rows, [bar] = compare([{"rate": 10.0}] * 3, [{"rate": 8.0}] * 3, {"rate": False})
    assert bar.value == 1.25
    assert not bar.ok
    assert rows[1] == ["rate", "10", "8", "+25.0%", "3.0%"]


def test_a_time_that_falls_is_better() -> None:
    _, [bar] = compare([{"time": 10.0}] * 3, [{"time": 8.0}] * 3, {"time": True})
    assert bar.value == 0.8
    assert bar.ok


def test_a_bar_may_get_worse_by_the_spread_of_the_earlier_runs() -> None:
    earlier = [{"time": 9.0}, {"time": 10.0}, {"time": 11.0}]
    for value, ok in ((11.9, True), (12.1, False)):
        _, [bar] = compare(earlier, [{"time": value}] * 3, {"time": True})
        assert bar.target == 1.2
        assert bar.ok is ok


def test_a_bar_of_one_commit_alone_is_shown_and_not_judged() -> None:
    rows, bars = compare([{"both": 1.0, "gone": 2.0}], [{"both": 1.0, "new": 3.0}], {"both": True})
    assert [bar.name for bar in bars] == ["both: how much worse"]
    assert rows[2:] == [["gone", "2", "-", "-", "-"], ["new", "-", "3", "-", "-"]]


def test_commits_without_a_common_bar_are_refused() -> None:
    with pytest.raises(ConfigError, match="no bar of this bench in common"):
        compare([{"a": 1.0}], [{"b": 1.0}], {"a": True, "b": True})


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a repository of two commits, whose bench reports a rate of 4 and then of 3."""
    (tmp_path / "pyproject.toml").write_text('[project.scripts]\nweft = "bench_main:main"\n')
    _git(tmp_path, "init", "--quiet")
    for rate in ("4.0", "3.0"):
        body = "".join(f"    {line}\n" for line in (COMMAND_LINE % rate).splitlines())
        (tmp_path / "bench_main.py").write_text(f"def main():\n{body}")
        _git(tmp_path, "add", ".")
        _git(tmp_path, "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "--quiet", "-m", rate)
    monkeypatch.setattr(commit_comparison, "REPOSITORY", tmp_path)
    return tmp_path


def _git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


def test_both_commits_run_their_own_bench_with_its_options(repository: Path) -> None:
    result = commit_comparison.run(["made-up", "--earlier", "HEAD~1", "--runs", "2", "--only", "x"])
    assert [(bar.name, round(bar.value, 3), bar.ok) for bar in result.bars] == [
        ("rate: how much worse", round(4 / 3, 3), False),
        ("options: how much worse", 1.0, True),
    ]
    assert result.rows[2][1:3] == ["2", "2"]
    assert result.variant == "made-up-with-options"
    assert result.notes[-1] == "The options of the bench were: --only x."


def test_what_cannot_be_compared_is_named(repository: Path) -> None:
    with pytest.raises(ConfigError, match="no commit 'nowhere'"):
        commit_comparison.run(["made-up", "--earlier", "nowhere"])
    with pytest.raises(ConfigError, match="--runs is 1"):
        commit_comparison.run(["made-up", "--earlier", "HEAD~1", "--runs", "1"])
    with pytest.raises(ConfigError, match=r"`weft bench other` failed at .* exit status 1"):
        commit_comparison.run(["other", "--earlier", "HEAD~1"])


def test_the_command_line_lists_it() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "bench", "list"], capture_output=True, text=True, check=True
    )
    assert listed.stdout.split() == [
        "path",
        "engine",
        "encoder",
        "memory",
        "scale",
        "router",
        "costs",
        "cluster",
        "overlap",
        "prediction",
        "isolation",
        "serve",
        "speech",
        "figures",
        "index",
        "http",
        "compare",
    ]

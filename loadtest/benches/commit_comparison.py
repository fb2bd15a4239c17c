"""Runs `weft bench compare NAME`: shows whether a commit made the bench `NAME` worse than an earlier commit had it.

Both commits are cloned into a temporary folder, and the bench runs on them in turn, in processes of their own, with the
packages of this environment. Each bar is compared by its own value. The runs of the earlier commit among themselves
show how much the machine varies, and a bar may get worse by no more than that, or than `MIN_SPREAD`. The module knows
nothing of what a bench measures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from fabric.contracts import ConfigError
from loadtest.bench_result import Bar, BenchResult

REPOSITORY = Path(__file__).parents[2]
MIN_SPREAD = 0.03
"""A bar may get worse by this share even if the runs of the earlier commit differ less."""

Runs = Sequence[Mapping[str, float]]
"""Holds the value of each bar by its name, for each run."""


def run(arguments: Sequence[str]) -> BenchResult:
    """Runs the bench on both commits and compares them. Raises ConfigError if a commit does not exist, if the bench
    fails at one of them, or if they have no bar in common."""
    parser = argparse.ArgumentParser(prog="weft bench compare")
    parser.add_argument("name", help="names the bench; options of the bench itself stand after all others")
    parser.add_argument("--earlier", required=True, metavar="COMMIT", help="is the commit to compare with")
    parser.add_argument("--later", default="HEAD", metavar="COMMIT", help="is the commit to judge (default: HEAD)")
    parser.add_argument("--runs", type=int, default=3, help="runs each commit this many times, in turn; at least 2")
    chosen, options = parser.parse_known_args(list(arguments))
    if chosen.runs < 2:
        raise ConfigError(f"--runs is {chosen.runs}, but the spread of one run is unknown; it must be at least 2")
    earlier, later = _commit(chosen.earlier), _commit(chosen.later)
    commit_to_runs: dict[str, list[dict[str, float]]] = {earlier: [], later: []}
    is_max: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(prefix="weft-compare-") as folder:
        for commit in commit_to_runs:
            _clone(commit, Path(folder) / commit)
        for number in range(chosen.runs):
            for commit in list(commit_to_runs)[:: 1 if number % 2 == 0 else -1]:
                print(f"run {number + 1} of {chosen.runs} starts at {commit[:12]}", file=sys.stderr, flush=True)
                bars = _run_bench(Path(folder) / commit, chosen.name, options)
                commit_to_runs[commit].append({str(bar["name"]): float(str(bar["value"])) for bar in bars})
                is_max.update((str(bar["name"]), _is_max(bar)) for bar in bars)
    rows, compared = compare(commit_to_runs[earlier], commit_to_runs[later], is_max)
    notes = [
        f"The bench ran {chosen.runs} times at {earlier[:12]} and at {later[:12]}, in turn; values are medians.",
        f"A bar may get worse by the spread of the earlier commit's runs, or by {MIN_SPREAD:.0%} if that is more.",
        f"The options of the bench were: {' '.join(options) or 'none'}.",
    ]
    variant = f"{chosen.name}-with-options" if options else chosen.name
    return BenchResult(rows, compared, notes, variant=variant)


def compare(earlier: Runs, later: Runs, is_max: Mapping[str, bool]) -> tuple[list[list[str]], list[Bar]]:
    """Returns the table, and for each bar that both commits have how much worse the later median is (1 is equal). The
    target of that bar is 1 plus the spread: the range of the earlier runs over their median, at least `MIN_SPREAD`.
    Bars of one commit alone are in the table only. Raises ConfigError if no bar is common to both."""
    rows = [["bar", "earlier", "later", "later is worse by", "spread of earlier"]]
    compared = []
    for name in dict.fromkeys(name for runs in (earlier, later) for values in runs for name in values):
        before, after = ([values[name] for values in runs if name in values] for runs in (earlier, later))
        if not before or not after:
            rows.append([name, *(f"{statistics.median(values):.4g}" if values else "-" for values in (before, after))])
            rows[-1] += ["-", "-"]
            continue
        old, new = statistics.median(before), statistics.median(after)
        ratio = _ratio(new, old) if is_max[name] else _ratio(old, new)
        spread = max(MIN_SPREAD, (max(before) - min(before)) / old if old else 0.0)
        rows.append([name, f"{old:.4g}", f"{new:.4g}", f"{ratio - 1:+.1%}", f"{spread:.1%}"])
        compared.append(Bar(f"{name}: how much worse", ratio, round(1 + spread, 4), "x", is_max=True))
    if not compared:
        raise ConfigError("the two commits have no bar of this bench in common")
    return rows, compared


def _ratio(value: float, over: float) -> float:
    return value / over if over else (1.0 if value == over else float("inf"))


def _is_max(bar: Mapping[str, object]) -> bool:
    """Derives `Bar.is_max`, which JSON lacks, from the verdict and from the side of the target that the value is on."""
    return bool(bar["ok"]) == (float(str(bar["value"])) <= float(str(bar["target"])))


def _commit(name: str) -> str:
    try:
        return _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").strip()
    except subprocess.CalledProcessError:
        raise ConfigError(f"this checkout has no commit {name!r}") from None
    except OSError as error:
        raise ConfigError(f"comparing commits requires git: {error}") from None


def _clone(commit: str, folder: Path) -> None:
    _git("clone", "--quiet", "--shared", "--no-checkout", str(REPOSITORY), str(folder))
    _git("-C", str(folder), "checkout", "--quiet", "--detach", commit)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


def _run_bench(checkout: Path, name: str, options: Sequence[str]) -> list[dict[str, object]]:
    """Runs the checkout's own `weft bench NAME --json` and returns its bars."""
    scripts = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["weft"].split(":")
    program = f"import sys; from {module} import {function}; sys.exit({function}())"
    done = subprocess.run(
        [sys.executable, "-c", program, "bench", name, "--json", *options],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise ConfigError(f"`weft bench {name}` failed at {checkout.name[:12]} with exit status {done.returncode}")
    bars: list[dict[str, object]] = json.loads(lines[-1])["bars"]
    return bars

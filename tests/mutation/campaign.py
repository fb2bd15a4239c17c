"""Tests the tests of the pure modules with mutants: draws a sample, runs those without a result, writes the report.

A mutant is one small change to one function, made by `mutmut` (its settings are in `pyproject.toml`). A mutant that no
test notices shows that a test is missing. mutmut records which tests enter which function, and runs only those tests on
a mutant, the fastest first. Its results are in `mutants/` and survive an interrupted run. A function that changes loses
the results of its own mutants only.

    python tests/mutation/campaign.py                 draw, run what has no result, write SURVIVORS.md
    python tests/mutation/campaign.py --again         run the survivors and the timeouts of the sample once
                                                     more, with more examples of each property
    python tests/mutation/campaign.py --only 'fabric.*'
    python tests/mutation/campaign.py --report        only write SURVIVORS.md

The sample is stratified: each module contributes in proportion to its number of mutants, and gives those whose hash
with the random seed is smallest. So a change to one function changes the sample of its own module only.

This module knows nothing of how a mutant is made or run. mutmut does not mutate decorated functions (such as
properties) or code outside functions, so constants and defaults of dataclasses are not mutated.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REPORT = HERE / "SURVIVORS.md"
REASONS = HERE / "reasons.yaml"
SEED = 9
SAMPLE_SIZE = 1500
TARGET = 0.85
PACKAGES = ("fabric", "kv_index", "encoder_pool/planning", "router/planning", "llm_workers/scheduling")
KILLED = frozenset({"killed", "timeout", "segfault"})


@dataclass(frozen=True, slots=True)
class Mutant:
    """A `Mutant` is one change to one function, with the result of its tests. `module` is a path,
    `kv_index/holder_index.py`."""

    name: str
    module: str
    status: str

    @property
    def package(self) -> str:
        return next(package for package in PACKAGES if self.module.startswith(package + "/"))

    @property
    def function(self) -> str:
        """Returns `EventFeed.publish` for the name `kv_index.feed.xǁEventFeedǁpublish__mutmut_3`."""
        mangled = self.name.rpartition(".")[2].rpartition("__mutmut_")[0]
        return mangled.removeprefix("xǁ").replace("ǁ", ".") if "ǁ" in mangled else mangled.removeprefix("x_")


def draw(module_to_names: Mapping[str, Sequence[str]], size: int, seed: int) -> list[str]:
    """Returns a stratified sample of `size` names, or all names if there are no more.

    Each module has its share of `size`, rounded by largest remainder. Within a module the hash of a name decides.
    """
    num_all = sum(map(len, module_to_names.values()))
    if num_all <= size:
        return sorted(name for names in module_to_names.values() for name in names)
    exact = {module: size * len(names) / num_all for module, names in module_to_names.items()}
    quota = {module: int(share) for module, share in exact.items()}
    by_remainder = sorted(exact, key=lambda module: (quota[module] - exact[module], module))
    for module in by_remainder[: size - sum(quota.values())]:
        quota[module] += 1

    def rank(name: str) -> bytes:
        return hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()

    return sorted(
        name for module, names in module_to_names.items() for name in sorted(names, key=rank)[: quota[module]]
    )


def make_mutants() -> None:
    """Brings `mutants/` up to date with the sources. This folder is a copy of the project in which each pure function
    contains its mutants. Results of functions that did not change are kept."""
    from mutmut.__main__ import create_mutants
    from mutmut.configuration import config
    from mutmut.mutation.trampoline import set_mutant_under_test
    from mutmut.utils.file_utils import copy_also_copy_files, copy_src_dir

    set_mutant_under_test("mutant_generation")
    Path("mutants").mkdir(exist_ok=True)
    for source in (*config().source_paths, Path("tests")):
        _forget_stale_copies(source)
    copy_src_dir()
    copy_also_copy_files()
    create_mutants(max_children=os.cpu_count() or 1)


def _forget_stale_copies(source: Path) -> None:
    """Removes copies whose original is gone, and copies of data files that have changed: mutmut copies a data file only
    once."""
    copies = Path("mutants") / source
    for copy in sorted(copies.rglob("*"), reverse=True):
        if copy.is_dir() or copy.suffix in {".meta", ".spans", ".pyc"}:
            continue
        original = source / copy.relative_to(copies)
        is_data = copy.suffix != ".py"
        if not original.exists() or (is_data and not filecmp.cmp(original, copy, shallow=False)):
            copy.unlink()
            for note in (".meta", ".spans"):
                copy.with_name(copy.name + note).unlink(missing_ok=True)


def forget_old_stats() -> None:
    """Deletes mutmut's record of which tests enter which function if code or tests have changed since. mutmut would
    only add what new tests enter, so that no old test would seem to enter a new function."""
    from mutmut.configuration import config

    digest = hashlib.blake2b(digest_size=16)
    for folder in (*config().source_paths, Path("tests")):
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(path.read_bytes())
    note = Path("mutants/stats-are-of")
    if not note.exists() or note.read_text() != digest.hexdigest():
        Path("mutants/mutmut-stats.json").unlink(missing_ok=True)
        note.write_text(digest.hexdigest())


def read_mutants() -> list[Mutant]:
    """Returns all mutants, each with the result of its last run."""
    from mutmut.configuration import config
    from mutmut.stats import status_by_exit_code

    found = []
    for package in PACKAGES:
        for meta in sorted((Path("mutants") / package).glob("*.py.meta")):
            module = str(meta.relative_to("mutants")).removesuffix(".meta")
            if not config().should_mutate(module):
                continue
            exit_codes = json.loads(meta.read_text())["exit_code_by_key"]
            found += [Mutant(name, module, status_by_exit_code[code]) for name, code in exit_codes.items()]
    return found


def sample_of(mutants: Iterable[Mutant], size: int, seed: int) -> list[Mutant]:
    """Returns the mutants of the sample, which are those that count for the score."""
    module_to_names: dict[str, list[str]] = defaultdict(list)
    by_name = {}
    for mutant in mutants:
        module_to_names[mutant.module].append(mutant.name)
        by_name[mutant.name] = mutant
    return [by_name[name] for name in draw(module_to_names, size, seed)]


def run(names: Sequence[str], num_workers: int, num_examples: int) -> None:
    """Runs these mutants with `num_examples` examples of each property. mutmut saves each result at once."""
    os.nice(10)
    environment = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "WEFT_MUTANT_EXAMPLES": str(num_examples)}
    with tempfile.TemporaryDirectory(prefix="w-", ignore_cleanup_errors=True) as folder:
        subprocess.run(
            [sys.executable, str(HERE / "run_mutmut.py"), "run", "--max-children", str(num_workers), *names],
            check=True,
            env=os.environ | environment | {"TMPDIR": folder},
        )


def change_of(mutant: Mutant) -> tuple[str, str]:
    """Returns the lines that a mutant removes and the lines that it adds, stripped."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    lines = get_diff_for_mutant(mutant.name, path=mutant.module).splitlines()
    removed = [line[1:].strip() for line in lines if line.startswith("-") and not line.startswith("---")]
    added = [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
    return " ".join(removed), " ".join(added)


def load_reasons() -> list[dict[str, str]]:
    """Returns the entries of `reasons.yaml`: `function` and `was` name the line, `now` (if given) the change, and `why`
    the reason."""
    return list(yaml.safe_load(REASONS.read_text()) or []) if REASONS.exists() else []


def reason_for(function: str, removed: str, added: str, reasons: Sequence[Mapping[str, str]]) -> str | None:
    """Returns the recorded reason for this change, or None. `was` and `now` are patterns of the lines that the mutant
    removes and adds."""
    for entry in reasons:
        if (
            entry["function"] == function
            and (entry["was"] == removed or fnmatch(removed, entry["was"]))
            and ("now" not in entry or entry["now"] == added or fnmatch(added, entry["now"]))
        ):
            return entry["why"]
    return None


def render(sample: Sequence[Mutant], num_all: int, seed: int) -> str:
    """Returns the text of SURVIVORS.md: the score per package, then each survivor with its change and its reason."""
    from loadtest.bench_result import commit, machine

    counts: dict[str, Counter[str]] = {package: Counter() for package in PACKAGES}
    for mutant in sample:
        counts[mutant.package][mutant.status] += 1
    where = machine()
    lines = [
        "# What the mutants say about the tests of the pure modules",
        "",
        f"`make mutants`: {len(sample)} of {num_all} mutants, stratified by module, seed {seed}. Taken "
        f"{datetime.now(UTC).date()} at {commit()} on {where['cores']} cores of {where['cpu']}, "
        f"Python {where['python']}. The goal is {TARGET:.0%} killed. A mutant that runs into its time limit counts as "
        "killed, one that no test enters does not.",
        "",
        "| package | sample | killed | of them by time | survived | entered by no test | not run | score |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    total: Counter[str] = Counter()
    for package, count in counts.items():
        total += count
        lines.append(_row(package, count))
    lines += [_row("all", total), "", "## Survivors", ""]
    reasons = load_reasons()
    for package in PACKAGES:
        for mutant in sample:
            if mutant.package == package and mutant.status not in KILLED | {"not checked"}:
                lines.append(_survivor(mutant, reasons))
    return "\n".join(lines) + "\n"


def _row(package: str, count: Counter[str]) -> str:
    num_killed = sum(count[status] for status in KILLED)
    num_run = count.total() - count["not checked"]
    score = f"{num_killed / num_run:.1%}" if num_run else "-"
    cells = [package, count.total(), num_killed, count["timeout"]]
    cells += [num_run - num_killed - count["no tests"], count["no tests"], count["not checked"], score]
    return "| " + " | ".join(map(str, cells)) + " |"


def _survivor(mutant: Mutant, reasons: Sequence[Mapping[str, str]]) -> str:
    removed, added = change_of(mutant)
    reason = reason_for(mutant.function, removed, added, reasons) or "(no reason on file)"
    note = "" if mutant.status == "survived" else f" [{mutant.status}]"
    return f"- `{mutant.module}` `{mutant.function}`{note}: `{removed}` became `{added}`. {reason}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=SAMPLE_SIZE, help="how many mutants are drawn")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="run only mutants of such names; all are reported"
    )
    parser.add_argument("--again", action="store_true", help="run survivors and timeouts once more")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(arguments)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    if not given.report:
        make_mutants()
        forget_old_stats()
        wanted = {"not checked", "survived", "timeout", "no tests"} if given.again else {"not checked"}
        sample = sample_of(read_mutants(), given.sample, given.seed)
        names = [mutant.name for mutant in sample if mutant.status in wanted and fnmatch(mutant.name, given.only)]
        print(f"{len(names)} of {len(sample)} mutants to run", flush=True)
        if names:
            run(names, given.workers, num_examples=60 if given.again else 20)
    mutants = read_mutants()
    REPORT.write_text(render(sample_of(mutants, given.sample, given.seed), len(mutants), given.seed))
    print(f"written: {REPORT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

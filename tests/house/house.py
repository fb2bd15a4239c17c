"""Measures how easily the source reads, and prints the figures: `make house`.

    python tests/house/house.py                the figures
    python tests/house/house.py --list         also every entered file, duplicated name and fragment

The figures are the number and the size of source files, the files that one request with a picture enters, the names
that are used twice, and the docstrings that are no sentences. This module does not judge layout or style beyond
that: the linter and the import contracts do.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import statistics
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from sentences import is_sentence

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("fabric", "kv_index", "modalities", "encoder_pool", "llm_workers", "router", "deploy", "loadtest")
LONGEST_MODULE = 600
"""Is the largest number of lines of a module of the product or of a test."""


class Docstring(NamedTuple):
    """One docstring, or one string under a constant or an attribute."""

    place: str
    """`path:line`."""
    text: str


class RequestPath(NamedTuple):
    """What one request enters."""

    files: list[str]
    num_steps: int
    """Calls from a function in one file into a function in another."""


def source_files() -> list[Path]:
    """Returns the Python files of the product that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    paths = [Path(line) for line in listed.stdout.splitlines()]
    return sorted(path for path in paths if path.parts[0] in FOLDERS and (ROOT / path).is_file())


def docstrings(path: Path) -> Iterator[Docstring]:
    """Yields the docstrings of the module, of its classes and functions, and those under assignments."""
    tree = ast.parse((ROOT / path).read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, statement in zip([None, *body], body, strict=False):
            is_first = before is None and isinstance(
                node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            )
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
                and (is_first or isinstance(before, (ast.Assign, ast.AnnAssign)))
            ):
                yield Docstring(f"{path}:{statement.lineno}", statement.value.value)


def names_used_twice() -> dict[str, list[str]]:
    """Returns the class names and module names that stand in more than one place, with the places."""
    name_to_places: dict[str, list[str]] = defaultdict(list)
    for path in source_files():
        if path.stem not in ("__init__", "__main__"):
            name_to_places[f"module {path.stem}"].append(str(path))
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ClassDef):
                name_to_places[f"class {node.name}"].append(f"{path}:{node.lineno}")
    return {name: places for name, places in sorted(name_to_places.items()) if len(places) > 1}


def request_path() -> RequestPath:
    """Runs a cluster in this process, asks it about a picture, and counts the files that the request enters."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "rigs")]
    prefix = str(ROOT) + "/"
    files: set[str] = set()
    steps: Counter[tuple[str, str]] = Counter()
    is_recording = threading.Event()

    def file_of(frame: FrameType | None) -> str | None:
        if frame is None or not frame.f_code.co_filename.startswith(prefix):
            return None
        path = frame.f_code.co_filename.removeprefix(prefix)
        return path if path.split("/")[0] in FOLDERS else None

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not is_recording.is_set():
            return
        called = file_of(frame)
        if called is not None:
            files.add(called)
            caller = file_of(frame.f_back)
            if caller is not None and caller != called:
                steps[caller, called] += 1

    async def ask_once() -> None:
        from chat_media import image_part, user
        from cluster_in_process import ask, serving

        async with serving() as (_, client):
            await ask(client, messages=user("What shape is this?", image_part(1)), max_tokens=8)
            is_recording.set()
            await ask(client, messages=user("What shape is this?", image_part(2)), max_tokens=8)
            is_recording.clear()

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        asyncio.run(ask_once())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return RequestPath(sorted(files), steps.total())


def main() -> None:
    """Prints the figures. Exits with 1 if a docstring is a fragment or a module is too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--list",
        action="store_true",
        help="also print every file that the request enters, every duplicated name and every fragment",
    )
    chosen = parser.parse_args()
    paths = source_files()
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path in paths}
    found = [each for path in paths for each in docstrings(path)]
    fragments = [each for each in found if not is_sentence(each.text)]
    twice = names_used_twice()
    entered = request_path()
    too_long = [path for path, length in lengths.items() if length > LONGEST_MODULE]
    print(f"source files: {len(paths)}, median {statistics.median(lengths.values()):.0f} lines")
    print(f"modules of more than {LONGEST_MODULE} lines: {len(too_long)}")
    print(f"one request with a picture: enters {len(entered.files)} files in {entered.num_steps} steps")
    print(f"names used twice: {len(twice)}")
    print(f"docstrings: {len(found)}, of which fragments: {len(fragments)}")
    if chosen.list:
        for path in entered.files:
            print(f"  {path}: {lengths[Path(path)]} lines" if Path(path) in lengths else f"  {path}")
        for name, places in twice.items():
            print(f"  {name}: {', '.join(places)}")
        for fragment in fragments:
            print(f"  {fragment.place}: {' '.join(fragment.text.split())[:90]}")
    sys.exit(bool(fragments or too_long))


if __name__ == "__main__":
    main()

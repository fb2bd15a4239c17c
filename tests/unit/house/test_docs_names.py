"""The documents name only what exists: files, folders, classes, functions, config keys, metrics and targets of make.

The names are those in backticks and in links. Decision records and the changelog may speak of the past, so only the
files and folders that they name are checked.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from doc_blocks import blocks_of

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "docs" / "hooks"))

from reference_tables import config_keys, metric_rows

ROOT = Path(__file__).resolve().parents[3]


def _documents(folder: str) -> list[str]:
    return sorted(f"{folder}/{path.name}" for path in (ROOT / folder).glob("*.md"))


PRESENT = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", *_documents("docs")]
"""Lists the documents that describe the present. Each name in them exists."""
PAST = ["CHANGELOG.md", *_documents("docs/adr"), *_documents("deploy/demo")]
"""Lists the documents that may name classes of the past, and those of the demo model. Each file and folder in them
exists."""
PRODUCT = ("fabric", "kv_index", "modalities", "encoder_pool", "llm_workers", "router", "deploy", "loadtest")
TOP = (*PRODUCT, "tests", "docs", "examples")

OPENAI_ERRORS = ("APIError", "APIStatusError", "AuthenticationError", "BadRequestError", "InternalServerError")
OPENAI_ERRORS += ("NotFoundError", "PermissionDeniedError", "RateLimitError", "UnprocessableEntityError")
FOREIGN = {
    "AcceleratorError": "torch",
    "OutOfMemoryError": "torch",
    **dict.fromkeys(OPENAI_ERRORS, "OpenAI's libraries"),
    **dict.fromkeys(("KiB", "MiB", "GiB"), "units of a size, written like the names of classes"),
}
"""Maps each name that looks like a class of the repository, and is none, to what it is."""
MADE = {
    "build": "`make docs` and `make coverage` write it",
    "llms-full.txt": "`make docs` writes it",
    "llms.txt": "`make docs` writes it",
    "mutants": "`make mutants` writes it",
}
"""Maps each file or folder that a document names, and that is not in the repository, to where it comes from."""
SUFFIXES = "py|pyi|md|c|h|yaml|yml|json|toml|svg|txt|jinja|css|sh|safetensors"

CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1[ ]*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[[^\[\]]*\]\(([^()\s]+)\)")
PATH = re.compile(rf"[\w.-]+(?:/[\w.-]+)*/|[\w.-]+(?:/[\w.-]+)+|[\w-]+\.(?:{SUFFIXES})")
CLASS = re.compile(r"([A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*)((?:\.\w+)*)(?:\(\))?")
WORD = re.compile(r"[a-z]\w*_\w+|_\w+|[A-Z][A-Z0-9]*_[A-Z0-9_]+")
PLACED = re.compile(r"(`[\w.]+`(?:\s+(?:and|or)\s+`[\w.]+`)*)(?:\s+in\s+|\s+\()`([\w/]+\.py)`")
"""Matches names that a document places in a file: `plan_route` in `router/planning/route_plan.py`, and the same with
the file in brackets."""


@cache
def tracked() -> frozenset[str]:
    """Returns the paths of all files that git knows, and of their folders with a slash at the end."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    files = [Path(path) for path in listed if (ROOT / path).is_file()]
    folders = {f"{folder.as_posix()}/" for path in files for folder in path.parents if folder != Path()}
    return frozenset(folders | {path.as_posix() for path in files})


@cache
def file_names() -> frozenset[str]:
    return frozenset(Path(path).name for path in tracked() if not path.endswith("/"))


def exists(path: str) -> bool:
    """Says whether the repository has this file or folder. A path is written from the root, a module also without
    `.py`, and a file without a folder by its name alone."""
    if "/" not in path:
        return path in file_names() or path in tracked()
    return bool({path, f"{path}/", f"{path}.py"} & tracked())


class Definitions(NamedTuple):
    """Holds what one Python file defines."""

    names: frozenset[str]
    """Holds classes, functions, variables and members of classes."""
    class_to_members: Mapping[str, frozenset[str]]
    class_to_bases: Mapping[str, frozenset[str]]


@cache
def definitions(path: str) -> Definitions:
    tree = ast.parse((ROOT / path).read_text())
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return Definitions(
        _names_in(tree),
        {node.name: _names_in(node) for node in classes},
        {node.name: frozenset(base.id for base in node.bases if isinstance(base, ast.Name)) for node in classes},
    )


def _names_in(tree: ast.AST) -> frozenset[str]:
    defined: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                defined.add(node.name)
            case ast.Name(ctx=ast.Store()):
                defined.add(node.id)
            case ast.Attribute(ctx=ast.Store()):
                defined.add(node.attr)
    return frozenset(defined)


def product() -> list[str]:
    """Returns the Python files of the product."""
    return sorted(path for path in tracked() if path.endswith(".py") and path.partition("/")[0] in PRODUCT)


@cache
def class_to_members() -> Mapping[str, frozenset[str]]:
    """Maps each class of the product to the names that it and its bases define: methods, fields, and what its methods
    assign to `self`."""
    own: dict[str, frozenset[str]] = {}
    bases: dict[str, frozenset[str]] = {}
    for path in product():
        own |= definitions(path).class_to_members
        bases |= definitions(path).class_to_bases

    def members(name: str) -> frozenset[str]:
        return own[name].union(*(members(base) for base in bases[name] if base in own and base != name))

    return {name: members(name) for name in own}


@cache
def words() -> frozenset[str]:
    """Returns every word of the source and its tests: names of functions and fields, and words in strings."""
    suffixes = (".py", ".c", ".h", ".toml", ".yaml")
    texts = ((ROOT / path).read_text() for path in tracked() if path.endswith(suffixes))
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


def prose(document: str) -> str:
    """Returns a document without its fenced code."""
    return FENCE.sub("", (ROOT / document).read_text())


def codes(document: str) -> set[str]:
    """Returns what stands in backticks."""
    return set(CODE.findall(prose(document)))


def paths_in(text: str) -> Iterator[str]:
    """Yields the words of a piece of code that look like files or folders of this repository."""
    for word in text.split():
        path = re.sub(r":{1,2}\w+$", "", word)
        if not PATH.fullmatch(path) or path.partition("/")[0] in MADE:
            continue
        if "/" not in path or path.partition("/")[0] in TOP or Path(path).suffix[1:] in SUFFIXES.split("|"):
            yield path


@pytest.mark.parametrize("document", [*PRESENT, *PAST])
def test_every_file_and_folder_that_a_document_names_exists(document: str) -> None:
    """A document may also name the files in which its reader saves blocks of it."""
    named = sorted({path for code in codes(document) for path in paths_in(code)})
    saved = {block.file for block in blocks_of(document)}
    assert [path for path in named if not exists(path) and path not in saved] == []


@pytest.mark.parametrize("document", [*PRESENT, *PAST])
def test_every_link_leads_to_a_file_of_the_repository(document: str) -> None:
    """`mkdocs build --strict` checks the anchors, and does not see the README."""
    folder = (ROOT / document).parent
    targets = {link.partition("#")[0] for link in LINK.findall(prose(document)) if ":" not in link}
    assert [target for target in sorted(targets) if target and not (folder / target).exists()] == []


@pytest.mark.parametrize("document", PRESENT)
def test_every_class_that_a_document_names_exists_with_its_members(document: str) -> None:
    missing = []
    for code in codes(document):
        found = CLASS.fullmatch(code)
        if found is None or found[1] in FOREIGN or code in MADE:
            continue
        members = class_to_members().get(found[1])
        member = found[2].removeprefix(".").partition(".")[0]
        if members is None or (member and member not in members):
            missing.append(code)
    assert sorted(missing) == []


@pytest.mark.parametrize("document", PRESENT)
def test_every_function_and_field_that_a_document_names_exists(document: str) -> None:
    named = {code.removesuffix("()") for code in codes(document)}
    assert sorted(name for name in named if WORD.fullmatch(name) and not _is_known(name)) == []


def _is_known(name: str) -> bool:
    if name.startswith("weft_"):
        return name.rstrip("_") in METRICS or any(name.endswith("_") and each.startswith(name) for each in METRICS)
    return name in words()


METRICS = frozenset(row.name for row in metric_rows())
KEYS = frozenset(key.path for key in config_keys())
SECTIONS = frozenset(key.partition(".")[0] for key in KEYS if "." in key)


@pytest.mark.parametrize("document", PRESENT)
def test_every_config_key_that_a_document_names_exists(document: str) -> None:
    named = {code.partition(":")[0] for code in codes(document) if re.match(r"[a-z]+\.[a-z_.]+(:|$)", code)}
    keys = [name for name in named if name.partition(".")[0] in SECTIONS and not exists(name)]
    assert sorted(key for key in keys if key not in KEYS and not any(each.startswith(key + ".") for each in KEYS)) == []


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_what_a_document_places_in_a_file_is_defined_there(document: str) -> None:
    placed = [
        (name, path)
        for names, path in PLACED.findall(prose(document))
        for name in CODE.findall(names)
        if name.partition(".")[0] not in SECTIONS
    ]
    assert len(placed) > 15
    assert [f"{name} in {path}" for name, path in placed if not _defines(path, name)] == []


def test_each_stop_of_one_request_names_its_functions_and_files() -> None:
    part = (ROOT / "ARCHITECTURE.md").read_text().partition("\n## One request\n")[2].partition("\n## ")[0]
    stops = re.findall(r"^\d+\. .*?(?=^\d+\. |\Z)", part, re.DOTALL | re.MULTILINE)
    assert [int(stop.partition(".")[0]) for stop in stops] == list(range(1, 21))
    assert [stop.partition("\n")[0] for stop in stops if not PLACED.search(stop)] == []


def _defines(path: str, name: str) -> bool:
    """Says whether a file defines a name and its member. A file without a folder is any file of that name."""
    paths = [path] if "/" in path else [each for each in tracked() if Path(each).name == path]
    return any(set(name.split(".")) <= definitions(each).names for each in paths)


def test_every_target_of_make_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split())
    texts = [(ROOT / document).read_text() for document in [*PRESENT, *PAST]]
    named = {target for text in texts for target in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)}
    assert {"serve", "test", "docs"} <= named
    assert named - targets == set()


# ---------------------------------------------------------------- measured figures

MEASURED = re.compile(
    r"^\| [^|]+ \| ([^|]+) \| \[`([^`]+)`\]\(loadtest/results/(\S+)\.json\) \| ([^|]+) \|$", re.MULTILINE
)
"""Matches a row of the README's table of measurements: value, command, file and processor."""


@pytest.mark.parametrize(("value", "command", "name", "processor"), MEASURED.findall((ROOT / "README.md").read_text()))
def test_a_figure_of_the_readme_is_the_one_of_its_file(value: str, command: str, name: str, processor: str) -> None:
    """A figure may be rounded, and may be a percentage of a share or milliseconds of microseconds. The file is the one
    in git's index, because a bench that somebody runs on another machine writes over the file on disk."""
    command_line = ["git", "show", f":loadtest/results/{name}.json"]
    result = json.loads(subprocess.run(command_line, cwd=ROOT, check=True, capture_output=True).stdout)
    measured = [bar["value"] for bar in result["bars"]]
    measured += [
        float(cell.rstrip("%")) for row in result["rows"][1:] for cell in row if re.fullmatch(r"[+\d.]+%?", cell)
    ]
    for figure in re.findall(r"[\d.]+", value):
        digits = len(figure.partition(".")[2])
        factors = {"%": 100.0, "ms": 0.001}.get(value.rpartition(" ")[2], 1.0), 1.0
        assert any(f"{each * factor:.{digits}f}" == figure for each in measured for factor in factors), figure
    assert result["bench"].partition("-")[0] == command.partition(" ")[0]
    assert set(processor.split()) <= set(result["machine"]["cpu"].replace("(R)", "").split())


def test_the_table_of_sizes_is_the_one_of_its_file() -> None:
    result = json.loads((ROOT / "loadtest" / "results" / "simulate-sizing.json").read_text())
    shown = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "sizing.md").read_text().splitlines()
        if re.match(r"\| (.*? \| ){2}[\d.]+ \| \d+ \| \d+ \| [\d.]+ s \|", line)
    ]
    taken = [
        [mix, rate, encoders, least, f"{int(ttft_ms) / 1000:.2f} s", busy, one_less]
        for _, mix, rate, encoders, least, _, ttft_ms, busy, one_less in result["rows"][1:]
    ]
    assert [row[1:] for row in shown] == taken
    hardware = [row[0] for row in shown if row[0]]
    assert hardware == list(dict.fromkeys(row[0] for row in result["rows"][1:]))


# ---------------------------------------------------------------- faces

FACES = [path for path in product() if path.endswith("/__init__.py")]


@pytest.mark.parametrize("face", FACES)
def test_a_face_names_each_module_of_its_folder_and_no_other(face: str) -> None:
    text = ast.get_docstring(ast.parse((ROOT / face).read_text())) or ""
    folder = Path(face).parent
    below = {path.relative_to(folder).parts for path in map(Path, tracked()) if path.is_relative_to(folder)}
    stems = {Path(parts[0]).stem for parts in below if parts and parts[-1].endswith(".py")} - {"__init__"}
    named = set(re.findall(r"`([a-z]\w*)/?`", text)) | set(re.findall(r"^ +([a-z]\w*)  +\w", text, re.MULTILINE))
    assert sorted(stem for stem in stems if not re.search(rf"\b{stem}\b", text)) == []
    assert sorted(named - stems - defined_names() - NO_MODULES) == []


NO_MODULES = frozenset({"checkpoint", "results", "weft"})
"""Lists the folders that contain no module, and the command, which faces name."""


@cache
def defined_names() -> frozenset[str]:
    """Returns the names of all modules, folders and definitions of the product."""
    modules = {part for path in product() for part in Path(path).with_suffix("").parts}
    return frozenset(modules.union(*(definitions(path).names for path in product())))


# ---------------------------------------------------------------- the check itself


@pytest.mark.parametrize(
    ("code", "paths"),
    [
        ("router/service.py", ["router/service.py"]),
        ("llm_workers/features/", ["llm_workers/features/"]),
        ("router/run/context", ["router/run/context"]),
        ("python -m pytest tests/unit -q", ["tests/unit"]),
        ("modalities/media/frame_sampling.py:Timeline", ["modalities/media/frame_sampling.py"]),
        ("test_families.py", ["test_families.py"]),
        ("build/site", []),
        ("/v1/models", []),
        ("image/png", []),
        ("workers.num_blocks", []),
    ],
)
def test_paths_are_known(code: str, paths: list[str]) -> None:
    assert list(paths_in(code)) == paths


def test_what_is_not_there_is_found() -> None:
    assert [path for path in ("router/no.py", "router/no/", "no_such_file.md", "router/servic") if exists(path)] == []
    assert exists("router/service")
    assert _defines("router/planning/route_plan.py", "plan_route")
    assert not _defines("router/service.py", "plan_route")
    assert not _defines("router/service.py", "RouterService.plan_route")
    assert "add" in class_to_members()["Scheduler"]
    assert PLACED.findall("`A.b` or\n`c` in `x/y.py`") == [("`A.b` or\n`c`", "x/y.py")]

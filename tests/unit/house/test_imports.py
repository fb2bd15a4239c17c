"""Tests and examples import only names that exist, and read only such names of the modules that they import.

mypy does not check this for tests, because they pass fakes and read what only they know to be there. A wrong name would
otherwise fail only where the test runs, and tests that need a GPU or a large model run seldom. The check reads sources
and imports nothing.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[3]
CHECKED = ("tests", "examples")
SEARCHED = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["mypy_path"])
"""Lists the folders from which tests import by the bare name."""


class ModuleNames(NamedTuple):
    """Holds the names that a module has once it is imported, and those that only type checkers see in it."""

    bound: frozenset[str]
    for_types: frozenset[str]
    starred: tuple[str, ...]
    """Lists the modules of which the module imports everything."""
    public: frozenset[str] | None
    """Holds `__all__`, if the module has one of plain strings."""


class UsedName(NamedTuple):
    """A `UsedName` is a name of one of our own modules that a file uses."""

    line: int
    module: str
    name: str
    """It is empty where the file imports the module as such."""
    is_for_types: bool


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def statements(body: list[ast.stmt], *, is_for_types: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Yields the statements that run when a module is imported, with whether only type checkers see them."""
    for statement in body:
        match statement:
            case ast.If(test=test, body=inner, orelse=other):
                yield from statements(inner, is_for_types=is_for_types or is_type_checking(test))
                yield from statements(other, is_for_types=is_for_types)
            case ast.Try(body=inner, handlers=handlers, orelse=other, finalbody=final):
                handled = [each for handler in handlers for each in handler.body]
                yield from statements([*inner, *handled, *other, *final], is_for_types=is_for_types)
            case ast.With(body=inner) | ast.For(body=inner) | ast.While(body=inner):
                yield statement, is_for_types
                yield from statements(inner, is_for_types=is_for_types)
            case ast.Match(cases=cases):
                yield from statements([each for case in cases for each in case.body], is_for_types=is_for_types)
            case _:
                yield statement, is_for_types


def bound_by(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return {name}
        case ast.Import(names=names):
            return {alias.asname or alias.name.partition(".")[0] for alias in names}
        case ast.ImportFrom(names=names):
            return {alias.asname or alias.name for alias in names if alias.name != "*"}
        case ast.With(items=items):
            targets: list[ast.AST] = [item.optional_vars for item in items if item.optional_vars is not None]
        case ast.For(target=target):
            targets = [target]
        case ast.While():
            targets = []
        case _:
            targets = [statement]
    stored = (node for target in targets for node in ast.walk(target))
    return {node.id for node in stored if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def plain_strings(value: ast.expr | None) -> list[str] | None:
    if not isinstance(value, (ast.List, ast.Tuple)):
        return None
    strings = [one.value for one in value.elts if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return strings if len(strings) == len(value.elts) else None


def names_of(tree: ast.Module, module: str, *, is_package: bool) -> ModuleNames:
    bound, for_types, starred, public = set(VARIABLES_OF_MODULES), set[str](), list[str](), None
    for statement, is_for_types in statements(tree.body):
        (for_types if is_for_types else bound).update(bound_by(statement))
        match statement:
            case ast.ImportFrom(names=[ast.alias(name="*")]):
                starred.append(absolute(statement, module, is_package=is_package))
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                public = plain_strings(value)
    return ModuleNames(
        frozenset(bound), frozenset(for_types), tuple(starred), None if public is None else frozenset(public)
    )


VARIABLES_OF_MODULES = ("__name__", "__doc__", "__file__", "__path__", "__spec__", "__package__", "__dict__")


def absolute(statement: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """Returns the name of the module that a statement in `module` imports from."""
    if not statement.level:
        return statement.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - statement.level + is_package]
    return ".".join([*kept, *([statement.module] if statement.module else [])])


class Sources:
    """Finds the modules of a repository by their names, below its root and in the folders that are searched too."""

    def __init__(self, root: Path, searched: tuple[str, ...]) -> None:
        self.root = root
        self._folders = (root, *(root / folder for folder in searched))
        self._path_to_names: dict[Path, ModuleNames] = {}
        self._module_to_place: dict[tuple[str, Path], Path | None] = {}

    def place(self, module: str, beside: Path) -> Path | None:
        """Returns the file of a module, or the folder of a package without `__init__`; None if there is none."""
        key = module, beside
        if key not in self._module_to_place:
            self._module_to_place[key] = self._find(module, beside)
        return self._module_to_place[key]

    def _find(self, module: str, beside: Path) -> Path | None:
        paths = [folder.joinpath(*module.split(".")) for folder in (beside, *self._folders)]
        for path in paths:
            for place in (path / "__init__.py", path.with_name(f"{path.name}.py")):
                if place.is_file():
                    return place
        # As in Python, a folder is a package only if no other folder has a module of the name.
        return next((path for path in paths if path.is_dir() and any(path.glob("**/*.py"))), None)

    def is_own(self, module: str, beside: Path) -> bool:
        return self.place(module.partition(".")[0], beside) is not None

    def has_name(self, used: UsedName, beside: Path) -> bool:
        place = self.place(used.module, beside)
        if place is None:
            return False
        if not used.name or self.place(f"{used.module}.{used.name}", beside) is not None:
            return True
        if place.is_dir():
            return False
        names = self._names(place, used.module)
        return (
            used.name in names.bound
            or "__getattr__" in names.bound
            or (used.is_for_types and used.name in names.for_types)
            or any(self._stars_give(module, used, beside) for module in names.starred)
        )

    def _stars_give(self, module: str, used: UsedName, beside: Path) -> bool:
        place = self.place(module, beside)
        if place is None or place.is_dir():
            return place is None  # what a foreign module exports is not known here
        public = self._names(place, module).public
        is_public = not used.name.startswith("_") if public is None else used.name in public
        return is_public and self.has_name(used._replace(module=module), beside)

    def _names(self, place: Path, module: str) -> ModuleNames:
        if place not in self._path_to_names:
            is_package = place.name == "__init__.py"
            self._path_to_names[place] = names_of(ast.parse(place.read_text()), module, is_package=is_package)
        return self._path_to_names[place]


def used_names(nodes: list[ast.AST], sources: Sources, beside: Path) -> Iterator[UsedName]:
    """Yields the names that a file of these nodes imports from modules of the repository, and those that it reads of
    modules which it imports as a whole."""
    only_types = {
        inner
        for node in nodes
        if isinstance(node, ast.If) and is_type_checking(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    alias_to_module: dict[str, str] = {}
    for node in nodes:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if sources.is_own(alias.name, beside):
                        yield UsedName(node.lineno, alias.name, "", node in only_types)
                        if alias.asname or "." not in alias.name:
                            alias_to_module[alias.asname or alias.name] = alias.name
            case ast.ImportFrom(module=str(module), level=0, names=names) if sources.is_own(module, beside):
                for alias in names:
                    yield UsedName(node.lineno, module, "" if alias.name == "*" else alias.name, node in only_types)
                    if sources.place(f"{module}.{alias.name}", beside) is not None:
                        alias_to_module[alias.asname or alias.name] = f"{module}.{alias.name}"
    for name in rebound_names(nodes):
        alias_to_module.pop(name, None)
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attr, ctx=ast.Load()) if name in alias_to_module:
                yield UsedName(node.lineno, alias_to_module[name], attr, node in only_types)


def rebound_names(nodes: list[ast.AST]) -> set[str]:
    """Returns the names that a file gives to variables, arguments, functions or classes anywhere, so that they do not
    surely mean an imported module."""
    found: set[str] = set()
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                found.add(name)
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
    return found


def missing_names(path: Path, sources: Sources) -> list[str]:
    """Returns what the file uses of our modules and does not find, as `path:line: module.name`."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    where = path.relative_to(sources.root)
    return [
        f"{where}:{used.line}: {used.module}{'.' if used.name else ''}{used.name}"
        for used in used_names(nodes, sources, path.parent)
        if not sources.has_name(used, path.parent)
    ]


@cache
def repository() -> Sources:
    return Sources(ROOT, SEARCHED)


@pytest.mark.parametrize("folder", CHECKED)
def test_what_is_imported_exists(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    assert [each for path in paths for each in missing_names(path, repository())] == []


@pytest.fixture
def small(tmp_path: Path) -> Sources:
    """Writes a small repository: a package with a face, a module whose names come in every way, and a rig."""
    files = {
        "cloth/__init__.py": "from cloth.thread import Warp, twist as spin\n__all__ = ['Warp', 'spin']\n",
        "cloth/thread.py": (
            "from typing import TYPE_CHECKING\n"
            "import numpy as np\n"
            "if TYPE_CHECKING:\n    from cloth.dye import Colour\nelse:\n    Colour = None\n"
            "if TYPE_CHECKING:\n    from cloth.dye import Shade\n"
            "class Warp:\n    LENGTH = 3\n"
            "def twist():\n    inner = 1\n"
            "try:\n    import fast\nexcept ImportError:\n    fast = None\nelse:\n    SPEED: int = 2\n"
            "(first, *rest), last = (1, 2), 3\n"
            "with open('x') as file:\n    line = 1\n"
        ),
        "cloth/dye.py": "Colour = Shade = _mordant = 1\n",
        "cloth/all_of_it.py": "from cloth.dye import *\n",
        "cloth/chosen.py": "from cloth.some import *\n",
        "cloth/some.py": "__all__ = ['red']\nred = blue = 1\n",
        "cloth/lazy.py": "def __getattr__(name):\n    return name\n",
        "loose/piece.py": "end = 1\n",
        "rigs/loom.py": "shed = 1\n",
    }
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    return Sources(tmp_path, ("rigs",))


def found_missing(small: Sources, source: str) -> list[str]:
    path = small.root / "test_it.py"
    path.write_text(source)
    return [each.rpartition(" ")[2] for each in missing_names(path, small)]


@pytest.mark.parametrize(
    "source",
    [
        "from cloth import Warp, spin, thread, dye",
        "from cloth.thread import Warp, twist, fast, SPEED, first, rest, last, file, line, np, Colour",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from cloth.thread import Shade",
        "from cloth.all_of_it import Colour",
        "from cloth.chosen import red",
        "from cloth.lazy import anything",
        "from loom import shed",
        "from loose import piece",
        "from loose.piece import end",
        "import cloth.dye, loom\nloom.shed",
        "from cloth import thread as yarn\nyarn.Warp",
        "from cloth import dye\ndef test(dye):\n    dye.nothing",
        "import numpy\nfrom numpy import no_such_name\nnumpy.nothing",
        "from cloth.dye import *",
    ],
)
def test_names_that_exist_are_found(small: Sources, source: str) -> None:
    assert found_missing(small, source) == []


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("from cloth import twist", ["cloth.twist"]),
        ("from cloth.thread import Weft, Warp", ["cloth.thread.Weft"]),
        ("from cloth.thread import inner, LENGTH", ["cloth.thread.inner", "cloth.thread.LENGTH"]),
        ("from cloth.thread import Shade", ["cloth.thread.Shade"]),
        ("from cloth.all_of_it import _mordant", ["cloth.all_of_it._mordant"]),
        ("from cloth.chosen import blue", ["cloth.chosen.blue"]),
        ("from cloth.gone import Warp", ["cloth.gone.Warp"]),
        ("import cloth.gone", ["cloth.gone"]),
        ("def test():\n    from loom import gone", ["loom.gone"]),
        ("from loose import gone", ["loose.gone"]),
        ("from cloth import thread as yarn\nyarn.gone", ["cloth.thread.gone"]),
        ("import loom\nloom.gone", ["loom.gone"]),
    ],
)
def test_names_that_do_not_exist_are_missing(small: Sources, source: str, missing: list[str]) -> None:
    assert found_missing(small, source) == missing

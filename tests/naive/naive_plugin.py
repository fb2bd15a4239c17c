"""Replaces a guard of Weft by a naive implementation within one run of pytest: `pytest -p naive_plugin --naive NAME`.

The replacement takes place once all test modules are imported, so that it reaches every module that has imported the
guard by its name. The plugin knows nothing of what the variants replace.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Protocol

import pytest


class Variant(Protocol):
    """A `Variant` replaces one guard."""

    @property
    def name(self) -> str: ...

    def apply(self, guards: Guards) -> None: ...


class Guards:
    """A `Guards` replaces what imported modules have. Nothing is put back, because the process ends with the run."""

    def replace(self, place: str, new: object) -> object:
        """Puts `new` in the place of `module:attribute`, and into every imported module that has the same object under
        the same name; the module is imported if no test has. The attribute may be a member of a class
        (`module:Class.method`). Returns what was there."""
        module_name, _, path = place.partition(":")
        owner_path, _, name = path.rpartition(".")
        module = importlib.import_module(module_name)
        owner = attrgetter(owner_path)(module) if owner_path else module
        old = getattr(owner, name)
        setattr(owner, name, new)
        if not owner_path:
            for other in list(sys.modules.values()):
                if getattr(other, "__dict__", {}).get(name) is old:
                    setattr(other, name, new)
        return old

    def method(self, place: str) -> Callable[[Callable[..., Any]], None]:
        """Returns a decorator that puts a function in the place of a function or method."""

        def put(new: Callable[..., Any]) -> None:
            self.replace(place, new)

        return put


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--naive", help="names the variant of `naive_variants` that this run tests")


def pytest_collection_finish(session: pytest.Session) -> None:
    name = session.config.getoption("--naive")
    if name is not None:
        from naive_variants import VARIANTS

        variants: dict[str, Variant] = {each.name: each for each in VARIANTS}
        variants[name].apply(Guards())

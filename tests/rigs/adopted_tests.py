"""Lets the tests of one engine run on another one: a module of `tests/vllm_cluster` takes those of a module of
`tests/e2e` over, with their fixtures, and provides the cluster that they ask for in fixtures of its own."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

END_TO_END = Path(__file__).parents[1] / "e2e"


def adopted(module: str, without: Collection[str] = ()) -> dict[str, Any]:
    """Returns the tests and fixtures of a module of `tests/e2e` by their names, except for those in `without`. A name
    there that the module does not have is an error. Side effect: the folder can be imported from."""
    if str(END_TO_END) not in sys.path:
        sys.path.append(str(END_TO_END))
    loaded = vars(importlib.import_module(module))
    assert set(without) <= loaded.keys(), f"{module} has no {set(without) - loaded.keys()}"
    found = {name: value for name, value in loaded.items() if _is_test(name, value) or _is_fixture(value)}
    return {name: value for name, value in found.items() if name not in without}


def _is_test(name: str, value: object) -> bool:
    return name.startswith("test_") and inspect.isfunction(value)


def _is_fixture(value: object) -> bool:
    return isinstance(value, pytest.FixtureDef) or type(value).__name__ == "FixtureFunctionDefinition"

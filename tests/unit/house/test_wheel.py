"""Checks what a wheel of Weft would contain, without building one: setuptools lists it."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest
from setuptools import Distribution  # type: ignore[import-untyped]  # setuptools ships no types

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = ("fabric", "modalities", "kv_index", "encoder_pool", "llm_workers", "router", "deploy", "loadtest")


NO_PART = {"deploy/Dockerfile"}
"""An image is built around a wheel, and not out of one."""


@pytest.fixture(scope="module")
def contents() -> set[str]:
    """Returns the paths of all files of the wheel, modules and data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        distribution = Distribution({"script_name": "setup.py"})
        distribution.parse_config_files()
        distribution.include_package_data = False  # Otherwise setuptools would write a folder; `package-data` decides.
        command = distribution.get_command_obj("build_py")
        command.ensure_finalized()
        data = [Path(folder, name) for _, folder, _, names in command.data_files for name in names]
        modules = [Path(path) for _, _, path in command.find_all_modules()]
    return {path.as_posix() for path in (*data, *modules)}


def tracked() -> set[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PRODUCT]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return {path for path in listed if (ROOT / path).is_file()} - NO_PART


def test_every_package_tells_type_checkers_that_it_is_typed(contents: set[str]) -> None:
    assert {f"{package}/py.typed" for package in PRODUCT} <= contents


def test_it_contains_every_file_of_the_product(contents: set[str]) -> None:
    assert contents == tracked()


def test_only_linux_needs_nixl() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    assert [each for each in dependencies if "nixl" in each] == ["nixl-cu12==1.5.1; sys_platform == 'linux'"]

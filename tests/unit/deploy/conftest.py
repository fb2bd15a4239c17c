"""Holds what tests of configs share: the files of the demo model without weights, and a message plane."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.demo.build import write_all_but_weights
from fabric.transport import LocalHub, LocalPlane


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo")
    write_all_but_weights(directory)
    return directory


@pytest.fixture
def plane() -> Iterator[LocalPlane]:
    made = LocalPlane(LocalHub(), "local://router")
    yield made
    made.close()

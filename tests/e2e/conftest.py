"""Starts one Ray cluster for all tests that need only the laptop's defaults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_process import ClusterProcess, start_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[ClusterProcess]:
    with start_cluster() as running:
        yield running

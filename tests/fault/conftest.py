"""A Ray cluster of its own: these tests kill parts of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_process import ClusterProcess, start_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterProcess]:
    with start_cluster(encoders={"replicas": 2, "decode_processes": 1}, workers={"replicas": 2}) as running:
        yield running

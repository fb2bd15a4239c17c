"""Starts a separate Ray cluster, because these tests kill parts of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_process import ClusterProcess, start_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterProcess]:
    # A forward pass takes one unit, so an encoder with work nearly always has a queue. Its arena holds a third of the
    # features of the mixed questions.
    encoders = {
        "replicas": 2,
        "decode_processes": 1,
        "encode_delay_s": 0.05,
        "max_batch_cost": 1,
        "arena_bytes": 2**20,
    }
    with start_cluster(encoders=encoders, workers={"replicas": 2}) as running:
        yield running

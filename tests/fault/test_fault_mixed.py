"""Sends five hundred requests of all kinds, twelve at a time, to the real cluster, while its only encoder, or one of
its two workers, is killed at work: every request gets the right answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_process import ClusterProcess, eventually, pids, start_cluster
from mixed_requests import assert_all_right, kill_at_work, questions, run_mixed

pytestmark = [pytest.mark.ray, pytest.mark.nixl]

NUM_REQUESTS = 500
NUM_AT_ONCE = 12
ENCODE_DELAY_S = 0.05
"""This delay precedes each forward pass, so that an encoder with work is nearly always in one."""
ENCODER_LOST = 'weft_router_dispatch_errors_total{code="encoder_lost",kind="encode"}'
WORKER_LOST = 'weft_router_attempts_total{outcome="worker_lost"}'


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterProcess]:
    encoders = {
        "replicas": 1,
        "decode_processes": 1,
        "encode_delay_s": ENCODE_DELAY_S,
        "arena_bytes": 8 * 2**20,  # it holds a third of the features of 500 questions
    }
    with start_cluster(encoders=encoders, workers={"replicas": 2}) as running:
        yield running


def test_the_only_encoder_killed_at_work_costs_no_request(cluster: ClusterProcess) -> None:
    killed: list[str] = []
    before = set(pids(cluster, "encoder"))

    def disturb() -> None:
        killed.append(kill_at_work(cluster, "encoder"))

    outcome = run_mixed(cluster, list(questions(NUM_REQUESTS, 1)), NUM_AT_ONCE, disturb)
    metrics = cluster.metrics()
    assert set(killed) == before
    assert metrics[ENCODER_LOST] >= 1, "no item was in its hands: it was not busy"
    assert metrics['weft_router_capacity_wait_seconds_count{outcome="served"}'] >= 1, "nobody had to wait for it"
    eventually(lambda: len(pids(cluster, "encoder")) == 1 and not before & set(pids(cluster, "encoder")), 300)
    assert_all_right(cluster, outcome)


def test_one_of_two_workers_killed_at_work_costs_no_request(cluster: ClusterProcess) -> None:
    killed: list[str] = []
    lost = cluster.metrics().get(WORKER_LOST, 0)

    def disturb() -> None:
        killed.append(kill_at_work(cluster, "worker"))

    outcome = run_mixed(cluster, list(questions(NUM_REQUESTS, 2)), NUM_AT_ONCE, disturb)
    assert cluster.metrics()[WORKER_LOST] >= lost + 1, "no request was in its hands: it was not busy"
    eventually(lambda: len(pids(cluster, "worker")) == 2 and killed[0] not in pids(cluster, "worker"), 300)
    assert_all_right(cluster, outcome)


def test_everything_is_free_afterwards(cluster: ClusterProcess) -> None:
    for name in ("kv_used_blocks", "inbox_used_bytes", "num_running", "num_waiting", "num_quarantined"):
        eventually(lambda name=name: cluster.total(f"weft_worker_{name}") == 0)
    eventually(lambda: cluster.total("weft_encoder_num_leases") == 0)
    assert cluster.total("weft_router_requests_in_flight") == 0
    assert cluster.total("weft_router_requests_waiting") == 0

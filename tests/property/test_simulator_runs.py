"""Every simulated request ends once with all of its tokens, runs depend on their seeds alone, and stretches of equal
steps that are advanced in one call change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_requests import TABLE, run, small_cluster, small_workload

from loadtest.simulator.faults import MemberFault
from loadtest.simulator.policies import POLICIES
from loadtest.simulator.sim_cluster import ClusterSettings, SimResult
from loadtest.simulator.sim_requests import SimRequest

LARGEST_UNIT = max(max(TABLE.kind(name).item(0, "x").unit_tokens) for name in TABLE.media)
LARGEST_BYTES = LARGEST_UNIT * 2 * TABLE.worker.hidden_size + 4096
"""This is the room that the largest feature of the workload takes in an inbox."""

clusters = st.builds(
    small_cluster,
    num_workers=st.integers(1, 4),
    num_encoders=st.integers(1, 3),
    num_routers=st.integers(1, 3),
    policy=st.sampled_from(list(POLICIES)),
    seed=st.integers(0, 3),
    block_size=st.sampled_from((8, 16, 64)),
    max_step_tokens=st.sampled_from((64, 2048)),
    max_sequences=st.sampled_from((4, 64)),
    report_delay_s=st.sampled_from((0.0, 0.05, 1.0)),
    encoder_slowness=st.sampled_from(((), (1.0, 3.0))),
    waits_for_media=st.booleans(),
    inbox_bytes=st.sampled_from((LARGEST_BYTES, 3 * LARGEST_BYTES, 2**34)),
    router_plan_s=st.sampled_from((0.0, 0.004)),
    router_message_s=st.sampled_from((0.0, 0.0005)),
)
faults = st.lists(
    st.builds(
        MemberFault,
        st.sampled_from(("death", "slow")),
        st.sampled_from(("worker-0", "encoder-0")),
        st.floats(0.2, 3.0),
        st.sampled_from((2.0, 5.0)),
    ),
    max_size=2,
)


def check_conservation(result: SimResult, requests: list[SimRequest]) -> None:
    """Asserts that every request ended once, and with as many tokens as it wanted unless it failed."""
    assert [one.index for one in result.outcomes] == [one.index for one in requests]
    for outcome, request in zip(result.outcomes, requests, strict=True):
        if outcome.is_served:
            assert outcome.num_tokens == request.num_output
            assert 0 < outcome.first_token_s <= outcome.end_s
        else:
            assert outcome.error


@settings(max_examples=15, deadline=None)
@given(clusters, st.integers(0, 1000), st.floats(3.0, 60.0))
def test_every_request_ends_once_with_all_of_its_tokens(cluster: ClusterSettings, seed: int, rate: float) -> None:
    requests = small_workload(25, rate, seed, mean_turns=1.5, think_s=0.5)
    result = run(cluster, requests)
    check_conservation(result, requests)
    assert all(one.is_served for one in result.outcomes), [one.error for one in result.outcomes if one.error]
    assert result.max_feature_bytes <= cluster.inbox_bytes


@settings(max_examples=15, deadline=None)
@given(clusters, st.integers(0, 1000), st.integers(300, 3000))
def test_requests_that_wait_for_room_are_served_and_those_without_any_are_refused_before_they_cost_something(
    cluster: ClusterSettings, seed: int, num_tokens: int
) -> None:
    """The KV pools hold a few prompts each, and some prompts are larger than a pool. Reports are fresh: a router
    without any takes a worker for large enough."""
    cluster = replace(cluster, num_blocks=-(-num_tokens // cluster.block_size), report_delay_s=0.0)
    requests = small_workload(25, 30.0, seed)
    result = run(cluster, requests)
    assert [one.index for one in result.outcomes] == [one.index for one in requests]
    assert result.max_feature_bytes <= cluster.inbox_bytes
    room = cluster.num_blocks * cluster.block_size
    for outcome in result.outcomes:
        if -(-outcome.num_prompt // cluster.block_size) > cluster.num_blocks:
            assert (outcome.error, outcome.num_attempts) == ("context_length_exceeded", 0)
            assert not outcome.encoder_ids
        elif outcome.num_prompt + outcome.num_output < room:
            assert outcome.is_served, outcome
            assert outcome.num_tokens == outcome.num_output


@settings(max_examples=10, deadline=None)
@given(clusters, faults, st.integers(0, 1000))
def test_faults_lose_no_request_silently(cluster: ClusterSettings, wrong: list[MemberFault], seed: int) -> None:
    cluster = replace(cluster, faults=tuple(wrong), num_workers=max(2, cluster.num_workers), num_encoders=2)
    requests = small_workload(25, 12.0, seed)
    result = run(cluster, requests)
    check_conservation(result, requests)
    assert all(one.is_served for one in result.outcomes), [one.error for one in result.outcomes if one.error]


@settings(max_examples=10, deadline=None)
@given(clusters, faults, st.integers(0, 1000))
def test_stretches_change_nothing(cluster: ClusterSettings, wrong: list[MemberFault], seed: int) -> None:
    cluster = replace(cluster, faults=tuple(wrong), num_workers=max(2, cluster.num_workers), num_encoders=2)
    requests = small_workload(20, 12.0, seed)
    fast, single = run(cluster, requests), run(replace(cluster, is_fast=False), requests)
    assert fast.outcomes == single.outcomes
    assert (fast.num_steps, fast.worker_busy) == (single.num_steps, single.worker_busy)
    # A step that runs when its worker dies was planned and does not count.
    assert fast.num_planned <= single.num_planned <= single.num_steps + 1


@pytest.mark.parametrize("policy", ["joint", "least-loaded"])
def test_two_thousand_requests_are_served_alike_step_by_step(policy: str) -> None:
    """2,000 requests are the number for which the equality was asked."""
    cluster = small_cluster(num_workers=6, num_encoders=2, policy=policy, num_routers=2, block_size=32)
    requests = small_workload(2000 if policy == "joint" else 300, 60.0, 5, mean_turns=1.3, think_s=1.0)
    fast, single = run(cluster, requests), run(replace(cluster, is_fast=False), requests)
    assert fast.outcomes == single.outcomes
    assert fast.num_steps == single.num_steps
    assert fast.num_planned < 0.7 * single.num_planned, "the test has hardly any stretch"


def test_a_run_depends_on_its_seed_alone() -> None:
    cluster, requests = small_cluster(policy="random"), small_workload(60)
    assert run(cluster, requests).outcomes == run(cluster, requests).outcomes
    assert run(replace(cluster, seed=9), requests).outcomes != run(cluster, requests).outcomes


def test_more_load_and_slower_members_never_help() -> None:
    requests = small_workload(150, 6.0, 3, shared_media=0.0)
    crowded = [replace(one, arrival_s=one.arrival_s / 6) for one in requests]

    def mean_s(cluster: ClusterSettings, given: list[SimRequest]) -> float:
        return sum(one.first_token_s for one in run(cluster, given).outcomes) / len(given)

    idle, cluster = mean_s(small_cluster(), requests), small_cluster()
    assert mean_s(cluster, crowded) > 1.2 * idle
    assert mean_s(replace(cluster, worker_slowness=(2.0,)), requests) > 1.3 * idle
    assert mean_s(replace(cluster, waits_for_media=True), requests) > idle
    assert mean_s(replace(cluster, num_workers=1), requests) > idle

"""Checks that simulated routers admit requests as those of production do, and that their work takes its time."""

from __future__ import annotations

import pytest
from simulated_requests import TABLE, lone_text, run, small_cluster

from loadtest.simulator.sim_cluster import ClusterSettings, SimCluster, SimResult
from loadtest.simulator.sim_requests import SimRequest

PICTURE_TOKENS = TABLE.kind("image").num_tokens


def picture(index: int, num_text: int, at_s: float = 0.1) -> SimRequest:
    parts = ((1000 * index + 1, num_text), ("image", f"picture-{index}"), (7, 24))
    return SimRequest(index, at_s, "image", parts, 8, (1 << 29) + 1000 * index)


def run_cluster(settings: ClusterSettings, requests: list[SimRequest]) -> tuple[SimCluster, SimResult]:
    cluster = SimCluster(settings)
    return cluster, cluster.run(requests)


def num_items_encoded(cluster: SimCluster) -> int:
    return sum(encoder.pipeline.stats.items for encoder in cluster.encoders.values())


def test_a_prompt_that_no_worker_can_ever_hold_is_refused_before_an_encoder_is_asked() -> None:
    cluster, result = run_cluster(small_cluster(num_blocks=64, block_size=16), [picture(0, 1100), lone_text(1, 100)])
    refused, served = result.outcomes
    assert (refused.error, refused.num_attempts, refused.end_s) == ("context_length_exceeded", 0, 0.0)
    assert served.is_served
    assert all(encoder.busy_s == 0.0 for encoder in cluster.encoders.values())


def test_without_admission_the_worker_refuses_such_a_prompt_after_the_encoder_was_sent_for() -> None:
    settings = small_cluster(num_blocks=64, block_size=16, waits_for_room=False)
    cluster, result = run_cluster(settings, [picture(0, 1100), lone_text(1, 100, at_s=1.0)])
    assert result.outcomes[0].error == "context_length_exceeded"
    assert any(encoder.busy_s > 0.0 for encoder in cluster.encoders.values())


def test_a_feature_that_no_inbox_can_ever_hold_is_refused() -> None:
    cluster, result = run_cluster(small_cluster(inbox_bytes=1 << 20), [picture(0, 100)])
    assert result.outcomes[0].error == "invalid_media"
    assert all(encoder.busy_s == 0.0 for encoder in cluster.encoders.values())


def test_requests_wait_at_the_router_while_no_worker_has_room() -> None:
    """Six prompts of 960 tokens come at once, and two fit into the pool."""
    settings = small_cluster(num_workers=1, num_blocks=128, block_size=16)
    requests = [lone_text(index, 960, num_output=30, at_s=0.5) for index in range(6)]
    _, result = run_cluster(settings, requests)
    assert result.num_waited >= 3
    assert all(one.is_served for one in result.outcomes)
    waiting = run(small_cluster(num_workers=1, num_blocks=128, block_size=16, waits_for_room=False), requests)
    assert waiting.num_waited == 0


def test_a_small_prompt_passes_one_that_has_no_room() -> None:
    settings = small_cluster(num_workers=1, num_blocks=128, block_size=16)
    requests = [lone_text(0, 1200, 200, at_s=0.1), lone_text(1, 1500, 8, at_s=0.4), lone_text(2, 64, 8, at_s=0.5)]
    result = run(settings, requests)
    _, large, small = result.outcomes
    assert all(one.is_served for one in result.outcomes)
    assert small.arrival_s + small.first_token_s < large.arrival_s + large.first_token_s


def test_a_request_that_waits_too_long_for_room_is_refused() -> None:
    """The first answer keeps its blocks for longer than a request waits."""
    settings = small_cluster(num_workers=1, num_blocks=256, block_size=16, worker_slowness=(20.0,))
    result = run(settings, [lone_text(0, 2000, 1500, at_s=0.1), lone_text(1, 3000, 8, at_s=0.2)])
    first, second = result.outcomes
    assert first.is_served
    assert second.error == "overloaded"
    assert second.end_s == pytest.approx(30.0, abs=0.1)


def test_plans_of_one_router_come_one_after_the_other() -> None:
    requests = [lone_text(index, 64, at_s=0.5) for index in range(4)]
    plain = run(small_cluster(num_workers=4), requests)
    slow = run(small_cluster(num_workers=4, router_plan_s=0.25), requests)
    waits = [late.first_token_s - soon.first_token_s for late, soon in zip(slow.outcomes, plain.outcomes, strict=True)]
    assert waits == pytest.approx([0.25, 0.5, 0.75, 1.0], abs=0.03)
    assert slow.router_busy == pytest.approx(1.0 / slow.end_s)
    assert plain.router_busy == 0.0


def test_two_routers_plan_side_by_side() -> None:
    requests = [lone_text(index, 64, at_s=0.5) for index in range(4)]
    one, two = (run(small_cluster(num_workers=4, num_routers=n, router_plan_s=0.25), requests) for n in (1, 2))
    assert max(each.first_token_s for each in two.outcomes) < max(each.first_token_s for each in one.outcomes) - 0.4


def test_messages_take_time_of_the_router() -> None:
    """Reports come 5 times a second from each of 5 members, so 20 ms for each keep a router busy for half the time."""
    result = run(small_cluster(router_message_s=0.02), [lone_text(index, 64, at_s=1.0 + index) for index in range(5)])
    assert all(one.is_served for one in result.outcomes)
    assert 0.4 < result.router_busy < 0.9
    assert min(one.first_token_s for one in result.outcomes) > 0.04, "the request and its first token take 20 ms each"

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from simulated_requests import TABLE, lone_text, run, small_cluster, small_workload

from fabric.contracts import ConfigError, RequestId
from loadtest.simulator.faults import MemberFault, parse_fault
from loadtest.simulator.policies import POLICIES, FixedPolicy, make_policy
from loadtest.simulator.sim_cluster import SimCluster
from loadtest.simulator.sim_requests import SimRequest


def picture(index: int, at_s: float = 0.1, content: str = "") -> SimRequest:
    parts = ((1000 * index, 200), ("image", content or f"picture{index}"))
    return SimRequest(index, at_s, "image", parts, 4, (1 << 29) + 100 * index)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_every_kind(policy: str) -> None:
    result = run(small_cluster(policy=policy), small_workload(30))
    assert result.policy == policy
    assert all(one.is_served for one in result.outcomes)
    assert all(bool(one.encoder_ids) <= bool(one.num_media) for one in result.outcomes)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no policy 'best'; the policies are random"):
        run(small_cluster(policy="best"), [])


def test_round_robin_takes_the_members_in_turn() -> None:
    result = run(small_cluster(policy="round-robin"), [picture(index, 0.1 + 0.3 * index) for index in range(12)])
    assert set(Counter(one.worker_id for one in result.outcomes).values()) == {4}
    assert set(Counter(one.encoder_ids[0] for one in result.outcomes).values()) == {6}


def test_least_loaded_spreads_a_burst() -> None:
    burst = [lone_text(index, 400, 50) for index in range(9)]
    result = run(small_cluster(policy="least-loaded"), burst)
    assert set(Counter(one.worker_id for one in result.outcomes).values()) == {3}


def test_kv_only_goes_where_the_prefix_is() -> None:
    requests = [lone_text(index, 2000, 2, 0.1 + 2.0 * index, first=5000 * (index % 3)) for index in range(9)]
    outcomes = run(small_cluster(policy="kv-only"), requests).outcomes
    for one in outcomes[3:]:
        assert one.worker_id == outcomes[one.index % 3].worker_id
        assert one.num_cached > 1900


def test_the_fixed_policy_follows_its_assignment() -> None:
    cluster = small_cluster()
    workers = [cluster.member("worker", index).member_id for index in range(3)]
    encoders = [cluster.member("encoder", index).member_id for index in range(2)]
    wanted = {RequestId(f"r{index}"): (workers[index % 3], (encoders[index % 2],)) for index in range(6)}
    result = SimCluster(cluster, lambda _: FixedPolicy(wanted)).run([picture(index) for index in range(6)])
    chosen = {RequestId(f"r{one.index}"): (one.worker_id, tuple(one.encoder_ids)) for one in result.outcomes}
    assert chosen == wanted


def test_the_joint_plan_avoids_a_slow_encoder() -> None:
    cluster = small_cluster(encoder_slowness=(1.0, 20.0))
    outcomes = run(cluster, [picture(index, 0.2 + 0.3 * index) for index in range(12)]).outcomes
    assert Counter(one.encoder_ids[0] for one in outcomes)["encoder-0"] >= 10


def test_a_picture_that_an_encoder_has_is_not_encoded_again() -> None:
    outcomes = run(small_cluster(num_workers=2), [picture(index, 0.1 + index, "same") for index in range(6)]).outcomes
    assert len({encoder_id for one in outcomes for encoder_id in one.encoder_ids}) == 1
    assert outcomes[-1].first_token_s < outcomes[0].first_token_s


def test_text_in_front_of_a_picture_overlaps_with_its_encoding() -> None:
    video = SimRequest(0, 0.1, "video", ((5, 2000), ("video-30f", "v")), 2, 7)
    cluster = small_cluster(num_workers=1)
    overlapped = run(cluster, [video]).outcomes[0].first_token_s
    waiting = run(replace(cluster, waits_for_media=True), [video]).outcomes[0].first_token_s
    encode_s = TABLE.modality_to_encoding["video"].forward_s(7680)
    assert waiting - overlapped > 0.9 * encode_s


# ---------------------------------------------------------------- faults


def test_a_request_goes_on_elsewhere_when_its_worker_dies() -> None:
    cluster = small_cluster(num_workers=2, faults=(MemberFault("death", "worker-0", 1.0),))
    requests = [lone_text(index, 300, 200) for index in range(6)]
    outcomes = run(cluster, requests).outcomes
    assert all(one.is_served and one.num_tokens == 200 for one in outcomes)
    moved = [one for one in outcomes if one.num_attempts == 2]
    assert moved
    assert all(one.worker_id == "worker-1" for one in moved)
    assert {one.num_attempts for one in outcomes} == {1, 2}


def test_an_item_goes_to_another_encoder_when_its_encoder_dies() -> None:
    videos = [
        SimRequest(index, 0.1, "video", ((9 * index, 50), ("video-120f", f"v{index}")), 4, 100) for index in range(6)
    ]
    cluster = small_cluster(faults=(MemberFault("death", "encoder-0", 0.35),))
    outcomes = run(cluster, videos).outcomes
    assert all(one.is_served and one.num_attempts == 1 for one in outcomes)
    assert all("encoder-1" in one.encoder_ids for one in outcomes)


def test_requests_fail_when_no_member_is_left_for_them() -> None:
    cluster = small_cluster(num_workers=1, faults=(MemberFault("death", "worker-0", 0.2),))
    outcomes = run(cluster, [lone_text(0, 300, 400), lone_text(1, 300, 400, 5.0)]).outcomes
    assert [one.error for one in outcomes] == ["no_capacity", "no_capacity"]
    assert outcomes[1].end_s == pytest.approx(30.0, abs=0.1)


def test_a_slow_member_recovers() -> None:
    cluster = small_cluster(num_workers=1, faults=(MemberFault("slow", "worker-0", 1.0, 10.0, 3.0),))
    times = [one.first_token_s for one in run(cluster, [lone_text(i, 500, 1, 0.5 + i) for i in range(5)]).outcomes]
    assert times[1] > 5 * times[0]
    assert times[4] == pytest.approx(times[0], rel=0.05)


def test_faults_are_parsed() -> None:
    assert parse_fault("death:worker-3@10") == MemberFault("death", "worker-3", 10.0)
    assert parse_fault("slow:encoder-0@5-20x4") == MemberFault("slow", "encoder-0", 5.0, 4.0, 20.0)
    for wrong in ("death:worker-3", "slow:worker-1@5", "flood:worker-1@5"):
        with pytest.raises(ConfigError, match="is no fault"):
            parse_fault(wrong)
    with pytest.raises(ConfigError, match="the cluster has no member 'worker-9'"):
        run(small_cluster(faults=(MemberFault("death", "worker-9", 1.0),)), [])


def test_make_policy_gives_each_router_its_own() -> None:
    import random

    assert make_policy("joint", random.Random(0), 16) is not make_policy("joint", random.Random(0), 16)

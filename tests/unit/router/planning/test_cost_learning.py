"""Tests what `Learning` makes of results and reports: the costs of links that pulls share, the believed costs of all
members at once, and what it keeps for another run."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_samples import encoder_member, encoder_report, worker_member, worker_report

from fabric.contracts import EncodeCost, Member, MemberPlace, PullTime, PullWindow
from router.planning.cost_learning import REFRESH_S, WORKER_STAGES, Learning, LinkCost
from router.planning.link_classes import LINK_CLASSES, LinkClass
from router.planning.member_costs import GENERAL, ZERO, CostDefaults
from router.planning.plan_types import Line
from router.planning.saved_costs import CostKey, SavedCosts, SeenLine, decode_costs, encode_costs

TRUTH = Line(4e-4, 1 / 8e9)
MIB = 2**20


def learning(**settings: object) -> Learning:
    return Learning(CostDefaults(), 6144.0, **settings)


def on(hardware: str, member: Member) -> Member:
    return Member(
        member.member_id, member.kind, member.address, member.host, 1, member.modalities, place=MemberPlace(hardware)
    )


# ------------------------------------------------------------ links


def shared_window(rng: random.Random, num_pulls: int, pause_s: float = 0.0) -> PullWindow:
    """Returns a window of pulls on one link that they share equally: processor sharing of the bytes, after a latency
    that they do not share."""
    left = {number: rng.choice([0.25, 1, 4, 16]) * MIB for number in range(num_pulls)}
    sizes = dict(left)
    starts = {number: 0.0 if number == 0 else rng.uniform(0.0, 1e-4) for number in left}
    begins = {number: start + TRUTH.base_s for number, start in starts.items()}
    ends: dict[int, float] = {}
    now = 0.0
    while left:
        active = [number for number in left if begins[number] <= now]
        waiting = [begins[number] for number in left if begins[number] > now]
        if not active:
            now = min(waiting)
            continue
        step = min(left[number] for number in active) * len(active) * TRUTH.per_unit_s
        until = min([now + step, *waiting])
        moved = (until - now) / TRUTH.per_unit_s / len(active)
        for number in active:
            left[number] -= moved
            if left[number] < 1e-3:
                ends[number] = until + (pause_s if number == 0 else 0.0)
                del left[number]
        now = until
    noise = rng.uniform(0.95, 1.05)
    return PullWindow(
        tuple(PullTime("e0", int(sizes[number]), starts[number], ends[number] * noise) for number in sorted(ends))
    )


def taught_by_pulls(num_pulls: int, share_of_pauses: float = 0.0) -> Line:
    rng, subject = random.Random(num_pulls), learning()
    subject.new_worker(worker_member("w0", "h-1"))
    subject.new_encoder(encoder_member("e0", "h-2"))
    for seq in range(300):
        pause_s = rng.uniform(0.5, 5.0) if rng.random() < share_of_pauses else 0.0
        window = shared_window(rng, num_pulls, pause_s)
        subject.observe_report(worker_report("w0", seq, pulls=(window,)), 0.1 * seq)
    return subject.links()[LinkClass.TCP]


@pytest.mark.parametrize("num_pulls", [1, 4, 8])
@pytest.mark.parametrize("share_of_pauses", [0.0, 0.05])
def test_a_shared_link_is_learned_whatever_runs_side_by_side(num_pulls: int, share_of_pauses: float) -> None:
    line = taught_by_pulls(num_pulls, share_of_pauses)
    assert line.per_unit_s == pytest.approx(TRUTH.per_unit_s, rel=0.1)
    for num_bytes in (MIB, 16 * MIB):
        assert line.at(num_bytes) == pytest.approx(TRUTH.at(num_bytes), rel=0.15)


def test_pulls_alone_show_the_latency() -> None:
    assert taught_by_pulls(1).base_s == pytest.approx(TRUTH.base_s, rel=0.25)


@settings(deadline=None, max_examples=100)
@given(
    st.builds(Line, st.floats(0.0, 1.0), st.floats(0.0, 1e-6)),
    st.lists(st.tuples(st.integers(0, 2**40), st.floats(0.0, 1e4), st.floats(0.0, 1e5)), max_size=30),
)
def test_a_link_always_has_a_cost_that_is_positive_and_finite(
    start: Line, observations: list[tuple[int, float, float]]
) -> None:
    cost = LinkCost(start)
    for num_bytes, seconds, now in observations:
        cost.observe(num_bytes, seconds, now)
        assert 0.0 < cost.line.base_s < float("inf")
        assert 0.0 < cost.line.per_unit_s < float("inf")


def test_one_size_only_keeps_the_proportion_and_predicts_that_size() -> None:
    cost = LinkCost(TRUTH)
    for number in range(60):
        cost.observe(MIB, 3.0 * TRUTH.at(MIB), float(number))
    assert cost.line == pytest.approx(Line(3.0 * TRUTH.base_s, 3.0 * TRUTH.per_unit_s), rel=0.02)


def test_a_link_that_has_changed_is_known_after_a_few_observations() -> None:
    cost, rng = LinkCost(TRUTH), random.Random(0)
    sizes = [rng.choice([0.25, 1, 4, 16]) * MIB for _ in range(220)]
    for number, num_bytes in enumerate(sizes):
        factor = 1.0 if number < 200 else 4.0
        cost.observe(int(num_bytes), factor * TRUTH.at(num_bytes) * rng.uniform(0.95, 1.05), 0.1 * number)
    assert cost.line.at(4 * MIB) == pytest.approx(4.0 * TRUTH.at(4 * MIB), rel=0.1)


def test_a_window_over_links_of_two_classes_teaches_each_by_its_own_busy_time() -> None:
    subject = learning()
    subject.new_worker(worker_member("w0", "h-1"))
    subject.new_encoder(encoder_member("near", "h-1"))
    subject.new_encoder(encoder_member("far", "h-2"))
    pulls = (PullTime("near", 8 * MIB, 0.0, 0.01), PullTime("far", 8 * MIB, 0.005, 0.205))
    for seq in range(60):
        subject.observe_report(worker_report("w0", seq, pulls=(PullWindow(pulls),)), 0.1 * seq)
    links = subject.links()
    assert links[LinkClass.SAME_HOST].at(8 * MIB) == pytest.approx(0.01, rel=0.05)
    assert links[LinkClass.TCP].at(8 * MIB) == pytest.approx(0.2, rel=0.05)
    assert links[LinkClass.RDMA] == CostDefaults().rdma


def test_pulls_from_an_encoder_that_has_left_and_pauses_between_pulls_teach_nothing_wrong() -> None:
    subject = learning()
    subject.new_worker(worker_member("w0", "h-1"))
    far = encoder_member("far", "h-2")
    subject.new_encoder(far)
    apart = (PullTime("far", 8 * MIB, 0.0, 0.1), PullTime("far", 8 * MIB, 5.0, 5.1))
    for seq in range(60):
        subject.observe_report(worker_report("w0", seq, pulls=(PullWindow(apart),)), 0.1 * seq)
    before = subject.links()
    assert before[LinkClass.TCP].at(8 * MIB) == pytest.approx(0.1, rel=0.05)
    subject.forget(far)
    subject.observe_report(worker_report("w0", 99, pulls=(PullWindow((PullTime("far", MIB, 0.0, 9.0),)),)), 9.0)
    subject.observe_report(worker_report("unknown", 99, pulls=(PullWindow(apart),)), 9.0)
    assert subject.links() == before


# ------------------------------------------------------------ what is believed


def test_believed_costs_are_those_of_each_member_by_row() -> None:
    subject = learning()
    workers = [subject.new_worker(worker_member(f"w{number}")) for number in range(3)]
    encoder = subject.new_encoder(encoder_member("e0", modalities=("image", "audio")))
    for number, state in enumerate(workers):
        state.take(worker_report(f"w{number}", 1, prefill_s_per_token=10.0**-number, step_overhead_s=0.5), 0.0)
    encoder.take(encoder_report("e0", 1, encode_s_per_cost=1e-3, costs=(EncodeCost("audio", 1e-4, 0.2),)), 0.0)
    assert subject.refresh(1.0)
    costs = subject.believed
    for state in workers:
        row = subject.worker_row(state.member.member_id)
        assert costs.workers[WORKER_STAGES.index("prefill"), :, row] == pytest.approx(state.prefill.line)
    row = subject.encoder_row(encoder.member.member_id)
    assert costs.encoders[subject.modality_row("audio"), 4:, row] == pytest.approx((0.2, 1e-4))
    assert costs.encoders[subject.modality_row(GENERAL), 5, row] == pytest.approx(1e-3)
    assert costs.encoders[subject.modality_row("audio"), :2, row] == pytest.approx(CostDefaults().decode)
    assert costs.links.shape == (len(LINK_CLASSES), 2)


def test_a_modality_that_no_encoder_has_met_costs_what_the_encoder_costs_in_general() -> None:
    subject = learning()
    encoder = subject.new_encoder(encoder_member("e0"))
    for number in range(40):
        encoder.cost.observe_decode(GENERAL, 100, 0.7, float(number))
    video = subject.modality_row("video")
    subject.refresh(40.0)
    costs = subject.believed.encoders[:, :, subject.encoder_row(encoder.member.member_id)]
    assert costs[video] == pytest.approx(costs[0])
    assert costs[video, 0] + 100 * costs[video, 1] == pytest.approx(0.7, rel=0.05)


def test_believed_costs_are_computed_again_some_time_after_a_change_and_when_members_change() -> None:
    subject = learning()
    state = subject.new_worker(worker_member("w0"))
    assert subject.refresh(0.0)
    first, version = subject.believed, subject.version
    assert not subject.refresh(1e6), "nothing has changed"
    state.prefill.observe(1000, 7.0, 0.1)
    assert subject.version > version
    assert not subject.refresh(0.9 * REFRESH_S)
    assert subject.believed is first
    assert subject.refresh(REFRESH_S)
    assert subject.believed.workers[0, :, 0] == pytest.approx(state.prefill.line)
    now = REFRESH_S
    other = worker_member("w1")
    subject.new_worker(other)
    assert subject.refresh(now + REFRESH_S)
    assert subject.believed.workers.shape[2] == 2
    subject.forget(other)
    assert subject.refresh(now + REFRESH_S)
    assert np.isnan(subject.believed.workers[:, :, 1]).all()


def test_members_on_other_hardware_do_not_make_a_member_look_like_them() -> None:
    subject = learning()
    fast = [subject.new_worker(on("fast", worker_member(f"f{number}"))) for number in range(3)]
    slow = subject.new_worker(on("slow", worker_member("s")))
    for state, per_token_s in [*((state, 1e-4) for state in fast), (slow, 1e-2)]:
        state.take(worker_report(state.member.member_id, 1, prefill_s_per_token=per_token_s, step_overhead_s=0.1), 0.0)
    subject.refresh(1000.0)
    assert subject.believed.workers[0, 1, subject.worker_row(slow.member.member_id)] == pytest.approx(1e-2)


def test_fetching_costs_nothing_until_a_fetch_was_seen() -> None:
    subject = learning()
    subject.refresh(0.0)
    assert subject.believed.fetch == ZERO
    for number in range(60):
        subject.observe_fetch(MIB * (1 + number % 4), 0.05 + 0.1 * (1 + number % 4), float(number))
    subject.refresh(60.0)
    assert subject.believed.fetch.at(2 * MIB) == pytest.approx(0.25, rel=0.1)
    again = learning(saved=subject.saved(60.0, 1.79e9))
    again.refresh(0.0)
    assert again.believed.fetch == subject.believed.fetch


# ------------------------------------------------------------ another run


def test_another_run_begins_with_what_this_one_has_learned() -> None:
    first = learning()
    worker = first.new_worker(on("cpu", worker_member("w0", "h-1")))
    encoder = first.new_encoder(on("cpu", encoder_member("e0", "h-2")))
    for number in range(60):
        worker.prefill.observe(1000, 4.0, float(number))
        encoder.cost.observe_decode("image", 256, 0.5, float(number))
        pulls = (PullTime("e0", 8 * MIB, 0.0, 0.1),)
        first.observe_report(worker_report("w0", number, pulls=(PullWindow(pulls),)), float(number))
    saved = first.saved(100.0, 1.79e9)
    assert saved.key_to_line[CostKey("worker", "cpu", "", "prefill")].seen_at_s == pytest.approx(1.79e9 - 41)
    assert CostKey("worker", "cpu", "", "delivery") not in saved.key_to_line, "a default is nothing that was learned"
    second = learning(saved=decode_costs(encode_costs(saved, "m"), "m", 1.79e9))
    again = second.new_worker(on("cpu", worker_member("w9")))
    assert again.prefill.line.at(1000) == pytest.approx(4.0, rel=0.01)
    assert 0.4 < again.prefill.weight < 0.5
    assert second.new_worker(on("gpu", worker_member("w8"))).prefill.line == CostDefaults().prefill
    assert second.new_encoder(on("cpu", encoder_member("e9"))).cost.of(GENERAL).decode.at(256) == pytest.approx(
        0.5, rel=0.1
    )
    assert second.links()[LinkClass.TCP].at(8 * MIB) == pytest.approx(0.1, rel=0.05)
    assert second.links()[LinkClass.RDMA] == CostDefaults().rdma
    assert second.saved(0.0, 1.79e9 + 10).key_to_line == saved.key_to_line, "what is not seen again stays"


def test_an_observation_of_this_run_counts_more_than_a_saved_line() -> None:
    saved = SavedCosts({CostKey("worker", "", "", "prefill"): SeenLine(Line(0.1, 1e-2), 0.0)}, {}, 0.0)
    state = learning(saved=saved).new_worker(worker_member("w0"))
    state.prefill.observe(100, 0.4, 0.0)
    assert abs(state.prefill.line.at(100) - 0.4) < abs(state.prefill.line.at(100) - 1.1)

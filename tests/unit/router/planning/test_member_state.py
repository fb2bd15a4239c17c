"""Tests what dispatched attempts count until reports contain them, and until they end: load, features and prompts on
their way, and tokens that wait for features."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec
import pytest
from planning_clusters import blocks_of, cluster_of, knows_prompt, route
from planning_samples import BLOCK_SIZE, SCHEME, SHAPE, encoder_report, image, query, views_of, worker_report

from fabric.contracts import (
    EMPTY_PROFILE,
    EncodeResult,
    ItemResult,
    MediaItem,
    MmHash,
    StageTimes,
    add_work,
    context_scale_tokens,
    weighted_tokens,
)
from router.planning import ClusterState
from router.planning.member_columns import MAX_AWAITED


@pytest.mark.parametrize("num_tokens", [1, 40, 3000])
def test_a_burst_without_any_report_spreads_evenly(num_tokens: int) -> None:
    state = cluster_of(num_workers=4, num_encoders=2)
    chosen = Counter(route(state, query(num_tokens, attempt=f"r{number}")).worker_id for number in range(100))
    assert set(chosen.values()) == {25}
    state.check_invariants()


def test_a_burst_onto_equal_reported_load_spreads_evenly() -> None:
    state = cluster_of(num_workers=4)
    for number in range(4):
        state.apply(worker_report(f"w{number}", 1, queued_tokens=5000, num_decoding=7, prefill_s_per_token=1e-3), 0.0)
    chosen = Counter(route(state, query(100, attempt=f"r{number}")).worker_id for number in range(100))
    assert max(chosen.values()) - min(chosen.values()) <= 1


def test_a_burst_of_images_spreads_over_encoders_too() -> None:
    state = cluster_of(num_workers=2, num_encoders=4)

    def picture(number: int) -> MediaItem:
        return msgspec.structs.replace(image(0), mm_hash=MmHash(format(number, "032x")))

    plans = [route(state, query(picture(number), 10, attempt=f"r{number}")) for number in range(40)]
    chosen = Counter(plan.assignments[0].encoder_id for plan in plans)
    assert max(chosen.values()) - min(chosen.values()) <= 1


def test_requests_with_one_new_picture_share_its_flight() -> None:
    """The first request is encoding the picture; the others wait for the same feature, which costs no encoding."""
    state = cluster_of(num_workers=2, num_encoders=4)
    plans = [route(state, query(image(0), 10, attempt=f"r{number}"), 1e-3 * number) for number in range(4)]
    (first, *others) = [plan.explanation.winner.items[0] for plan in plans]
    assert {item.encoder_id for item in others} == {first.encoder_id}
    assert [item.load for item in (first, *others)] == [256, 0, 0, 0]
    done_s = first.landing_s - first.transfer_s
    assert [item.wait_s for item in others] == pytest.approx([done_s - 1e-3 * number for number in (1, 2, 3)])
    for number in range(4):
        state.note_ended((f"r{number}", 0), 1.0)
    state.check_invariants()
    assert route(state, query(image(0), 10, attempt="later"), 1.0).explanation.winner.items[0].load == 256


def test_a_flight_lives_on_while_another_request_waits_for_its_feature() -> None:
    state = cluster_of(num_workers=2, num_encoders=4)
    first, second = (route(state, query(image(0), 10, attempt=f"r{number}"), 1e-3 * number) for number in range(2))
    state.note_ended(first.attempt_id, 2e-3)
    third = route(state, query(image(0), 10, attempt="r2"), 2e-3)
    assert {plan.assignments for plan in (first, second, third)} == {first.assignments}
    assert third.explanation.winner.items[0].load == 0
    for plan in (second, third):
        state.note_ended(plan.attempt_id, 1.0)
    state.check_invariants()
    assert route(state, query(image(0), 10, attempt="later"), 1.0).explanation.winner.items[0].load == 256


def test_an_encoding_that_failed_leaves_no_load_and_no_flight_to_wait_for() -> None:
    state = cluster_of(num_encoders=2)
    first = route(state, query(image(0), 10, attempt="r0"), 0.0)
    (failed,) = (each.encoder_id for each in first.assignments)
    state.note_encoding_ended(first.attempt_id, failed, 0.0)
    state.note_encoding_ended(first.attempt_id, failed, 0.0)
    state.check_invariants()
    assert [seen.queued_s for seen in views_of(state, query(10), 0.0).encoders] == [0.0, 0.0]
    assert route(state, query(image(0), 10, attempt="r1"), 1.0).explanation.winner.items[0].load == 256


def test_a_flight_that_is_late_is_not_taken_for_one_that_has_landed() -> None:
    state = cluster_of(num_workers=2, num_encoders=4)
    first = route(state, query(image(0), 10, attempt="first"), 0.0).explanation.winner.items[0]
    done_s = first.landing_s - first.transfer_s
    (soon,) = route(state, query(image(0), 10, attempt="soon"), 1.1 * done_s).explanation.winner.items
    assert (soon.encoder_id, soon.wait_s) == (first.encoder_id, pytest.approx(0.1 * done_s))
    (late,) = route(state, query(image(0), 10, attempt="late"), 5.0 * done_s).explanation.winner.items
    assert late.encoder_id != first.encoder_id, "to encode it again takes less than the feature is late"


def test_requests_with_one_new_prompt_go_to_the_worker_that_computes_it_where_that_is_faster() -> None:
    """Its steps have room for 512 tokens, so the prompt takes many steps, and all but the last are cached in time. The
    others would have to compute the whole prompt behind a queue of their own."""
    for queued, num_chosen in ((1500, 1), (0, 4)):
        state = cluster_of(num_workers=4)
        costs = {"prefill_s_per_token": 1e-3, "step_overhead_s": 1e-3, "max_step_tokens": 512}
        for number in range(4):
            state.apply(worker_report(f"w{number}", 1, queued_tokens=queued if number else 0, **costs), 0.0)
        plans = [route(state, query(4000, attempt=f"r{number}"), 1e-3 * number) for number in range(4)]
        assert len({plan.worker_id for plan in plans}) == num_chosen
        assert plans[0].explanation.winner.covered_tokens == 0
        assert all((plan.explanation.winner.covered_tokens >= 3000) == (queued > 0) for plan in plans[1:])


def test_acknowledged_attempts_are_not_counted_twice_and_ended_ones_not_at_all() -> None:
    state = cluster_of()
    request = query(100)
    route(state, request)
    state.apply(worker_report("w0", 1, queued_tokens=0), 0.0)
    (view,) = views_of(state, request, 0.0).workers
    assert (view.queued_tokens, view.pending_tokens, view.num_pending) == (0, pytest.approx(100, abs=1), 1)
    state.apply(worker_report("w0", 2, queued_tokens=90, acknowledged=(request.attempt_id,)), 0.0)
    (view,) = views_of(state, request, 0.0).workers
    assert (view.queued_tokens, view.pending_tokens, view.num_pending, view.num_open) == (90, 0, 0, 1)
    state.note_ended(request.attempt_id, 0.0)
    state.note_ended(request.attempt_id, 0.0)
    assert views_of(state, request, 0.0).workers[0].num_open == 0
    state.check_invariants()


def test_items_encoded_again_add_to_the_load_of_their_encoder() -> None:
    state = cluster_of(num_encoders=1)
    request = query(image(0), image(1), 10)
    plan = route(state, request)
    profile = [*EMPTY_PROFILE]
    add_work(profile, 0.5, 0.1)
    report = encoder_report("e0", 1, queue_profile=tuple(profile), acknowledged=(request.attempt_id,))
    state.apply(report, 0.0)
    again = state.plan_encoding(request, plan.worker_id, [1], 0.0)
    state.note_encoding(request.attempt_id, again)
    (item,) = again
    assert item.encode_s > 0.0
    (seen,) = views_of(state, request, 0.0).encoders
    assert seen.queued_s == pytest.approx(0.5 + item.encode_s)
    assert seen.decode_queue_s == pytest.approx(item.decode_s)
    state.check_invariants()
    state.note_ended(request.attempt_id, 0.0)
    assert views_of(state, request, 0.0).encoders[0].queued_s == pytest.approx(0.5)


def test_an_encoder_that_delivered_is_free_before_the_attempt_ends() -> None:
    state = cluster_of(num_encoders=1)
    request = query(image(0), 10)
    plan = route(state, request)
    assert views_of(state, request, 0.0).encoders[0].queued_s == pytest.approx(
        plan.explanation.winner.items[0].encode_s
    )
    state.observe_encode(plan, EncodeResult("e0", (ItemResult(0, StageTimes(encode_s=0.1)),)), 0.0)
    assert views_of(state, request, 0.0).encoders[0].queued_s == 0.0
    assert views_of(state, request, 0.0).workers[0].num_open == 1


def awaited_at(state: ClusterState, now: float) -> list[tuple[float, float]]:
    """Returns when tokens that wait for features become computable on the one worker, from `now`, and how many."""
    workers = state.columns(now).workers
    num = int(workers.num_awaited[0])
    moments, tokens = workers.awaited[:num, 0] - now, workers.awaited[MAX_AWAITED : MAX_AWAITED + num, 0]
    return [(round(at_s, 9), round(each, 6)) for at_s, each in zip(moments.tolist(), tokens.tolist(), strict=True)]


def video(index: int, num_units: int, digit: str) -> MediaItem:
    return msgspec.structs.replace(image(index, cost=1000, digit=digit), unit_tokens=(50,) * num_units)


def test_tokens_behind_features_are_ahead_of_others_when_their_features_land() -> None:
    state = cluster_of(num_encoders=1)
    request = query(100, video(0, 2, "a"), 30)
    plan = route(state, request, 10.0)
    (item,) = plan.explanation.winner.items
    scale = context_scale_tokens(SHAPE.hidden_size)
    first, second = weighted_tokens(50, 100, scale), weighted_tokens(80, 150, scale)
    halfway_s = item.landing_s - item.encode_s / 2
    expected = [
        (pytest.approx(halfway_s), pytest.approx(first)),
        (pytest.approx(item.landing_s), pytest.approx(second)),
    ]
    assert awaited_at(state, 10.0) == expected
    (view,) = views_of(state, query(10), 10.0).workers
    assert view.pending_tokens == pytest.approx(weighted_tokens(100, 0, scale)), "the rest can't be computed yet"
    state.apply(worker_report("w0", 1, acknowledged=(request.attempt_id,), behind_weighted_tokens=first + second), 10.0)
    assert awaited_at(state, 10.0) == expected
    state.note_first_token(request.attempt_id, 10.0)
    assert awaited_at(state, 10.0) == []
    state.note_ended(request.attempt_id, 10.0)
    state.check_invariants()


def test_media_that_a_worker_has_are_not_awaited() -> None:
    state = cluster_of(num_encoders=1)
    request = query(5 * BLOCK_SIZE, image(0, digit="a"), 30, image(1, digit="b"), 20)
    knows_prompt(state, "w0", replace(request, scheme_to_hashes={SCHEME: blocks_of(request)[: 16 * 10]}))
    route(state, request)
    assert [num for _, num in awaited_at(state, 0.0)] == [pytest.approx(64 + 20, rel=0.05)]


def test_a_report_says_which_features_have_landed_and_which_are_late() -> None:
    state = cluster_of(num_encoders=1)
    film, picture = query(10, video(0, 4, "a"), attempt="film"), query(10, image(0, digit="b"), attempt="picture")
    route(state, film, 0.0)
    route(state, picture, 0.0)
    before = awaited_at(state, 0.0)
    assert len(before) == 5
    total = sum(num for _, num in before)
    acknowledged = (film.attempt_id, picture.attempt_id)
    first_s, first = before[0]
    state.apply(worker_report("w0", 1, acknowledged=acknowledged, behind_weighted_tokens=total - first), first_s)
    assert awaited_at(state, 0.0) == before[1:], "the first unit has landed in time"
    second_s = min(at_s for at_s, num in before[1:] if num < 60)
    state.apply(worker_report("w0", 2, behind_weighted_tokens=total - first), second_s + 0.01)
    late = awaited_at(state, 0.0)
    of_film = [at_s for at_s, num in late if num < 60]
    assert of_film == pytest.approx([at_s + 0.01 for at_s, num in before[1:] if num < 60]), "all others are as late"
    state.apply(worker_report("w0", 3, behind_weighted_tokens=0.0), second_s + 0.02)
    assert awaited_at(state, 0.0) == []
    state.check_invariants()


def test_a_report_says_nothing_of_features_of_requests_that_it_does_not_contain() -> None:
    state = cluster_of(num_encoders=1)
    route(state, query(10, image(0), 10))
    before = awaited_at(state, 0.0)
    state.apply(worker_report("w0", 1, behind_weighted_tokens=0.0), 99.0)
    assert awaited_at(state, 0.0) == before != []

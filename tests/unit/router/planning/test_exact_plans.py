"""Tests each number of a plan and of what is learned from it by name, as a trace shows it and `/metrics` sums it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from planning_samples import (
    BLOCK_SIZE,
    DECODE,
    ENCODE,
    LINK,
    NO_COST,
    PREFILL,
    ROW_BYTES,
    SHAPE,
    encoder,
    encoder_member,
    encoder_report,
    image,
    plan_encoding,
    plan_route,
    query,
    snapshot,
    views_of,
    worker,
    worker_member,
    worker_report,
)

from fabric.contracts import (
    AttemptId,
    EncodeCost,
    EncodeResult,
    FeatureEvents,
    GenerateResult,
    ItemResult,
    MediaItem,
    MemberId,
    NoCapacity,
    QueuedCalls,
    RequestId,
    StageTimes,
    queue_profile,
)
from router.planning import ClusterState
from router.planning.link_classes import LinkClass
from router.planning.member_columns import MAX_SILENCE_S, SPARE_KV_S
from router.planning.member_costs import GENERAL, EncoderCost, LearnedLine
from router.planning.plan_types import EncoderCosts, ItemTerms, Line
from router.planning.report_age import Freshness

NOTHING = (0.0,) * 5
HEARD = frozenset({"audio"})
HERE, THERE = Line(0.001, 1e-9), Line(0.1, 1e-7)
"""These are the lines of the links to two encoders."""


NOW_S = 100.0


def cluster() -> ClusterState:
    """Returns a state with one worker and one encoder."""
    state = ClusterState(SHAPE, BLOCK_SIZE, random.Random(3))
    state.update_members([worker_member("w0"), encoder_member("e0")])
    return state


def landed(*items: MediaItem, **encoders: dict[str, Any]) -> tuple[ItemTerms, ...]:
    """Returns the terms of the items for a worker on host h-0, over the link `HERE` to encoders there."""
    views = [encoder(name, **changes) for name, changes in encoders.items()]
    links = dict.fromkeys(LinkClass, THERE) | {LinkClass.SAME_HOST: HERE}
    seen = snapshot([worker("w")], views, links=links)
    return plan_encoding(query(*items, 10), "w", [item.index for item in items], seen)


def test_terms_of_an_item_that_is_encoded() -> None:
    item = image(0, num_tokens=64, cost=256)
    (terms,) = landed(item, near={"queued_cost": 100})
    queued_s, prepared_s = ENCODE.at(100), DECODE.at(256)
    assert queued_s > prepared_s
    transfer_s = HERE.at(64 * ROW_BYTES)
    assert terms == ItemTerms(
        item_index=0,
        mm_hash=item.mm_hash,
        encoder_id="near",
        is_cached=False,
        wait_s=pytest.approx(queued_s),
        decode_wait_s=0.0,
        decode_s=pytest.approx(prepared_s),
        device_prepare_s=0.0,
        encode_s=pytest.approx(ENCODE.at(256)),
        transfer_s=pytest.approx(transfer_s),
        landing_s=pytest.approx(queued_s + ENCODE.at(256) + transfer_s),
        cost=256,
        num_bytes=64 * ROW_BYTES,
        modality="image",
    )
    assert terms.load == 256


def test_terms_of_an_item_that_an_encoder_holds() -> None:
    item = image(3, num_tokens=64, cost=256, modality="audio")
    (terms,) = landed(item, near={"cached": frozenset({item.mm_hash}), "queued_cost": 10_000, "modalities": HEARD})
    transfer_s = pytest.approx(HERE.at(64 * ROW_BYTES))
    assert terms == ItemTerms(
        3, item.mm_hash, "near", True, *NOTHING, transfer_s, transfer_s, 256, 64 * ROW_BYTES, "audio"
    )
    assert terms.load == 0


def test_terms_of_a_medium_that_appears_twice() -> None:
    first, again, other = image(0, digit="a"), image(1, digit="a"), image(2, digit="b")
    one, two, three = landed(first, again, other, near={})
    assert two == ItemTerms(1, first.mm_hash, "near", True, *NOTHING, 0.0, one.landing_s, 256, 0, "image")
    assert (three.item_index, three.mm_hash, three.is_cached) == (2, other.mm_hash, False)
    assert three.encode_s == pytest.approx(ENCODE.per_unit_s * 256), "in a pass that is there already"
    assert three.landing_s == pytest.approx(DECODE.base_s + ENCODE.at(256 + 256) + HERE.at(64 * ROW_BYTES))


def test_an_encoding_planned_later_counts_from_the_workers_own_host() -> None:
    """The worker is fixed by then, and the host of another worker must not decide which link the features take."""
    workers = [worker("w-far", host="h-9"), worker("w", host="h-0")]
    encoders = [encoder("e-far", host="h-9"), encoder("e", host="h-0")]
    seen = snapshot(workers, encoders, links=dict.fromkeys(LinkClass, LINK) | {LinkClass.TCP: THERE})
    request = query(image(0), 10)
    assert [each.encoder_id for each in plan_encoding(request, MemberId("w"), [0], seen)] == ["e"]
    assert [each.encoder_id for each in plan_encoding(request, MemberId("w-far"), [0], seen)] == ["e-far"]


def test_every_stage_is_held_against_what_came() -> None:
    """The predictions are the plan's own terms, and each actual value differs from its prediction by an amount of its
    own."""
    state = cluster()
    plan = state.plan(query(image(0), 100), 0.0)
    winner = plan.explanation.winner
    (item,) = winner.items
    result = GenerateResult(
        MemberId("w0"), (), 164, 32, queue_s=0.5, prefill_s=2.0, held_s=0.25, first_token_s=3.0, trace=()
    )
    state.observe_generate(plan, result, 0.0)
    times = StageTimes(
        queue_s=0.125, decode_s=0.5, preprocess_s=0.25, encode_s=4.0, batch_cost=300, device_prepare_s=0.1
    )
    costs = views_of(state, query(image(0), 100), 0.0).encoders[0].modality_to_costs["image"]
    state.observe_encode(plan, EncodeResult(MemberId("e0"), (ItemResult(0, times),)), 0.0)
    stages = state.accuracy()
    expected = {
        "queue": (winner.queue_s, 0.5),
        "prefill": (winner.prefill_s + winner.first_token_s, 2.0),
        "held": (winner.held_s, 0.25),
        "ttft": (plan.predicted_ttft_s, 3.0 + winner.delivery_s),
        "lower_bound": (plan.lower_bound_s, 3.0 + winner.delivery_s),
        "prefix_tokens": (0.0, 32.0),
        "cached_items": (0.0, 0.0),
        "encoder_wait": (item.wait_s, 0.125),
        "decode": (costs.decode.at(256), 0.65),
        "device_prepare": (0.0, 0.1),
        "encode": (costs.encode.at(300), 4.0),
    }
    assert set(stages) == set(expected)
    for stage, (predicted, actual) in expected.items():
        error = stages[stage]
        assert (error.num_observations, error.actual) == (1, actual), stage
        assert error.predicted == pytest.approx(predicted), stage
        assert error.abs_error == pytest.approx(abs(actual - predicted)), stage


def test_an_item_that_another_encoder_made_says_nothing_of_the_prediction() -> None:
    state = cluster()
    request = query(image(0), 100)
    plan = state.plan(request, 0.0)
    state.update_members([worker_member("w0"), encoder_member("e0"), encoder_member("e1")])
    times = StageTimes(decode_s=0.5, encode_s=4.0, batch_cost=256)
    state.observe_encode(plan, EncodeResult(MemberId("e1"), (ItemResult(0, times),)), 0.0)
    assert state.accuracy() == {}
    found = StageTimes(is_cache_hit=True)
    state.observe_encode(plan, EncodeResult(MemberId("e0"), (ItemResult(0, found),)), 0.0)
    assert set(state.accuracy()) == {"cached_items"}
    assert state.accuracy()["cached_items"].actual == 1.0


def test_small_amounts_teach_too() -> None:
    cost = LearnedLine(Line(0.01, 0.01))
    cost.observe(0.5, 1.0, 0.0)
    assert cost.line.at(0.5) > 0.015


def test_reports_are_taken_in_order() -> None:
    freshness = Freshness()
    assert freshness.accept(1, 1)
    assert not freshness.accept(1, 1)
    assert not freshness.accept(0, 9)
    assert freshness.accept(2, 0)


def test_a_worker_whose_places_are_all_but_taken_is_waited_for_only_when_they_are() -> None:
    for num_running, waits_s in ((7, 0.0), (8, 0.5), (9, 1.0)):
        state = cluster()
        report = worker_report("w0", 1, max_sequences=8, num_running=num_running, residence_s=4.0)
        state.apply(report, 0.0)
        plan = state.plan(query(10), 0.0)
        assert plan.explanation.winner.queue_s == pytest.approx(waits_s)


def test_blocks_dispatched_add_up_until_they_are_reported() -> None:
    state = cluster()
    state.apply(worker_report("w0", 1, kv_blocks_total=100, kv_blocks_used=10), 0.0)
    for number, num_free in enumerate((90, 83, 76)):
        request = query(100, attempt=f"r{number}")
        assert views_of(state, request, 0.0).workers[0].kv_blocks_free == num_free
        plan = state.plan(request, 0.0)
        state.note_dispatched(request, plan, 0.0)
    state.note_ended(AttemptId(RequestId("r0"), 0), 0.0)
    assert views_of(state, query(10), 0.0).workers[0].kv_blocks_free == 76


def test_a_workers_report_becomes_its_view_number_by_number() -> None:
    state = cluster()
    report = worker_report(
        "w0",
        1,
        num_running=9,
        num_waiting=2,
        queued_tokens=500,
        queued_weighted_tokens=650.0,
        num_decoding=7,
        kv_blocks_total=100,
        kv_blocks_used=40,
        prefill_s_per_token=1e-3,
        step_overhead_s=0.01,
        decode_s_per_sequence=2e-4,
        residence_s=4.0,
        max_step_tokens=512,
        max_sequences=8,
    )
    state.apply(report, 10.0)
    (view,) = views_of(state, query(10), 12.5).workers
    assert view.worker_id == "w0"
    assert (view.covered_blocks, view.queued_tokens, view.num_decoding, view.num_open) == (0, 650.0, 7, 0)
    assert view.kv_blocks_free == pytest.approx(60 - 500 / BLOCK_SIZE - 7 - SPARE_KV_S * 40 / 4.0)
    assert view.prefill == pytest.approx(Line(0.01, 1e-3))
    columns = state.columns(12.5).workers
    assert columns.reported_decode_s[0] == pytest.approx(2e-4)
    assert (view.pending_tokens, view.num_pending) == (0.0, 0)
    assert view.report_age_s == 2.5
    assert view.max_step_tokens == 512
    assert (columns.num_there[0], columns.max_sequences[0], columns.residence_s[0]) == (11, 8, 4.0)
    assert columns.kv_blocks_used[0] == 40


@pytest.mark.parametrize(
    ("held_s", "part"), [(0.0, 1.0), (0.1, 1.0), (0.4, 0.5)], ids=["arrived", "within a step", "over two steps"]
)
def test_tokens_behind_missing_features_count_as_far_as_they_join_the_next_step(held_s: float, part: float) -> None:
    state = cluster()
    step = {"prefill_s_per_token": 1e-3, "step_overhead_s": 0.05, "decode_s_per_sequence": 0.01, "num_decoding": 5}
    behind = {"behind_tokens": 2000, "behind_weighted_tokens": 2400.0, "held_s": held_s}
    state.apply(worker_report("w0", 1, queued_tokens=90, queued_weighted_tokens=100.0, **step, **behind), 1.0)
    (view,) = views_of(state, query(10), 1.0).workers
    assert view.queued_tokens == pytest.approx(100.0 + part * 2400.0)


@pytest.mark.parametrize(("changes", "free"), [({"kv_blocks_total": 1}, 1), ({}, None)])
def test_a_pool_of_any_size_is_known_and_one_of_none_is_not(changes: dict[str, Any], free: int | None) -> None:
    state = cluster()
    state.apply(worker_report("w0", 1, **changes), 0.0)
    (view,) = views_of(state, query(10), 0.0).workers
    assert view.kv_blocks_free == free
    assert view.queued_tokens == 0.0


def test_decodes_cost_what_was_reported_where_no_step_has_an_overhead() -> None:
    state = cluster()
    report = worker_report("w0", 1, prefill_s_per_token=1e-3, step_overhead_s=0.0, decode_s_per_sequence=2e-4)
    state.apply(report, 0.0)
    state.apply(
        worker_report(
            "w0", 2, step_overhead_s=0.0, prefill_s_per_token=1e-3, decode_s_per_sequence=2e-4, num_decoding=10
        ),
        0.0,
    )
    assert state.plan(query(10), 0.0).explanation.winner.first_token_s == pytest.approx(10 * 2e-4)


def test_members_are_silent_after_their_time_and_not_at_it() -> None:
    state = cluster()
    state.apply(worker_report("w0", 1), 10.0)
    workers = state.columns(15.0).workers
    assert workers.silence_s(15.0, 5.0) is None
    assert workers.silence_s(15.5, 5.0).tolist() == [0.5]
    assert workers.silence_s(99.0, 5.0).tolist() == [MAX_SILENCE_S]


def waited_s(state: ClusterState) -> float:
    """Returns the wait that the planner predicts at the one encoder."""
    (item,) = state.plan(query(image(0)), 0.0).explanation.winner.items
    return item.wait_s


def test_an_encoders_report_of_an_older_life_is_void() -> None:
    state = cluster()
    state.apply(encoder_report("e0", 5, epoch=2, forward_left_s=0.07), 0.0)
    state.apply(encoder_report("e0", 9, epoch=1, forward_left_s=0.9), 0.0)
    assert waited_s(state) == pytest.approx(0.07)
    state.apply(encoder_report("e0", 4, epoch=2, forward_left_s=0.9), 0.0)
    assert waited_s(state) == pytest.approx(0.07)
    state.apply(encoder_report("e0", 1, epoch=3, forward_left_s=0.03), 0.0)
    assert waited_s(state) == pytest.approx(0.03)


def test_every_item_that_an_encoder_holds_is_seen() -> None:
    state = cluster()
    items = [image(0), image(1), image(2)]
    held = tuple(item.mm_hash for item in items[:2])
    state.apply(FeatureEvents(MemberId("e0"), 1, 1, held, is_snapshot=True), 0.0)
    assert views_of(state, query(*items), 0.0).encoders[0].cached == frozenset(held)


def test_exclusions_that_end_now_are_over() -> None:
    state = cluster()
    assert state.next_return_s(0.0) is None
    state.exclude(MemberId("w0"), until=10.0)
    state.exclude(MemberId("e0"), until=20.0)
    assert [state.next_return_s(now) for now in (0.0, 9.9, 10.0, 20.0)] == [10.0, 10.0, 20.0, None]


def test_a_cached_prompt_leaves_one_token_to_compute() -> None:
    for num_tokens, num_covered in ((32, 16), (33, 32), (34, 32)):
        seen = snapshot([worker("w", covered_blocks=2)])
        plan = plan_route(query(num_tokens), seen, 0.0)
        assert plan.explanation.winner.covered_tokens == num_covered
        assert plan.explanation.winner.num_prefill_tokens == num_tokens - num_covered


def test_cached_blocks_that_no_sequence_uses_are_taken_from_the_free_ones() -> None:
    full = {"kv_blocks_free": 1, "kv_blocks_per_s": 0.5}
    for covered_blocks in (0, 3):
        plan = plan_route(query(64), snapshot([worker("w", covered_blocks=covered_blocks, **full)]), 0.0)
        assert plan.explanation.winner.queue_s == pytest.approx(3 / 0.5)


def test_each_modality_that_nobody_encodes_is_named() -> None:
    request = query(image(0), image(1, modality="audio"), image(2, modality="video"), image(3, modality="audio"))
    with pytest.raises(NoCapacity, match=r"^no encoder is available for audio, video$"):
        plan_route(request, snapshot([worker("w")], [encoder("e")]), 0.0)


def test_near_equal_workers_are_all_candidates() -> None:
    """The candidates are the workers within the tolerance above the best, and the tie-break chooses among them."""
    workers = [worker(f"w{number}", queued_tokens=number) for number in range(4)]
    seen = [snapshot(workers, tie_break=tie, tolerance=0.02) for tie in (0.0, 0.34, 0.67, 0.99)]
    plans = [plan_route(query(95), each, 0.0) for each in seen]
    assert {plan.explanation.num_near_equal for plan in plans} == {1}
    wide = [snapshot(workers, tie_break=tie, tolerance=0.075) for tie in (0.0, 0.34, 0.67, 0.99)]
    plans = [plan_route(query(95), each, 0.0) for each in wide]
    assert {plan.explanation.num_near_equal for plan in plans} == {3}
    assert {plan.worker_id for plan in plans} == {"w0", "w1", "w2"}


def test_room_that_is_made_by_computing_again_costs_whole_steps() -> None:
    """The eight blocks hold 128 tokens: they take two full steps of 64, and no third step for an empty rest."""
    plan = plan_route(query(128), snapshot([worker("w", max_step_tokens=64, kv_blocks_free=0)]), 0.0)
    assert plan.explanation.winner.queue_s == pytest.approx(2 * PREFILL.at(64))


def test_rows_of_the_units_before_count_for_a_units_landing() -> None:
    """Three units of one cached item share the link, so the last unit lands when all rows have landed."""
    item = image(0, num_tokens=30)
    item = MediaItem(0, "image", item.mm_hash, item.grid, (10, 10, 10), item.cost, item.part)
    (terms,) = landed(item, near={"cached": frozenset({item.mm_hash})})
    assert terms.landing_s == pytest.approx(HERE.at(30 * ROW_BYTES))


def test_reports_of_nothing_in_flight_change_nothing() -> None:
    state = cluster()
    state.apply(worker_report("w0", 1, acknowledged=(AttemptId(RequestId("nobody's"), 0),)), 0.0)
    assert views_of(state, query(10), 0.0).workers[0].num_open == 0
    state.check_invariants()


def test_what_an_encoder_reports_of_all_its_forwards_is_taken_for_each_modality() -> None:
    cost = EncoderCost(EncoderCosts(DECODE, NO_COST, ENCODE))
    costs = (EncodeCost("audio", 1e-3, 0.2),)
    report = encoder_report("e0", 1, encode_s_per_cost=1e-4, batch_overhead_s=0.01, costs=costs)
    cost.anchor(report, 10.0)
    assert cost.of(GENERAL).encode == cost.of("image").encode == Line(0.01, 1e-4)
    assert cost.of("audio").encode == Line(0.2, 1e-3)


def test_a_wait_follows_the_order_in_which_the_encoder_serves_its_queue() -> None:
    """A video of 61,440 patches has been served for most of a unit. A picture waits for the rest of that unit, another
    video of the same length for all of it."""
    unit_s, num_units = 0.03, 20
    video_s = unit_s * num_units
    waiting = [[NOW_S - 0.5, video_s, 0.0, 0, num_units - 1, 1, video_s - unit_s]]
    queue = queue_profile(QueuedCalls(*np.array(waiting).T), NOW_S, 4.0)
    report = encoder_report(
        "e0",
        1,
        queued_cost=61_440,
        costs=(EncodeCost("image", 1e-5, 0.0),),
        queue_profile=queue.profile,
        unit_s=queue.unit_s,
        forward_left_s=0.029,
        num_decode_processes=2,
    )
    state = cluster()
    state.apply(report, NOW_S)
    picture, film = image(0, cost=500), image(1, cost=61_440)

    def predicted(item: MediaItem, now_s: float) -> float:
        (terms,) = state.plan(query(item), now_s).explanation.winner.items
        return terms.wait_s

    assert predicted(picture, NOW_S) == pytest.approx(0.029)
    assert predicted(picture, NOW_S + 0.02) == pytest.approx(0.009)
    assert predicted(film, NOW_S) == pytest.approx(0.029 + video_s - unit_s)

"""Tests the router's picture of the cluster: load without herding, staleness, exclusions, gaps and learning."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from planning_samples import (
    BLOCK_SIZE,
    ROW_BYTES,
    SCHEME,
    SHAPE,
    encoder_member,
    encoder_report,
    image,
    query,
    views_of,
    worker_member,
    worker_report,
)

from fabric.contracts import (
    EMPTY_PROFILE,
    WEFT_KV,
    BlocksRemoved,
    BlocksStored,
    ChoiceResult,
    EncodeCost,
    EncodeFailed,
    EncodeResult,
    EngineFailed,
    ErrorInfo,
    FeatureEvents,
    GenerateResult,
    ItemResult,
    KvEvents,
    KvScheme,
    KvSnapshot,
    MediaItem,
    MemberId,
    MmHash,
    NoCapacity,
    PullTime,
    PullWindow,
    StageTimes,
    add_work,
    context_scale_tokens,
    weighted_tokens,
)
from router.planning import ClusterState, PlannerSettings, RoutePlan, RouteQuery, compiled_search
from router.planning.link_classes import LinkClass
from router.planning.member_columns import MAX_AWAITED, MAX_SILENCE_S
from router.planning.plan_types import Line


def cluster_of(num_workers: int = 1, num_encoders: int = 0) -> ClusterState:
    state = ClusterState(SHAPE, BLOCK_SIZE, random.Random(3))
    members = [worker_member(f"w{number}") for number in range(num_workers)]
    members += [encoder_member(f"e{number}") for number in range(num_encoders)]
    state.update_members(members)
    return state


def route(state: ClusterState, request: RouteQuery, now: float = 0.0) -> RoutePlan:
    plan = state.plan(request, now)
    state.note_dispatched(request, plan, now)
    return plan


def blocks_of(request: RouteQuery) -> bytes:
    return request.scheme_to_hashes[SCHEME]


def knows_prompt(state: ClusterState, name: str, request: RouteQuery, now: float = 0.0) -> None:
    snapshot = KvSnapshot(name, 1, 0, (BlocksStored(None, blocks_of(request)),))
    assert state.apply(snapshot, now) == ()


def test_plans_follow_columns_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns grow when members join and when an encoder brings another modality. The search in C, which keeps
    their addresses, then uses the new members and plans as the search in Python does."""
    state = cluster_of(1, 1)
    request = query(16, image(0), 16, image(1, modality="audio"))
    with pytest.raises(NoCapacity, match="audio"):
        state.plan(request, 0.0)
    members = [worker_member(f"w{number}") for number in range(40)]
    members += [encoder_member(f"e{number}") for number in range(39)]
    state.update_members([*members, encoder_member("ears", modalities=("audio",))])
    for number in range(40):
        queued = 10_000 if number < 39 else 0
        state.apply(worker_report(f"w{number}", 1, queued_weighted_tokens=queued, prefill_s_per_token=1e-3), 0.0)
    plan = state.plan(request, 0.0)
    assert plan.worker_id == "w39"
    assert plan.assignments[1].encoder_id == "ears"
    state.exclude(plan.worker_id, until=1.0)
    again = state.plan(request, 0.0)
    assert again.worker_id != plan.worker_id
    monkeypatch.setattr(compiled_search, "load_library", lambda: None)
    assert state.plan(request, 0.0).predicted_ttft_s == pytest.approx(again.predicted_ttft_s)


def test_workers_of_several_schemes_are_looked_up_in_their_own() -> None:
    coarse, other = KvScheme(WEFT_KV, 4 * BLOCK_SIZE), KvScheme("another-hash", BLOCK_SIZE)
    schemes = {"w0": SCHEME, "w1": coarse, "w2": other, "w3": None}
    state = ClusterState(SHAPE, BLOCK_SIZE, random.Random(3))
    state.update_members(
        [msgspec.structs.replace(worker_member(name), kv_scheme=each) for name, each in schemes.items()]
    )
    assert state.kv_schemes() == (SCHEME, coarse, other)
    request = query(10 * BLOCK_SIZE)
    hashes = request.scheme_to_hashes[SCHEME]
    request = replace(request, scheme_to_hashes={SCHEME: hashes, coarse: hashes[-32:], other: b""})
    for name, blocks in {"w0": hashes[:48], "w1": hashes[-32:-16], "w2": hashes, "w3": hashes}.items():
        state.apply(KvSnapshot(name, 1, 0, (BlocksStored(None, blocks),)), 0.0)
    covered = {each.worker_id: each.covered_blocks for each in views_of(state, request, 0.0).workers}
    assert covered == {"w0": 3, "w1": 4, "w2": 0, "w3": 0}
    assert state.prefix_stats().num_keys == 3 + 1 + 10 + 10
    state.update_members([worker_member("w0")])
    assert state.kv_schemes() == (SCHEME,)


def test_a_snapshot_in_pages_is_asked_again_only_when_a_page_is_lost_or_late() -> None:
    state, hashes = cluster_of(), blocks_of(query(10 * BLOCK_SIZE))
    retry_s, wait_s = PlannerSettings().snapshot_retry_s, PlannerSettings().page_wait_s

    def page(number: int, is_last: bool = False) -> KvSnapshot:
        parent = hashes[32 * number - 16 : 32 * number] if number else None
        chain = BlocksStored(parent, hashes[32 * number : 32 * number + 32], 2 * number)
        return KvSnapshot("w0", 1, 3, (chain,), number, is_last)

    assert state.apply(worker_report("w0", 1), 0.0) == ("w0",)
    assert state.apply(page(0), 0.1) == ()
    assert state.apply(KvEvents("w0", 1, 4, (BlocksRemoved(hashes[48:64]),)), 0.2) == ()
    assert state.apply(worker_report("w0", 2), 0.1 + 2 * retry_s) == ()
    assert views_of(state, query(10 * BLOCK_SIZE), 0.3).workers[0].covered_blocks == 2
    assert state.apply(page(1, is_last=True), 0.1 + wait_s) == ()
    assert views_of(state, query(10 * BLOCK_SIZE), 0.3).workers[0].covered_blocks == 3
    now = 100.0
    assert state.apply(KvEvents("w0", 1, 9, ()), now) == ("w0",)
    assert state.apply(page(0), now) == ()
    assert state.apply(page(2), now + retry_s / 2) == (), "it has asked already"
    assert state.apply(worker_report("w0", 3), now + retry_s) == ("w0",)
    assert state.apply(msgspec.structs.replace(page(0), last_seq=8), now + retry_s) == ()
    assert state.apply(worker_report("w0", 4), now + retry_s + 0.9 * wait_s) == ()
    assert state.apply(worker_report("w0", 5), now + retry_s + wait_s) == ("w0",)


def test_blocks_behind_evicted_ones_are_known_while_their_prompt_is_computed() -> None:
    """The index has room for eight blocks. Another worker's chain evicts the first one's tail; then the first worker
    continues its chain, which a prompt of this router contains."""
    state = ClusterState(SHAPE, BLOCK_SIZE, random.Random(3), PlannerSettings(max_index_blocks=8))
    state.update_members([worker_member("w0"), worker_member("w1")])
    request = replace(query(7 * BLOCK_SIZE), excluded=frozenset({MemberId("w1")}))
    hashes = blocks_of(request)
    state.apply(KvSnapshot("w0", 1, 0, (BlocksStored(None, hashes[: 4 * 16]),)), 0.0)
    others = b"".join((100 + index).to_bytes(16, "little") for index in range(7))
    state.apply(KvSnapshot("w1", 1, 0, (BlocksStored(None, others),)), 0.0)

    def covered() -> int:
        return views_of(state, query(8 * BLOCK_SIZE), 0.0).workers[0].covered_blocks

    assert covered() == 1
    later = KvEvents("w0", 1, 1, (BlocksStored(hashes[3 * 16 : 4 * 16], hashes[4 * 16 : 6 * 16], 4),))
    route(state, request)
    assert state.apply(later, 0.0) == ()
    assert covered() == 6
    state.note_ended(request.attempt_id)
    state.check_invariants()
    state.apply(KvSnapshot("w1", 1, 5, (BlocksStored(None, others),)), 0.0)
    assert covered() == 1
    state.apply(KvEvents("w0", 1, 2, (BlocksStored(hashes[5 * 16 : 6 * 16], hashes[6 * 16 :], 6),)), 0.0)
    assert covered() == 1, "no open prompt says what is ahead of the block"


def generated(plan: RoutePlan, **changes: Any) -> GenerateResult:
    result = GenerateResult(plan.worker_id, (ChoiceResult(0, "stop", 1),), num_prompt_tokens=100, num_cached_tokens=0)
    return GenerateResult(**({field: getattr(result, field) for field in result.__struct_fields__} | changes))


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
        state.note_ended((f"r{number}", 0))
    state.check_invariants()
    assert route(state, query(image(0), 10, attempt="later"), 1.0).explanation.winner.items[0].load == 256


def test_a_flight_lives_on_while_another_request_waits_for_its_feature() -> None:
    state = cluster_of(num_workers=2, num_encoders=4)
    first, second = (route(state, query(image(0), 10, attempt=f"r{number}"), 1e-3 * number) for number in range(2))
    state.note_ended(first.attempt_id)
    third = route(state, query(image(0), 10, attempt="r2"), 2e-3)
    assert {plan.assignments for plan in (first, second, third)} == {first.assignments}
    assert third.explanation.winner.items[0].load == 0
    for plan in (second, third):
        state.note_ended(plan.attempt_id)
    state.check_invariants()
    assert route(state, query(image(0), 10, attempt="later"), 1.0).explanation.winner.items[0].load == 256


def test_an_encoding_that_failed_leaves_no_load_and_no_flight_to_wait_for() -> None:
    state = cluster_of(num_encoders=2)
    first = route(state, query(image(0), 10, attempt="r0"), 0.0)
    (failed,) = (each.encoder_id for each in first.assignments)
    state.note_encoding_ended(first.attempt_id, failed)
    state.note_encoding_ended(first.attempt_id, failed)
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


def test_features_that_a_worker_keeps_are_trusted_while_it_reports() -> None:
    state = cluster_of(num_workers=1, num_encoders=1)
    request = query(image(0), 10)
    state.apply(worker_report("w0", 1), 1.0)
    state.apply(FeatureEvents("w0", 1, 0, (image(0).mm_hash,), is_snapshot=True), 1.0)
    assert state.plan(request, 1.0).assignments == ()
    silent_s = 1.0 + PlannerSettings().stale_after_s + 0.1
    assert len(state.plan(request, silent_s).assignments) == 1
    state.apply(worker_report("w0", 2), silent_s)
    assert state.plan(request, silent_s).assignments == ()


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
    state.note_ended(request.attempt_id)
    state.note_ended(request.attempt_id)
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
    state.note_ended(request.attempt_id)
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


def test_a_member_without_a_report_is_idle_and_late_reports_are_dropped() -> None:
    state = cluster_of()
    assert views_of(state, query(10), 1e6).workers[0].queued_tokens == 0
    state.apply(worker_report("w0", 5, queued_tokens=7), 0.0)
    state.apply(worker_report("w0", 4, queued_tokens=9999), 0.0)
    assert views_of(state, query(10), 0.0).workers[0].queued_tokens == 7
    state.apply(worker_report("w0", 1, epoch=2, queued_tokens=3), 0.0)
    assert views_of(state, query(10), 0.0).workers[0].queued_tokens == 3


def test_a_stale_member_is_balanced_by_open_attempts_without_affinity() -> None:
    state = cluster_of(num_workers=2)
    request = query(320)
    knows_prompt(state, "w0", request)
    for name in ("w0", "w1"):
        state.apply(worker_report(name, 1, queued_tokens=10_000, prefill_s_per_token=1e-3), 0.0)
    fresh = {view.worker_id: view for view in views_of(state, request, 1.0).workers}
    assert fresh["w0"].covered_blocks == 20
    covered = route(state, replace(request, attempt_id=("fresh", 0)), 1.0).explanation.winner.covered_tokens
    assert covered == 304
    assert route(state, replace(request, attempt_id=("stale", 0)), 100.0).explanation.winner.covered_tokens == 0
    state.note_ended(("fresh", 0))
    state.note_ended(("stale", 0))
    chosen = Counter(route(state, query(320, attempt=f"r{number}"), 100.0).worker_id for number in range(20))
    assert chosen == {"w0": 10, "w1": 10}


def test_the_index_draws_requests_to_the_worker_that_holds_their_prefix() -> None:
    state = cluster_of(num_workers=8)
    request = query(1600)
    knows_prompt(state, "w5", request)
    plan = route(state, request)
    assert plan.worker_id == "w5"
    assert plan.explanation.winner.covered_tokens == 1584


def test_a_feature_in_an_encoders_cache_draws_the_item() -> None:
    state = cluster_of(num_workers=1, num_encoders=4)
    state.apply(FeatureEvents("e2", 1, 0, (image(0).mm_hash,), is_snapshot=True), 0.0)
    assert route(state, query(image(0), 10)).assignments[0].encoder_id == "e2"


def test_gaps_ask_for_a_snapshot_but_not_at_every_message() -> None:
    state = cluster_of(num_workers=1, num_encoders=1)
    events = KvEvents("w0", 1, 4, (BlocksStored(None, blocks_of(query(32))),))
    assert state.apply(events, 0.0) == ("w0",)
    assert state.apply(events, 0.5) == ()
    assert state.apply(worker_report("w0", 1), 0.9) == ()
    assert state.apply(worker_report("w0", 2), 1.5) == ("w0",)
    assert state.apply(KvSnapshot("w0", 1, 4, ()), 1.6) == ()
    assert state.apply(worker_report("w0", 3), 9.0) == ()
    assert state.apply(encoder_report("e0", 1), 0.0) == ("e0",)
    assert state.apply(FeatureEvents("e0", 1, 0, is_snapshot=True), 0.1) == ()
    assert state.apply(FeatureEvents("e0", 1, 5, ("x",)), 5.0) == ("e0",)


def test_members_outside_the_view_are_ignored_and_those_that_left_forgotten() -> None:
    state = cluster_of(num_workers=2, num_encoders=1)
    assert state.apply(worker_report("w9", 1), 0.0) == ()
    assert state.apply(KvEvents("w9", 1, 0, ()), 0.0) == ()
    request = query(160, image(0))
    knows_prompt(state, "w0", request)
    route(state, request)
    change = state.update_members([worker_member("w1"), encoder_member("e0")])
    assert ([m.member_id for m in change.joined], [m.member_id for m in change.left]) == ([], ["w0"])
    assert [view.worker_id for view in views_of(state, request, 0.0).workers] == ["w1"]
    assert state.prefix_stats().num_sources == 1
    state.note_ended(request.attempt_id)
    state.check_invariants()
    state.update_members([])
    with pytest.raises(NoCapacity):
        route(state, query(10))


def test_a_restarted_member_leaves_and_joins() -> None:
    state = cluster_of()
    request = query(160)
    knows_prompt(state, "w0", request)
    change = state.update_members([worker_member("w0", epoch=2)])
    assert (len(change.joined), len(change.left)) == (1, 1)
    assert views_of(state, request, 0.0).workers[0].covered_blocks == 0


def test_exclusions_expire_and_the_longest_counts() -> None:
    state = cluster_of(num_workers=2)
    state.exclude("w0", until=10.0)
    state.exclude("w0", until=5.0)
    assert {route(state, query(10, attempt=f"r{number}"), 6.0).worker_id for number in range(8)} == {"w1"}
    assert {view.worker_id for view in views_of(state, query(10), 10.0).workers} == {"w0", "w1"}
    assert [view.worker_id for view in views_of(state, query(10, excluded=["w1"]), 10.0).workers] == ["w0"]


def test_an_image_without_its_encoder_names_the_modality() -> None:
    state = cluster_of(num_encoders=1)
    state.exclude("e0", until=10.0)
    with pytest.raises(NoCapacity, match="image"):
        route(state, query(image(0), 10), 5.0)


def test_costs_that_nobody_reports_are_learned_from_results() -> None:
    state = cluster_of(num_workers=1)
    request = query(1000)
    first = route(state, request)
    for _ in range(30):
        actual = generated(first, num_prompt_tokens=1000, prefill_s=4.0, first_token_s=4.0)
        state.observe_generate(first, actual, 0.0)
    state.note_ended(request.attempt_id)
    assert route(state, request, 1.0).predicted_ttft_s == pytest.approx(4.0 + MAX_SILENCE_S, rel=0.05)


def test_a_worker_that_measures_its_steps_is_believed_over_results_whose_steps_were_also_others() -> None:
    state = cluster_of(num_workers=1)
    state.apply(worker_report("w0", 1, prefill_s_per_token=1e-3, step_overhead_s=0.01), 0.0)
    request = query(1000)
    first = route(state, request)
    assert first.predicted_ttft_s == pytest.approx(0.01 + 1.0, rel=0.1)
    state.observe_generate(first, generated(first, num_prompt_tokens=1000, prefill_s=4.0, first_token_s=4.0), 0.0)
    state.note_ended(request.attempt_id)
    assert route(state, request).predicted_ttft_s == first.predicted_ttft_s
    assert state.accuracy()["prefill"].actual == 4.0


def test_newcomers_start_from_what_the_others_taught() -> None:
    state = cluster_of(num_workers=1, num_encoders=1)
    plan = route(state, query(image(0), 1000))
    for _ in range(40):
        state.observe_generate(plan, generated(plan, num_prompt_tokens=1064, prefill_s=9.0), 0.0)
        times = StageTimes(decode_s=0.5, encode_s=3.0, batch_cost=256)
        state.observe_encode(plan, EncodeResult("e0", (ItemResult(0, times),)), 0.0)
    state.update_members([worker_member("w0"), worker_member("new"), encoder_member("e0"), encoder_member("e-new")])
    view = views_of(state, query(image(0), 1000), 1.0)
    old, new = view.workers
    assert new.prefill == pytest.approx(old.prefill)
    assert view.encoders[1].modality_to_costs["image"].encode.at(256) == pytest.approx(3.0, rel=0.1)
    assert view.encoders[1].modality_to_costs["image"].decode.at(256) == pytest.approx(0.5, rel=0.1)


def test_costs_are_learned_by_modality_and_reported_ones_are_taken() -> None:
    state = cluster_of(num_workers=1)
    both = encoder_member("e", modalities=("image", "audio"))
    state.update_members([worker_member("w0"), both])
    state.apply(encoder_report("e", 1, costs=(EncodeCost("audio", 1e-3, 0.25),)), 0.0)
    request = query(image(0), image(1, modality="audio"))
    view = views_of(state, request, 0.0).encoders[0]
    assert view.modality_to_costs["audio"].encode == pytest.approx(Line(0.25, 1e-3))
    plan = route(state, request)
    for _ in range(40):
        seen = ItemResult(0, StageTimes(decode_s=0.5, encode_s=3.0, batch_cost=256))
        heard = ItemResult(1, StageTimes(decode_s=0.01, encode_s=0.05, batch_cost=256))
        state.observe_encode(plan, EncodeResult("e", (seen, heard)), 0.0)
    state.update_members([worker_member("w0"), both, encoder_member("new", modalities=("image", "audio"))])
    for view in views_of(state, request, 0.0).encoders:
        assert view.modality_to_costs["image"].encode.at(256) == pytest.approx(3.0, rel=0.1)
        assert view.modality_to_costs["audio"].encode.at(256) == pytest.approx(0.05, rel=0.1)
        assert view.modality_to_costs["audio"].decode.at(256) == pytest.approx(0.01, rel=0.1)


def test_failures_teach_nothing() -> None:
    state = cluster_of(num_workers=2, num_encoders=1)
    request = query(image(0), 100)
    plan = route(state, request)
    before = views_of(state, request, 0.0)
    failed = ErrorInfo.of(EngineFailed("broken"))
    state.observe_generate(plan, generated(plan, prefill_s=50.0, error=failed), 0.0)
    other = "w1" if plan.worker_id == "w0" else "w0"
    state.observe_generate(plan, generated(plan, worker_id=other, prefill_s=50.0), 0.0)
    broken = ItemResult(0, StageTimes(encode_s=50.0), ErrorInfo.of(EncodeFailed("broken")))
    state.observe_encode(plan, EncodeResult("e0", (broken,)), 0.0)
    after = views_of(state, request, 0.0)
    assert [view.prefill for view in after.workers] == [view.prefill for view in before.workers]
    assert [view.modality_to_costs for view in after.encoders] == [view.modality_to_costs for view in before.encoders]
    assert state.accuracy() == {}


def test_transfers_teach_the_class_of_their_link() -> None:
    state = cluster_of(num_workers=1, num_encoders=1)
    request = query(image(0), 10)
    num_bytes = 64 * ROW_BYTES
    pulls = (PullTime("e0", num_bytes, 0.0, 0.25), PullTime("e0", num_bytes, 1.0, 1.25))
    for seq in range(20):
        state.apply(worker_report("w0", seq + 1, pulls=(PullWindow(pulls),)), 0.0)
        state.apply(worker_report("w0", seq + 1, pulls=(PullWindow(pulls),)), 0.0)
    assert state.accuracy()["transfer"].num_observations == 40, "an old report teaches nothing"
    links = views_of(state, request, 0.0).links
    assert links[LinkClass.SAME_HOST].at(64 * ROW_BYTES) == pytest.approx(0.25, rel=0.1)
    assert links[LinkClass.TCP].at(64 * ROW_BYTES) < 0.01


def test_predicted_and_actual_are_summed_per_stage() -> None:
    state = cluster_of(num_workers=1, num_encoders=1)
    request = query(image(0), 100)
    plan = route(state, request)
    state.observe_generate(
        plan, generated(plan, queue_s=0.5, prefill_s=2.0, first_token_s=3.0, num_cached_tokens=32), 0.0
    )
    state.observe_encode(plan, EncodeResult("e0", (ItemResult(0, StageTimes(is_cache_hit=True)),)), 0.0)
    errors = state.accuracy()
    assert errors["ttft"].predicted == plan.predicted_ttft_s
    actual_s = 3.0 + plan.explanation.winner.delivery_s
    assert errors["ttft"].actual == pytest.approx(actual_s)
    assert errors["ttft"].abs_error == pytest.approx(actual_s - plan.predicted_ttft_s)
    assert (errors["prefix_tokens"].predicted, errors["prefix_tokens"].actual) == (0, 32)
    assert (errors["cached_items"].predicted, errors["cached_items"].actual) == (0, 1)
    assert errors["lower_bound"].predicted <= errors["ttft"].predicted


def test_the_same_seed_and_messages_give_the_same_plans() -> None:
    def run() -> list[str]:
        state = cluster_of(num_workers=5)
        return [route(state, replace(query(100), attempt_id=(f"r{n}", 0))).worker_id for n in range(20)]

    assert run() == run()


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
    state.note_first_token(request.attempt_id)
    assert awaited_at(state, 10.0) == []
    state.note_ended(request.attempt_id)
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


def test_many_moments_become_fewer_and_later_ones() -> None:
    workers = cluster_of().columns(0.0).workers
    workers.list_awaited(0, [(float(number), 1.0) for number in range(2 * MAX_AWAITED + 1)])
    num = int(workers.num_awaited[0])
    assert workers.awaited[:num, 0].tolist() == [*range(2, 2 * MAX_AWAITED, 3), 2 * MAX_AWAITED][:num]
    assert workers.awaited[MAX_AWAITED : MAX_AWAITED + num, 0].sum() == 2 * MAX_AWAITED + 1
    workers.list_awaited(0, [(7.0, 3.0)])
    assert (workers.num_awaited[0], workers.awaited[0, 0], workers.awaited[MAX_AWAITED, 0]) == (1, 7.0, 3.0)


def test_the_running_step_is_waited_for_and_its_tokens_are_no_longer_queued() -> None:
    state = cluster_of()
    costs = {"prefill_s_per_token": 1e-3, "step_overhead_s": 0.01, "max_step_tokens": 512}
    running = {"queued_tokens": 300, "step_weighted_tokens": 300.0, "step_left_s": 0.25}
    state.apply(worker_report("w0", 1, **costs, **running), 0.0)
    for now, queue_s in ((0.0, 0.25), (0.1, 0.15), (0.3, 0.0)):
        terms = state.plan(query(100), now).explanation.winner
        assert terms.queue_s == pytest.approx(queue_s, abs=1e-6)
        assert terms.prefill_s == pytest.approx(0.1, rel=0.02)

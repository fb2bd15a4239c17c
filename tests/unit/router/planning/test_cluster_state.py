"""Tests the router's picture of the cluster: staleness, exclusions, gaps, members that come and go, and learning."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from planning_clusters import blocks_of, cluster_of, knows_prompt, route
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
    MemberId,
    NoCapacity,
    PullTime,
    PullWindow,
    StageTimes,
    WaitingWork,
    context_scale_tokens,
    weighted_tokens,
)
from router.planning import ClusterState, PlannerSettings, RoomNeed, RoutePlan, compiled_search
from router.planning.link_classes import LinkClass
from router.planning.member_columns import MAX_SILENCE_S
from router.planning.plan_types import Line


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
    state.note_ended(request.attempt_id, 0.0)
    state.check_invariants()
    state.apply(KvSnapshot("w1", 1, 5, (BlocksStored(None, others),)), 0.0)
    assert covered() == 1
    state.apply(KvEvents("w0", 1, 2, (BlocksStored(hashes[5 * 16 : 6 * 16], hashes[6 * 16 :], 6),)), 0.0)
    assert covered() == 1, "no open prompt says what is ahead of the block"


def generated(plan: RoutePlan, **changes: Any) -> GenerateResult:
    result = GenerateResult(plan.worker_id, (ChoiceResult(0, "stop", 1),), num_prompt_tokens=100, num_cached_tokens=0)
    return GenerateResult(**({field: getattr(result, field) for field in result.__struct_fields__} | changes))


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
    state.note_ended(("fresh", 0), 100.0)
    state.note_ended(("stale", 0), 100.0)
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
    state.note_ended(request.attempt_id, 0.0)
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
    state.note_ended(request.attempt_id, 0.0)
    assert route(state, request, 1.0).predicted_ttft_s == pytest.approx(4.0 + MAX_SILENCE_S, rel=0.05)


def test_a_worker_that_measures_its_steps_is_believed_over_results_whose_steps_were_also_others() -> None:
    state = cluster_of(num_workers=1)
    state.apply(worker_report("w0", 1, prefill_s_per_token=1e-3, step_overhead_s=0.01), 0.0)
    request = query(1000)
    first = route(state, request)
    assert first.predicted_ttft_s == pytest.approx(0.01 + 1.0, rel=0.1)
    state.observe_generate(first, generated(first, num_prompt_tokens=1000, prefill_s=4.0, first_token_s=4.0), 0.0)
    state.note_ended(request.attempt_id, 0.0)
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


def test_the_running_step_is_waited_for_and_its_tokens_are_no_longer_queued() -> None:
    state = cluster_of()
    costs = {"prefill_s_per_token": 1e-3, "step_overhead_s": 0.01, "max_step_tokens": 512}
    running = {"queued_tokens": 300, "step_weighted_tokens": 300.0, "step_left_s": 0.25}
    state.apply(worker_report("w0", 1, **costs, **running), 0.0)
    for now, queue_s in ((0.0, 0.25), (0.1, 0.15), (0.3, 0.0)):
        terms = state.plan(query(100), now).explanation.winner
        assert terms.queue_s == pytest.approx(queue_s, abs=1e-6)
        assert terms.prefill_s == pytest.approx(0.1, rel=0.02)


def test_the_work_of_a_request_that_waits_is_what_its_members_will_have_of_it() -> None:
    state, request = cluster_of(2, 2), query(10 * BLOCK_SIZE, image(0, cost=500), image(1, cost=300), 6 * BLOCK_SIZE)
    need = RoomNeed(request.token_count, 8, scheme_to_hashes=request.scheme_to_hashes)

    def work() -> WaitingWork:
        return state.predicted_work(need, request, frozenset(), 1.0)

    empty = ClusterState(SHAPE, BLOCK_SIZE, random.Random(3))
    assert empty.predicted_work(need, request, frozenset(), 1.0) == WaitingWork()
    for name, cost_s, num_blocks in (("w0", 1e-3, 100), ("w1", 3e-3, 300)):
        report = worker_report(name, 1, prefill_s_per_token=cost_s, kv_blocks_total=num_blocks)
        state.apply(report, 0.0)
    for name, cost_s in (("e0", 1e-4), ("e1", 3e-4)):
        state.apply(encoder_report(name, 1, encode_s_per_cost=cost_s), 0.0)
    whole = work()
    num_tokens = request.token_count + 8
    assert whole.kv_share == pytest.approx(num_tokens / (200 * BLOCK_SIZE)), "of a worker of the mean size"
    assert whole.worker_s == pytest.approx(2e-3 * weighted_tokens(num_tokens, 0, context_scale_tokens(1024)))
    assert whole.encoder_s == pytest.approx(2e-4 * 800)
    num_cached = 14  # It covers the first picture, and not the whole second one.
    state.apply(KvSnapshot("w1", 1, 0, (BlocksStored(None, blocks_of(request)[: 16 * num_cached]),)), 0.0)
    rest = work()
    num_new = num_tokens - num_cached * BLOCK_SIZE
    assert rest.kv_share == pytest.approx(num_new / (200 * BLOCK_SIZE))
    assert rest.encoder_s == pytest.approx(2e-4 * 300)
    assert 0.0 < rest.worker_s < whole.worker_s


def test_the_work_of_a_request_is_counted_by_the_workers_that_can_take_it() -> None:
    """No worker of the pool with small workers can take it, and one worker of the other pool can."""
    state, request = cluster_of(0), query(10 * BLOCK_SIZE)
    pools = {"w0": "small", "w1": "main", "w2": "main"}
    state.update_members([msgspec.structs.replace(worker_member(name), pool=pool) for name, pool in pools.items()])
    for name, cost_s, num_blocks in (("w0", 1e-3, 10), ("w1", 2e-3, 100), ("w2", 4e-3, 400)):
        state.apply(worker_report(name, 1, prefill_s_per_token=cost_s, kv_blocks_total=num_blocks), 0.0)
    need = RoomNeed(request.token_count, 0, scheme_to_hashes=request.scheme_to_hashes)
    work = state.predicted_work(need, request, frozenset({MemberId("w0"), MemberId("w1")}), 1.0)
    assert work.barred_pools == ("small",)
    assert work.kv_share == pytest.approx(request.token_count / (400 * BLOCK_SIZE))
    assert state.predicted_work(need, request, frozenset(), 1.0).barred_pools == ()

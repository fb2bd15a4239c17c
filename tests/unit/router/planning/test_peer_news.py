"""Tests what routers tell each other of their dispatches, and what each makes of it."""

import random
from dataclasses import replace

import numpy as np
import pytest
from planning_samples import (
    BLOCK_SIZE,
    SHAPE,
    encoder_member,
    encoder_report,
    image,
    query,
    worker_member,
    worker_report,
)

from fabric.contracts import (
    EncodeResult,
    ItemResult,
    Member,
    MemberId,
    RouterNews,
    StageTimes,
    decode_message,
    encode_message,
)
from router.planning import ClusterState, RoutePlan, RouteQuery

ROUTERS = [Member(MemberId(name), "router", f"address-{name}", "h-0", 1) for name in ("r0", "r1")]
MEMBERS = [worker_member("w0"), worker_member("w1"), encoder_member("e0"), encoder_member("e1"), *ROUTERS]


def cluster() -> ClusterState:
    state = ClusterState(SHAPE, BLOCK_SIZE, random.Random(3))
    state.update_members(MEMBERS)
    for name in ("w0", "w1"):
        report = worker_report(name, 1, prefill_s_per_token=1e-3, step_overhead_s=0.005, max_step_tokens=4096)
        state.apply(report, 10.0)
    for name in ("e0", "e1"):
        state.apply(encoder_report(name, 1, encode_s_per_cost=1e-3, batch_overhead_s=0.01), 10.0)
    state.news.start(lambda: None)
    return state


def route(state: ClusterState, request: RouteQuery, now: float) -> RoutePlan:
    plan = state.plan(request, now)
    state.note_dispatched(request, plan, now)
    return plan


def tell(teller: ClusterState, listener: ClusterState, now: float) -> RouterNews:
    """Carries the news from one router to another, as bytes."""
    news = teller.news.take(MemberId("r0"), now)
    assert news is not None
    carried = decode_message(encode_message(news))
    assert isinstance(carried, RouterNews)
    listener.take_news(carried, now)
    return carried


def is_untouched(state: ClusterState) -> bool:
    columns = state.columns(20.0)
    workers, encoders = columns.workers, columns.encoders
    return not any(
        each.any()
        for each in (
            workers.num_open,
            workers.pending_units,
            workers.queued_tokens,
            workers.num_awaited,
            encoders.num_open,
            encoders.pending_profiles,
        )
    )


def test_routers_do_not_send_to_the_same_idle_worker() -> None:
    first, second = cluster(), cluster()
    plan = route(first, query(600, attempt="a"), 10.0)
    tell(first, second, 10.001)
    assert route(second, query(600, attempt="b"), 10.001).worker_id != plan.worker_id
    first.check_invariants()
    second.check_invariants()


def test_a_worker_is_idle_for_all_when_its_first_token_came() -> None:
    first, second = cluster(), cluster()
    request = replace(query(600, attempt="a"), scheme_to_hashes={})
    plan = route(first, request, 10.0)
    idle_s = second.plan(query(600, excluded=_others(plan.worker_id)), 10.001).predicted_ttft_s
    tell(first, second, 10.001)
    busy_s = second.plan(query(600, excluded=_others(plan.worker_id)), 10.001).predicted_ttft_s
    assert busy_s == pytest.approx(idle_s + 0.6, rel=0.2)
    first.note_first_token(request.attempt_id, 10.4)
    tell(first, second, 10.401)
    assert second.plan(query(600, excluded=_others(plan.worker_id)), 10.401).predicted_ttft_s == pytest.approx(idle_s)
    assert not is_untouched(second), "the request decodes"
    first.note_ended(request.attempt_id, 11.0)
    tell(first, second, 11.0)
    assert is_untouched(second)
    first.note_ended(request.attempt_id, 11.0)
    assert first.news.take(MemberId("r0"), 11.0) is None, "the others know already"


def test_prompts_on_their_way_from_other_routers_are_found() -> None:
    first, second = cluster(), cluster()
    request = query(600, attempt="a")
    plan = route(first, request, 10.0)
    tell(first, second, 10.001)
    first.note_first_token(request.attempt_id, 10.7)
    tell(first, second, 10.701)
    again = second.plan(query(600, attempt="b"), 10.8)
    assert again.worker_id == plan.worker_id
    assert again.explanation.winner.covered_tokens >= 500, "no worker has reported a block"
    first.note_ended(request.attempt_id, 10.9)
    tell(first, second, 10.9)
    assert second.plan(query(600, attempt="b"), 11.0).explanation.winner.covered_tokens == 0


def test_encoders_and_features_of_other_routers_are_known() -> None:
    first, second = cluster(), cluster()
    request = query(10, image(0, digit="a"), 10, attempt="a")
    plan = route(first, request, 10.0)
    (assigned,) = plan.assignments
    tell(first, second, 10.001)
    other = query(10, image(0, digit="b"), 10, attempt="b")
    assert second.plan(other, 10.001).assignments[0].encoder_id != assigned.encoder_id
    same = query(10, image(0, digit="a"), 10, attempt="c")
    plan_of_same = second.plan(same, 10.001)
    assert plan_of_same.assignments[0].encoder_id == assigned.encoder_id
    assert plan_of_same.explanation.winner.items[0].is_cached
    first.observe_encode(plan, EncodeResult(assigned.encoder_id, (ItemResult(0, StageTimes(encode_s=0.2)),)), 10.3)
    first.note_first_token(request.attempt_id, 10.4)
    first.note_ended(request.attempt_id, 10.4)
    tell(first, second, 10.4)
    assert is_untouched(second)


def test_what_ends_early_ends_at_the_others_too() -> None:
    first, second = cluster(), cluster()
    request = query(10, image(0), 300, attempt="a")
    route(first, request, 10.0)
    tell(first, second, 10.001)
    assert not is_untouched(second)
    first.note_ended(request.attempt_id, 10.1)
    tell(first, second, 10.101)
    assert is_untouched(second)


def test_a_router_that_misses_news_forgets_what_it_knew_of_the_sender() -> None:
    first, second = cluster(), cluster()
    requests = [query(600, attempt=name) for name in "abc"]
    route(first, requests[0], 10.0)
    tell(first, second, 10.0)
    first.note_first_token(requests[0].attempt_id, 10.6)
    assert first.news.take(MemberId("r0"), 10.6) is not None, "these news are lost"
    route(first, requests[2], 11.0)
    tell(first, second, 11.0)
    assert second.columns(11.0).workers.num_open.sum() == 1
    first.note_ended(requests[2].attempt_id, 11.1)
    tell(first, second, 11.1)
    assert is_untouched(second)


def test_load_whose_end_is_never_told_ends_with_a_much_later_report() -> None:
    first, second = cluster(), cluster()
    plan = route(first, query(10, image(0), 300, attempt="a"), 10.0)
    tell(first, second, 10.001)
    for now in (39.0, 41.0):
        second.apply(worker_report(plan.worker_id, int(now)), now)
        second.apply(encoder_report(plan.assignments[0].encoder_id, int(now)), now)
        assert is_untouched(second) == (now > 40.0)
    second.check_invariants()


def test_a_router_that_leaves_takes_its_attempts_along() -> None:
    first, second = cluster(), cluster()
    route(first, query(10, image(0), 300, attempt="a"), 10.0)
    tell(first, second, 10.001)
    second.update_members([each for each in MEMBERS if each.member_id != "r0"])
    assert is_untouched(second)
    second.check_invariants()


def test_a_report_contains_what_others_dispatched_before_it() -> None:
    first, second = cluster(), cluster()
    plan = route(first, query(600, attempt="a"), 10.0)
    tell(first, second, 10.001)
    slot = second.columns(10.0).workers.member_to_slot[plan.worker_id]
    queue = {"queued_weighted_tokens": 600, "queued_tokens": 600}
    report = worker_report(plan.worker_id, 2, prefill_s_per_token=1e-3, step_overhead_s=0.005, **queue)
    second.apply(report, 10.05)
    workers = second.columns(10.05).workers
    assert (workers.queued_tokens[slot], workers.pending_units[slot], workers.num_pending[slot]) == (600.0, 0.0, 0.0)
    second.check_invariants()


def test_a_router_that_is_alone_collects_nothing() -> None:
    state = cluster()
    state.news.stop()
    request = query(600, attempt="a")
    route(state, request, 10.0)
    state.note_first_token(request.attempt_id, 10.5)
    assert state.news.take(MemberId("r0"), 11.0) is None


def test_the_first_news_since_the_last_are_announced_once() -> None:
    state, announced = cluster(), []
    state.news.stop()
    state.news.start(lambda: announced.append(1))
    for name in "ab":
        route(state, query(600, attempt=name), 10.0)
    assert len(announced) == 1
    news = state.news.take(MemberId("r0"), 10.0)
    assert news is not None
    assert [each.request_id for each in news.dispatched] == ["a", "b"]
    route(state, query(600, attempt="c"), 10.0)
    assert len(announced) == 2


def test_news_of_unknown_members_are_ignored() -> None:
    first, second = cluster(), cluster()
    second.update_members(ROUTERS)
    request = query(10, image(0), 10, attempt="a")
    route(first, request, 10.0)
    tell(first, second, 10.0)
    first.note_ended(request.attempt_id, 10.1)
    tell(first, second, 10.1)
    assert not np.any(second.columns(10.1).workers.num_open)


def _others(worker_id: MemberId) -> tuple[str, ...]:
    return tuple(name for name in ("w0", "w1") if name != worker_id)

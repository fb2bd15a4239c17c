"""Tests what a router makes of the KV blocks that dispatched attempts take and ended ones give back."""

import random
from dataclasses import replace

import pytest
from planning_samples import BLOCK_SIZE, SHAPE, query, worker_member, worker_report

from fabric.contracts import ComputedNews, DispatchNews, Member, MemberId, RequestId, RouterNews
from router.planning import ClusterState, RouteQuery
from router.planning.block_ledger import MAX_ENDED_S, BlockLedger
from router.planning.kv_room import RoomNeed
from router.planning.member_columns import MAX_SPARE_KV, SPARE_KV_S, WorkerColumns, blocks_coming

PEER = Member(MemberId("r1"), "router", "address-r1", "h-0", 1)
COSTS = {"prefill_s_per_token": 1e-5, "step_overhead_s": 1e-3, "max_step_tokens": 4096}
AHEAD_S = 500.0


def cluster() -> ClusterState:
    state = ClusterState(SHAPE, BLOCK_SIZE, random.Random(3))
    state.update_members([worker_member("w0"), PEER])
    return state


def report(state: ClusterState, seq: int, made_s: float, now: float, **fields: object) -> None:
    """Applies a report that describes the worker at `made_s`, on a clock that is ahead."""
    state.apply(worker_report("w0", seq, at_s=AHEAD_S + made_s, **COSTS, **fields), now)


def prompt(num_tokens: int, attempt: str) -> RouteQuery:
    """Returns a query that shares no blocks with others."""
    return replace(query(num_tokens, attempt=attempt), scheme_to_hashes={})


def dispatch(state: ClusterState, request: RouteQuery, now: float) -> None:
    state.note_dispatched(request, state.plan(request, now), now)


def pending(state: ClusterState) -> float:
    return float(state.columns(0.0).workers.pending_blocks[0])


def test_a_late_report_is_corrected_by_what_began_and_ended_since() -> None:
    state = cluster()
    report(state, 1, 0.001, 0.002)
    old, new = prompt(10 * BLOCK_SIZE, "old"), prompt(6 * BLOCK_SIZE, "new")
    dispatch(state, old, 1.0)
    assert pending(state) == 10
    report(state, 2, 1.001, 1.002, kv_blocks_used=10, acknowledged=(old.attempt_id,))
    assert pending(state) == 0
    state.note_ended(old.attempt_id, 3.0)
    dispatch(state, new, 3.0)
    assert pending(state) == 6 - 10
    report(state, 3, 2.5, 3.5, kv_blocks_used=10)
    assert pending(state) == 6 - 10, "the report is of a moment before both"
    report(state, 4, 3.2, 4.2, kv_blocks_used=6, acknowledged=(new.attempt_id,))
    assert pending(state) == 0
    state.check_invariants()


def test_blocks_of_another_router_stay_taken_after_the_first_token() -> None:
    state = cluster()
    report(state, 1, 0.001, 0.002)
    own = prompt(BLOCK_SIZE, "clock")
    dispatch(state, own, 0.5)
    report(state, 2, 0.501, 0.502, acknowledged=(own.attempt_id,))
    attempt = RequestId("theirs")
    load = DispatchNews(attempt, 0, MemberId("w0"), 0.0, 100.0, 7)
    state.take_news(RouterNews(PEER.member_id, 1, dispatched=(load,)), 2.0)
    state.take_news(RouterNews(PEER.member_id, 2, computed=(ComputedNews(attempt, 0, 0.0),)), 2.1)
    assert pending(state) == 7, "the only report is older than the dispatch"
    report(state, 3, 1.9, 2.9, kv_blocks_used=1)
    assert pending(state) == 7
    report(state, 4, 2.2, 3.2, kv_blocks_used=8)
    assert pending(state) == 0
    state.take_news(RouterNews(PEER.member_id, 3, ended=((attempt, 0),)), 4.0)
    assert pending(state) == -7
    state.check_invariants()


def test_lost_news_give_no_blocks_back() -> None:
    state = cluster()
    load = DispatchNews(RequestId("theirs"), 0, MemberId("w0"), 0.0, 100.0, 7)
    state.take_news(RouterNews(PEER.member_id, 1, dispatched=(load,)), 2.0)
    report(state, 1, 2.5, 2.5, kv_blocks_used=7)
    state.take_news(RouterNews(PEER.member_id, 3), 3.0)
    assert pending(state) == 0, "the request goes on, and the report contains it"
    state.check_invariants()


def test_a_worker_that_comes_back_begins_without_blocks() -> None:
    state = cluster()
    dispatch(state, prompt(5 * BLOCK_SIZE, "a"), 1.0)
    state.update_members([PEER])
    state.update_members([worker_member("w0"), PEER])
    assert pending(state) == 0
    state.note_ended(prompt(1, "a").attempt_id, 2.0)
    assert pending(state) == 0
    state.check_invariants()


def test_an_end_that_no_report_confirms_is_forgotten() -> None:
    workers = WorkerColumns()
    workers.add(worker_member("w0"), 0)
    ledger = BlockLedger(workers)
    for number, at_s in enumerate((0.0, 0.1, MAX_ENDED_S + 2.0)):
        attempt_id = prompt(1, f"q{number}").attempt_id
        ledger.take(0, attempt_id, 5, at_s, is_own=True)
        ledger.acknowledge(0, [attempt_id])
        ledger.report(0, 0.2)
        ledger.end(0, attempt_id, at_s + 1.0)
        assert workers.pending_blocks[0] == (-5, -10, -5)[number], "only the last end is younger than the limit"
        ledger.check_invariants()


def test_a_request_waits_for_all_that_is_promised_before_it() -> None:
    """Sequences give back 20 blocks per second, and 30 more blocks are promised than there are."""
    state = cluster()
    full = {"kv_blocks_total": 40, "kv_blocks_used": 40, "residence_s": 2.0, "queued_tokens": 20 * BLOCK_SIZE}
    report(state, 1, 1.0, 1.0, **full)
    dispatch(state, prompt(10 * BLOCK_SIZE, "ahead"), 1.0)
    probe = state.plan(prompt(5 * BLOCK_SIZE, "probe"), 1.0).explanation.winner
    assert probe.queue_s == pytest.approx((20 + 10 + 5 + MAX_SPARE_KV * 40) / 20)


def test_a_worker_whose_blocks_never_came_back_gives_up_no_more_than_a_prompt_needs() -> None:
    state = cluster()
    full = {"kv_blocks_total": 40, "kv_blocks_used": 40, "prefill_s_per_token": 1e-3}
    state.apply(worker_report("w0", 1, step_overhead_s=1e-3, **full), 1.0)
    probe = prompt(2 * BLOCK_SIZE, "probe")
    waits_s = [state.plan(probe, 1.0).explanation.winner.queue_s]
    dispatch(state, prompt(30 * BLOCK_SIZE, "ahead"), 1.0)
    waits_s.append(state.plan(probe, 1.0).explanation.winner.queue_s)
    ahead_s = 30 * BLOCK_SIZE * 1e-3
    assert waits_s[0] == pytest.approx(2 * BLOCK_SIZE * 1e-3, rel=0.1)
    assert waits_s[1] - waits_s[0] < 1.2 * ahead_s, "the tokens ahead count once"


def test_the_blocks_of_the_running_step_are_in_use_already() -> None:
    fields = {"queued_tokens": 20 * BLOCK_SIZE, "queued_weighted_tokens": 400.0, "behind_tokens": 3 * BLOCK_SIZE}
    between = worker_report("w0", 1, **fields, num_decoding=2)
    assert blocks_coming(between, BLOCK_SIZE) == 20 + 3 + 2
    in_step = worker_report("w0", 1, **fields, step_weighted_tokens=100.0)
    assert blocks_coming(in_step, BLOCK_SIZE) == pytest.approx(15 + 3)
    used = worker_report("w0", 1, kv_blocks_used=60, residence_s=6.0)
    assert blocks_coming(used, BLOCK_SIZE) == pytest.approx(SPARE_KV_S * 60 / 6.0)


def test_a_silent_worker_gives_no_block_back_twice() -> None:
    """Its sequences gave back a block per second. One of 10 blocks has ended, which stands for some of these."""
    state = cluster()
    request = prompt(10 * BLOCK_SIZE, "ended")
    dispatch(state, request, 1.0)
    fields = {"kv_blocks_total": 40, "kv_blocks_used": 30, "residence_s": 30.0}
    report(state, 1, 1.1, 1.1, acknowledged=(request.attempt_id,), **fields)
    state.note_ended(request.attempt_id, 1.5)
    for num_blocks, now, verdict in ((20, 2.0, "now"), (16, 6.2, "later"), (15, 6.2, "now")):
        assert state.room(RoomNeed(num_blocks * BLOCK_SIZE), frozenset(), now).verdict == verdict


def test_a_prompt_shares_the_blocks_that_an_open_request_uses() -> None:
    state = cluster()
    report(state, 1, 1.0, 1.0)
    first, second = (query(16 * BLOCK_SIZE, attempt=name) for name in "ab")
    dispatch(state, first, 1.0)
    assert pending(state) == 16
    dispatch(state, second, 1.1)
    assert pending(state) == 16
    state.check_invariants()

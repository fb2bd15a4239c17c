"""Tests how first tokens, and dispatches to idle members, replace the queues of reports that are old."""

import random
from dataclasses import replace

import msgspec
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
    PROFILE_LENGTH,
    EncodedNews,
    EncodeResult,
    EncodingNews,
    ItemResult,
    MediaItem,
    Member,
    MemberId,
    RequestId,
    RouterNews,
    StageTimes,
    add_work,
    context_scale_tokens,
    key_of,
    weighted_tokens,
)
from router.planning import ClusterState, RoutePlan, RouteQuery

PEER = Member(MemberId("r1"), "router", "address-r1", "h-0", 1)
AHEAD_S = 500.0
COSTS = {"prefill_s_per_token": 1e-3, "step_overhead_s": 0.005, "max_step_tokens": 4096}


def cluster(*kinds: str) -> ClusterState:
    state = ClusterState(SHAPE, BLOCK_SIZE, random.Random(3))
    state.update_members([worker_member("w0"), *([encoder_member("e0")] if "encoder" in kinds else [])])
    return state


def prompt(*parts: int | MediaItem, attempt: str) -> RouteQuery:
    """Returns a query that begins like no other."""
    return replace(query(*parts, attempt=attempt), scheme_to_hashes={})


def route(state: ClusterState, request: RouteQuery, now: float) -> RoutePlan:
    plan = state.plan(request, now)
    state.note_dispatched(request, plan, now)
    return plan


def late_report(state: ClusterState, seq: int, made_s: float, now: float, **fields: object) -> None:
    state.apply(worker_report("w0", seq, at_s=AHEAD_S + made_s, **COSTS, **fields), now)


def know_the_clock(state: ClusterState) -> None:
    """Lets the router find out that reports come a second late; the worker is idle afterwards."""
    late_report(state, 1, 0.001, 0.002)
    request = query(16, attempt="clock")
    route(state, request, 5.0)
    late_report(state, 2, 5.001, 6.001, acknowledged=(request.attempt_id,))
    state.note_ended(request.attempt_id, 6.001)
    late_report(state, 3, 6.5, 7.5)


def wait_s(state: ClusterState, now: float) -> float:
    return state.plan(query(16, attempt="probe"), now).explanation.winner.queue_s


def test_the_load_of_a_prompt_ends_with_its_first_token() -> None:
    state = cluster()
    late_report(state, 1, 1.0, 10.0)
    request = query(1000, attempt="a")
    route(state, request, 10.0)
    ahead_s = wait_s(state, 10.0)
    assert ahead_s == pytest.approx(1.1, rel=0.1)
    state.note_first_token(request.attempt_id, 10.5)
    assert wait_s(state, 10.5) == 0.0, "no report came, and yet the worker is known to be idle"
    columns = state.columns(10.5).workers
    assert columns.num_open[0] == columns.num_pending[0] == 1.0, "it decodes, and no report counts its blocks"
    assert columns.pending_blocks[0] > 0.0
    state.check_invariants()


def test_the_next_step_begins_with_the_prompts_that_are_left() -> None:
    state = cluster()
    late_report(state, 1, 1.0, 10.0)
    first, second = prompt(1000, attempt="a"), prompt(2000, attempt="b")
    route(state, first, 10.0)
    route(state, second, 10.1)
    state.note_first_token(first.attempt_id, 11.1)
    second_s = 0.005 + 1e-3 * weighted_tokens(2000, 0, context_scale_tokens(SHAPE.hidden_size))
    assert wait_s(state, 11.1) == pytest.approx(second_s, abs=0.003)
    assert wait_s(state, 12.1) == pytest.approx(wait_s(state, 11.1) - 1.0), "the step goes on meanwhile"
    state.check_invariants()


def test_a_step_that_an_idle_worker_begins_is_known_from_the_dispatch() -> None:
    state = cluster()
    late_report(state, 1, 1.0, 10.0)
    route(state, query(1000, attempt="a"), 10.0)
    assert wait_s(state, 10.4) == pytest.approx(wait_s(state, 10.0) - 0.4)


def test_an_old_report_brings_no_load_back() -> None:
    state = cluster()
    know_the_clock(state)
    request = query(1000, attempt="a")
    route(state, request, 10.0)
    state.note_first_token(request.attempt_id, 11.1)
    late_report(
        state, 4, 10.01, 11.2, queued_tokens=1000, queued_weighted_tokens=1200, acknowledged=(request.attempt_id,)
    )
    assert wait_s(state, 11.2) == 0.0
    late_report(state, 5, 11.5, 12.5, queued_tokens=3000, queued_weighted_tokens=4000)
    assert wait_s(state, 12.5) == pytest.approx(3.0, rel=0.1), "a report of a later moment counts, for what is left"
    state.check_invariants()


def test_an_old_report_of_a_long_queue_is_advanced_to_now() -> None:
    state = cluster()
    know_the_clock(state)
    late_report(state, 4, 9.0, 10.0, queued_tokens=3000, queued_weighted_tokens=3000)
    assert wait_s(state, 10.0) == pytest.approx(2.0, abs=0.05)


def test_a_report_that_was_made_before_a_dispatch_leaves_it_pending() -> None:
    state = cluster()
    know_the_clock(state)
    request = query(1000, attempt="a")
    route(state, request, 10.0)
    late_report(state, 4, 9.5, 10.5)
    assert state.columns(10.5).workers.pending_units[0] + state.columns(10.5).workers.queued_tokens[0] > 1000.0
    state.note_ended(request.attempt_id, 10.5)
    assert state.columns(10.5).workers.pending_units[0] + state.columns(10.5).workers.queued_tokens[0] == 0.0
    state.check_invariants()


def test_an_aborted_prompt_leaves_the_queue() -> None:
    state = cluster()
    late_report(state, 1, 1.0, 10.0)
    request = query(1000, attempt="a")
    route(state, request, 10.0)
    state.note_ended(request.attempt_id, 10.1)
    assert wait_s(state, 10.1) == 0.0


def test_the_computed_part_of_a_prompt_that_awaits_features_is_not_ahead_again() -> None:
    state = cluster("encoder")
    late_report(state, 1, 1.0, 10.0)
    state.apply(encoder_report("e0", 1, encode_s_per_cost=1.0), 10.0)
    text, media = prompt(1000, attempt="a"), prompt(800, image(0), 10, attempt="b")
    route(state, text, 10.0)
    route(state, media, 10.1)
    state.note_first_token(text.attempt_id, 11.2)
    assert state.columns(11.2).workers.queued_tokens[0] > 800.0, "the next step computes the text before the picture"
    later = prompt(500, attempt="c")
    route(state, later, 11.3)
    state.note_first_token(later.attempt_id, 13.0)
    assert state.columns(13.0).workers.queued_tokens[0] == 0.0
    assert state.columns(13.0).workers.num_awaited[0] == 1.0, "the rest still waits for the picture"
    state.check_invariants()


def routed_pictures(state: ClusterState, digits: str) -> list[RoutePlan]:
    """Routes requests with a picture each at 10 s, which takes 0.51 s to encode, to an encoder that is idle."""
    late_report(state, 1, 1.0, 10.0)
    state.apply(encoder_report("e0", 1, encode_s_per_cost=1e-3, batch_overhead_s=0.01), 10.0)
    return [route(state, query(10, image(0, digit=digit, cost=500), 10, attempt=digit), 10.0) for digit in digits]


def note_encoded(state: ClusterState, plan: RoutePlan, encode_s: float, now: float) -> None:
    state.observe_encode(plan, EncodeResult("e0", (ItemResult(0, StageTimes(encode_s=encode_s)),)), now)


def test_the_end_of_an_encoding_replaces_an_old_report() -> None:
    state = cluster("encoder")
    first, _ = routed_pictures(state, "ab")
    (item,) = first.explanation.winner.items
    assert item.encode_s == pytest.approx(0.51, rel=0.1)
    note_encoded(state, first, item.encode_s, 10.5)
    probe = query(10, image(0, digit="c", cost=2000), 10, attempt="probe")
    (item,) = state.plan(probe, 10.5).explanation.winner.items
    assert item.wait_s == pytest.approx(0.51, rel=0.15), "the second one has just begun"
    (item,) = state.plan(probe, 10.8).explanation.winner.items
    assert item.wait_s == pytest.approx(0.21, rel=0.3)
    state.check_invariants()


def test_an_encoding_that_ended_before_the_last_report_leaves_its_queue() -> None:
    state = cluster("encoder")
    late_report(state, 1, 1.0, 10.0)
    state.update_members([worker_member("w0"), encoder_member("e0"), PEER])
    state.apply(encoder_report("e0", 1, encode_s_per_cost=1e-3, batch_overhead_s=0.01), 10.0)
    work = EncodingNews(RequestId("theirs"), 0, MemberId("e0"), 0.0, 0.2, 0.0, 0, ())
    state.take_news(RouterNews(PEER.member_id, 1, encodings=(work,)), 10.1)
    profile = [0.0] * PROFILE_LENGTH
    add_work(profile, 3.0, key_of(3.0, 4.0, 0.0, 0))
    state.apply(encoder_report("e0", 2, queue_profile=tuple(profile), encode_s_per_cost=1e-3), 10.5)
    ended = EncodedNews(RequestId("theirs"), 0, MemberId("e0"), 0.4)
    state.take_news(RouterNews(PEER.member_id, 2, encoded=(ended,)), 10.6)
    columns = state.columns(10.6).encoders
    assert columns.left_s(0, 10.6) == pytest.approx(2.9), "the encoding ended at 10.2, and the report is of 10.5"
    assert columns.state_at_s[0] == 10.5
    state.check_invariants()


def test_pictures_at_a_slow_encoder_count_whole_until_they_end() -> None:
    state = cluster("encoder")
    first, *_ = routed_pictures(state, "abcd")
    note_encoded(state, first, 2.0, 12.0)
    assert state.columns(12.0).encoders.left_s(0, 12.0) == pytest.approx(3 * 0.51, rel=0.1)
    state.check_invariants()


def test_the_units_of_a_video_that_are_done_are_not_ahead_again() -> None:
    state = cluster("encoder")
    state.news.start(lambda: None)
    late_report(state, 1, 1.0, 10.0)
    fields = {"encode_s_per_cost": 1e-3, "batch_overhead_s": 0.01}
    state.apply(encoder_report("e0", 1, **fields), 10.0)
    video = msgspec.structs.replace(image(0, digit="f", cost=1000), unit_tokens=(4, 4))
    first = route(state, query(10, video, 10, attempt="video"), 10.0)
    (work_s,) = [item.encode_s for item in first.explanation.winner.items]
    news = state.news.take(MemberId("r0"), 10.0)
    assert news is not None
    assert [each.num_units for each in news.encodings] == [2], "other routers are told"
    profile = [0.0] * PROFILE_LENGTH
    add_work(profile, work_s - 0.6, key_of(work_s, 4.0, -0.6, 0))
    state.apply(encoder_report("e0", 2, queue_profile=tuple(profile), acknowledged=(first.attempt_id,), **fields), 10.6)
    picture = route(state, query(10, image(0, digit="a", cost=100), 10, attempt="picture"), 10.6)
    note_encoded(state, picture, 0.11, 10.75)
    left_s = state.columns(10.75).encoders.left_s(0, 10.75)
    assert left_s == pytest.approx(work_s - 0.6 + 0.11 - 0.15, abs=0.01), "the video does not count whole"
    state.check_invariants()


def test_work_that_only_a_fresh_report_knows_stays_when_an_encoding_ends() -> None:
    state = cluster("encoder")
    late_report(state, 1, 1.0, 10.0)
    profile = [0.0] * PROFILE_LENGTH
    add_work(profile, 5.0, key_of(5.0, 4.0, 0.0, 0))
    fields = {"queue_profile": tuple(profile), "encode_s_per_cost": 1e-3, "patience": 4.0, "unit_s": 0.1}
    state.apply(encoder_report("e0", 1, **fields), 10.0)
    plan = route(state, query(10, image(0, cost=20), 10, attempt="a"), 10.005)
    note_encoded(state, plan, 0.02, 10.05)
    assert state.columns(10.05).encoders.left_s(0, 10.05) == pytest.approx(4.95)
    state.check_invariants()

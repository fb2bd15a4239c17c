"""Tests what the record of a request says of its time, on histories made by hand with clocks that differ."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.contracts import (
    AttemptId,
    EncodeResult,
    ErrorInfo,
    GenerateResult,
    ItemResult,
    ManualClock,
    MemberId,
    MmHash,
    RequestId,
    StageTimes,
    TraceEvent,
    WeftError,
)
from router.observe import RequestTrace, item_stages, modality_class, worker_stages
from router.observe.explained_request import MemberAnswer, host_clocks
from router.planning import RoutePlan
from router.planning.plan_types import Assignment, CandidateTerms, Explanation, ItemTerms

ROUTER, WORKER, ENCODER = MemberId("router-0"), MemberId("worker-0"), MemberId("encoder-0")
HASH = MmHash("ab" * 16)
WORKER_AHEAD_S, ENCODER_AHEAD_S = 5000.0, -70.0
"""The clocks of the worker's and the encoder's host are ahead of the router's by these seconds."""


def route_plan(attempt: int = 0, planned_at_s: float = 100.5, worker: MemberId = WORKER) -> RoutePlan:
    item = ItemTerms(0, HASH, ENCODER, False, 0.02, 0.04, 0.06, 0.05, 0.2, 0.05, 0.4, 64, 1 << 20, "image")
    winner = CandidateTerms(worker, 0, 40, 0.0, 0.2, 0.3, 0.05, 0.6, (item,), delivery_s=0.05)
    explanation = Explanation(winner, None, 1, 1)
    return RoutePlan(
        attempt_id=AttemptId(RequestId("req-1"), attempt),
        worker_id=worker,
        worker_address="local://worker-0",
        assignments=(Assignment(0, ENCODER),),
        covered_items=(),
        predicted_ttft_s=0.6,
        lower_bound_s=0.48,
        explanation=explanation,
        planned_at_s=planned_at_s,
    )


def event(member_id: MemberId, at_s: float, name: str, **detail: Any) -> TraceEvent:
    return TraceEvent(at_s, member_id, name, detail)


def worker_events(begun_s: float) -> tuple[TraceEvent, ...]:
    """Returns the events of a worker that receives a request at `begun_s` of the router's clock, on its own clock."""

    def at(after_s: float, name: str, **detail: Any) -> TraceEvent:
        moved = {"from_s": begun_s + WORKER_AHEAD_S + detail.pop("began")} if "began" in detail else {}
        return event(WORKER, begun_s + WORKER_AHEAD_S + after_s, name, **detail, **moved)

    return (
        at(0.0, "received"),
        at(0.1, "prefill", choice=0, start=0, end=16, began=0.05, steps_s=0.05),
        at(0.35, "unit_announced", units=[f"{HASH}:0"]),
        at(0.4, "unit_landed", units=[f"{HASH}:0"]),
        at(0.42, "held", choice=0, began=0.1),
        at(0.7, "prefill", choice=0, start=16, end=40, began=0.5, steps_s=0.2),
        at(0.7, "first_token", choice=0),
        at(0.9, "prefill", choice=1, start=0, end=16, began=0.8, steps_s=0.1),
        at(1.7, "finished", choice=0, reason="stop"),
    )


def encoder_events(begun_s: float) -> tuple[TraceEvent, ...]:
    zero_s = begun_s + ENCODER_AHEAD_S
    return (
        event(ENCODER, zero_s, "received", items=1),
        event(ENCODER, zero_s + 0.12, "decoded", item=0, from_s=zero_s + 0.02),
        event(ENCODER, zero_s + 0.34, "unit_encoded", item=0, unit=0, from_s=zero_s + 0.15),
        event(ENCODER, zero_s + 0.34, "unit_announced", item=0, unit=0),
    )


def generated(events: tuple[TraceEvent, ...], **fields: Any) -> GenerateResult:
    defaults = {"queue_s": 0.05, "prefill_s": 0.25, "held_s": 0.32, "first_token_s": 0.7}
    return GenerateResult(WORKER, (), 40, 0, trace=events, **(defaults | fields))


def encoded(events: tuple[TraceEvent, ...], **times: Any) -> EncodeResult:
    defaults = {"decode_s": 0.06, "preprocess_s": 0.03, "encode_s": 0.19, "decode_wait_s": 0.02}
    return EncodeResult(ENCODER, (ItemResult(0, StageTimes(**(defaults | times))),), events)


def told(is_answered: bool = True, num_failed: int = 0) -> dict[str, Any]:
    """Returns the record of a request with one picture. It arrives at 100 s and is dispatched at 100.51 s; the last
    attempt begins one second later for each attempt that failed before. Its first token arrives 0.8 s after that."""
    clock = ManualClock(100.0)
    trace = RequestTrace(RequestId("req-1"), ROUTER, clock, 100, host="host-r", wall_s=1.7e9)
    trace.add("received")
    trace.note(label="mine", media=[{"modality": "image", "mm_hash": HASH, "part": "messages.0.content.0"}])
    clock.advance(0.1)
    trace.add("read", from_s=100.0)
    clock.advance(0.3)
    trace.add("prompted", from_s=100.1)
    clock.advance(0.1)
    for attempt in range(num_failed + 1):
        plan = route_plan(attempt, clock.now())
        clock.advance(0.01)
        trace.add("planned", attempt=attempt, from_s=plan.planned_at_s)
        trace.add_plan(plan)
        if attempt < num_failed:
            clock.advance(0.59)
            trace.add("waited", from_s=clock.now() - 0.4, waited_s=0.4)
            clock.advance(0.4)
    sent_s = clock.now()
    clock.advance(0.4)
    trace.add_answer(num_failed, "host-e", sent_s, encoded(encoder_events(sent_s + 0.01)))
    clock.advance(0.4)
    trace.add("first_token", attempt=num_failed, choice=0)
    clock.advance(1.0)
    if is_answered:
        trace.add_answer(num_failed, "host-w", sent_s, generated(worker_events(sent_s + 0.04)))
    trace.add("finished", code="ok")
    return trace.to_json()


# ---------------------------------------------------------------- These tests cover the time to first token.


def test_the_parts_of_the_time_to_first_token_add_up_to_it() -> None:
    first = told()["first_token"]
    assert first["at_s"] == pytest.approx(1.31)
    assert sum(first["parts"].values()) == pytest.approx(first["at_s"])
    assert first["parts"] == pytest.approx(
        {
            "read": 0.1,
            "prompted": 0.3,
            "waited": 0.0,
            "earlier_attempts": 0.0,
            "router": 0.1,
            "plan": 0.01,
            "way": 0.1,
            "queue": 0.05,
            "prefill": 0.25,
            "held": 0.32,
            "between_steps": 0.08,
        }
    )
    assert first["longest_part"] == "held"
    assert first["actual_s"] == pytest.approx(0.81)
    assert first["overlap_efficiency"] == pytest.approx(0.48 / 0.81)


def test_earlier_attempts_and_waits_are_parts_of_their_own() -> None:
    first = told(num_failed=2)["first_token"]
    assert first["attempt"] == 2
    assert sum(first["parts"].values()) == pytest.approx(first["at_s"]) == pytest.approx(1.31 + 2.0)
    assert first["parts"]["waited"] == pytest.approx(0.8)
    assert first["parts"]["earlier_attempts"] == pytest.approx(1.2)
    assert first["parts"]["way"] == pytest.approx(0.1)


def test_a_worker_that_has_not_answered_is_one_part() -> None:
    first = told(is_answered=False)["first_token"]
    assert first["parts"]["worker"] == pytest.approx(0.8)
    assert sum(first["parts"].values()) == pytest.approx(first["at_s"])


def test_a_request_without_a_token_has_no_such_time() -> None:
    trace = RequestTrace(RequestId("req-1"), ROUTER, ManualClock(), 10)
    trace.add("received")
    record = trace.to_json()
    assert record["first_token"] is None
    assert (record["outcome"], record["modality"], record["timeline"], record["stages"]) == ("running", "text", [], [])


# ---------------------------------------------------------------- These tests cover the axis.


def test_times_of_other_hosts_come_onto_the_routers_axis_within_their_uncertainty() -> None:
    record = told()
    clocks = {each["host"]: each for each in record["clocks"]}
    assert clocks["host-w"]["offset_s"] == pytest.approx(-WORKER_AHEAD_S, abs=clocks["host-w"]["uncertainty_s"])
    assert clocks["host-e"]["offset_s"] == pytest.approx(-ENCODER_AHEAD_S, abs=clocks["host-e"]["uncertainty_s"])
    # The first token bounds the worker's clock on one side, and the dispatch on the other.
    assert clocks["host-w"]["uncertainty_s"] == pytest.approx(0.1 / 2)
    spans = record["timeline"]
    assert [span["begin_s"] for span in spans] == sorted(span["begin_s"] for span in spans)
    assert {span["uncertainty_s"] for span in spans if span["member_id"] == ROUTER} == {0.0}
    (encode,) = (span for span in spans if span["name"] == "unit_encoded")
    assert encode["begin_s"] == pytest.approx(0.51 + 0.01 + 0.15, abs=encode["uncertainty_s"])
    assert encode["end_s"] - encode["begin_s"] == pytest.approx(0.19)
    assert [each["time_s"] for each in record["events"]] == sorted(each["time_s"] for each in record["events"])


def test_a_timeline_has_every_stage() -> None:
    spans = told()["timeline"]
    lengths = {span["name"]: span["end_s"] - span["begin_s"] for span in spans if span["member_id"] != ROUTER}
    assert lengths == pytest.approx(
        {
            "way": lengths["way"],
            "queue": 0.05,
            "prefill": 0.1,
            "held": 0.32,
            "transfer": 0.05,
            "first_token": 0.0,
            "generate": 1.0,
            "decode_queue": 0.02,
            "decoded": 0.1,
            "encode_queue": 0.03,
            "unit_encoded": 0.19,
        }
    )
    (transfer,) = (span for span in spans if span["name"] == "transfer")
    assert transfer["detail"] == {"item": 0, "unit": 0}
    assert transfer["attempt"] == 0
    assert {"read", "prompted", "planned", "first_token"} <= {s["name"] for s in spans if s["member_id"] == ROUTER}


@given(
    offset_s=st.floats(-1e6, 1e6),
    ways=st.lists(st.tuples(*[st.floats(0.0, 10.0)] * 3), min_size=1, max_size=6),
)
def test_the_true_offset_is_always_within_the_uncertainty(
    offset_s: float, ways: list[tuple[float, float, float]]
) -> None:
    """A call takes `there` to the member, `inside` at it and `back` to the router."""
    answers = []
    sent_s = 50.0
    for there_s, inside_s, back_s in ways:
        received_s = sent_s + there_s
        events = tuple(
            TraceEvent(at_s - offset_s, ENCODER, name, {})
            for at_s, name in ((received_s, "received"), (received_s + inside_s, "unit_announced"))
        )
        end_s = received_s + inside_s + back_s
        answers.append(MemberAnswer(0, ENCODER, "host-e", sent_s, end_s, EncodeResult(ENCODER, (), events), events))
        sent_s += 1.0
    clock = host_clocks(answers, "host-r", {})["host-e"]
    assert abs(clock.offset_s - offset_s) <= clock.uncertainty_s + 1e-6
    least_s = min(there_s + back_s for there_s, _, back_s in ways)
    assert clock.uncertainty_s <= least_s / 2 + 1e-6


def test_a_host_of_the_routers_name_has_its_clock_unless_the_events_contradict_it() -> None:
    def clock_of(shift_s: float) -> tuple[float, float]:
        events = (event(ENCODER, 10.2 + shift_s, "received"), event(ENCODER, 10.4 + shift_s, "unit_announced"))
        answer = MemberAnswer(0, ENCODER, "host-r", 10.0, 11.0, EncodeResult(ENCODER, (), events), events)
        return tuple(host_clocks([answer], "host-r", {})["host-r"])  # type: ignore[return-value]

    assert clock_of(0.0) == (0.0, 0.0)
    assert clock_of(500.0) == pytest.approx((-500.0 + 0.2, 0.4))


# ---------------------------------------------------------------- These tests cover the stages.


def test_stages_compare_what_was_predicted_with_what_was_measured() -> None:
    record = told()
    stages = {each["stage"]: (each["predicted_s"], each["actual_s"]) for each in record["stages"]}
    uncertainty_s = max(clock["uncertainty_s"] for clock in record["clocks"])
    landing_s = stages.pop("landing")
    assert landing_s[0] == 0.4
    assert landing_s[1] == pytest.approx(0.01 + 0.04 + 0.4, abs=uncertainty_s)
    assert stages == {
        "decode_wait": (0.04, 0.02),
        "decode": (0.06, pytest.approx(0.09)),
        "device_prepare": (0.05, 0.0),
        "ready": (pytest.approx(0.15), pytest.approx(0.15)),
        "encode": (0.2, 0.19),
        "transfer": (0.05, pytest.approx(0.05)),
        "queue": (0.0, 0.05),
        "prefill": (pytest.approx(0.25), 0.25),
        "held": (0.3, 0.32),
        "first_token": (pytest.approx(0.55), 0.7),
        "ttft": (0.6, pytest.approx(0.81)),
    }


def test_stages_that_were_not_planned_so_are_not_compared() -> None:
    plan, events = route_plan(), encoder_events(0.0)
    known = {stage.stage for stage in item_stages(plan, encoded(()))}
    assert known == {"decode_wait", "decode", "device_prepare", "encode"}
    assert item_stages(plan, encoded(events, is_cache_hit=True)) == []
    elsewhere = EncodeResult(MemberId("encoder-1"), encoded(events).items, events)
    assert item_stages(plan, elsewhere) == []
    assert worker_stages(route_plan(worker=MemberId("worker-9")), generated(())) == []
    assert {stage.member_id for stage in worker_stages(plan, generated(()))} == {WORKER}


def test_the_sound_preparation_of_the_device_is_no_decoding() -> None:
    stages = {each.stage: each.actual_s for each in item_stages(route_plan(), encoded((), device_prepare_s=0.02))}
    assert stages["decode"] == pytest.approx(0.07)
    assert stages["device_prepare"] == 0.02


@pytest.mark.parametrize(
    ("modalities", "expected"),
    [
        ([], "text"),
        (["image", "image"], "image"),
        (["image", "audio"], "audio"),
        (["audio", "image", "video"], "video"),
        (["points"], "points"),
        (["points", "image"], "image"),
    ],
)
def test_the_class_of_a_request_is_its_longest_modality(modalities: list[str], expected: str) -> None:
    assert modality_class(modalities) == expected


# ---------------------------------------------------------------- These tests cover bounds.


def test_events_beyond_the_limit_are_counted_and_change_no_sum() -> None:
    clock = ManualClock(100.0)
    trace = RequestTrace(RequestId("req-1"), ROUTER, clock, 4)
    trace.add("received")
    trace.add_plan(route_plan(0, 100.0))
    trace.add("planned", attempt=0, from_s=100.0)
    clock.advance(1.0)
    trace.add("first_token", attempt=0, choice=0)
    trace.add_answer(0, "host-w", 100.0, generated(worker_events(100.1)))
    record = trace.to_json()
    assert (len(record["events"]), record["num_events_dropped"]) == (4, len(worker_events(0.0)) - 1)
    first = record["first_token"]
    assert sum(first["parts"].values()) == pytest.approx(first["at_s"]) == pytest.approx(1.0)


def test_events_of_many_media_leave_room_for_the_first_token_and_the_end() -> None:
    clock = ManualClock(100.0)
    trace = RequestTrace(RequestId("req-1"), ROUTER, clock, 3)
    trace.add("received")
    trace.add_plan(route_plan(0, 100.0))
    trace.add("planned", attempt=0, from_s=100.0)
    trace.add_answer(0, "host-e", 100.0, encoded(tuple(event(ENCODER, 100.0, "decoded") for _ in range(5))))
    clock.advance(1.0)
    trace.add("first_token", attempt=0, choice=0)
    trace.add("fetched")
    clock.advance(2.0)
    trace.add("finished", code="ok")
    record = trace.to_json()
    assert [each["name"] for each in record["events"]] == ["received", "planned", "decoded", "first_token", "finished"]
    assert record["num_events_dropped"] == 5
    assert record["whole"]["total_s"] == pytest.approx(3.0)
    assert sum(record["whole"]["parts"].values()) == pytest.approx(3.0)


def test_a_member_whose_events_lack_their_beginnings_breaks_nothing() -> None:
    clock = ManualClock(100.0)
    trace = RequestTrace(RequestId("req-1"), ROUTER, clock, 50)
    trace.add("received")
    trace.add_plan(route_plan(0, 100.0))
    trace.add("first_token", attempt=0, choice=0)
    bare = tuple(event(WORKER, 100.0, name) for name in ("prefill", "unit_landed", "held", "first_token", "finished"))
    trace.add_answer(0, "", 100.0, generated(bare))
    trace.add_answer(0, "", 100.0, encoded(tuple(event(ENCODER, 100.0, name) for name in ("decoded", "unit_encoded"))))
    record = trace.to_json()
    assert sum(record["first_token"]["parts"].values()) == pytest.approx(record["first_token"]["at_s"])


def test_a_failed_attempt_shows_the_events_of_its_worker_but_compares_no_stage() -> None:
    clock = ManualClock(100.0)
    trace = RequestTrace(RequestId("req-1"), ROUTER, clock, 50)
    trace.add("received")
    trace.add_plan(route_plan(0, 100.0))
    failed = generated((event(WORKER, 7.0, "received"),), error=ErrorInfo.of(WeftError("broken")))
    trace.add_answer(0, "host-w", 100.0, failed)
    record = trace.to_json()
    assert [each["name"] for each in record["events"]] == ["received", "received"]
    assert record["stages"] == []

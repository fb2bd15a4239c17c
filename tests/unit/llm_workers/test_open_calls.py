"""Tests what an open attempt adds up to."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from fabric.contracts import (
    FeatureMismatch,
    GenerateRequest,
    MemberId,
    MmHash,
    PromptLogprobs,
    RequestId,
    SamplingParams,
    SequenceId,
    StopConditions,
    UnitKey,
)
from llm_workers.open_calls import MAX_PREFILL_EVENTS, OpenAttempt
from llm_workers.scheduling import AdmittedSequences, FinishedSequence, SequenceOutputs, SequenceTimes, SequenceTokens

WORKER = MemberId("worker-1")


def request(num_choices: int = 1, emitted: tuple[Any, ...] = ()) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("r"),
        attempt=2,
        router_id=MemberId("router-1"),
        router_address="local://router",
        token_ids=tuple(range(40)),
        placeholders=(),
        media=(),
        sampling=SamplingParams(),
        stop=StopConditions(max_tokens=5),
        age=(1.0, "r"),
        num_choices=num_choices,
        emitted=emitted,
    )


def sequence(choice: int) -> SequenceId:
    return SequenceId(RequestId("r"), 2, choice)


def finished(
    choice: int, num_tokens: int = 5, cached: int = 0, times: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4)
) -> FinishedSequence:
    return FinishedSequence(sequence(choice), "stop", num_tokens, 40, cached, SequenceTimes(*times))


def test_choices_end_one_by_one_and_times_are_joined() -> None:
    attempt = OpenAttempt(WORKER, request(num_choices=3), 10.0)
    unit = UnitKey(MmHash("ab"), 0)
    attempt.admitted(AdmittedSequences((sequence(0), sequence(1), sequence(2)), 16, (unit,), "not_covered"), 10.1)
    attempt.generated(SequenceTokens(sequence(2), 0, (7, 8), None), 10.5)
    attempt.finished(finished(0, cached=32, times=(0.1, 0.2, 0.0, 0.4)), 11.0)
    attempt.finished(finished(1, cached=39, times=(0.3, 0.1, 0.5, 0.4)), 11.0)
    assert attempt.open_choices == [2]
    attempt.aborted(2, SequenceTimes(0.2, 0.9, 0.1, 0.0), 12.0)
    assert attempt.open_choices == []
    result = attempt.result()
    assert [(c.choice, c.finish_reason, c.num_tokens) for c in result.choices] == [
        (0, "stop", 5),
        (1, "stop", 5),
        (2, "abort", 2),
    ]
    assert (result.num_prompt_tokens, result.num_cached_tokens) == (40, 32)
    assert (result.queue_s, result.prefill_s, result.held_s, result.first_token_s) == (0.1, 0.9, 0.5, 0.5)
    assert [event.name for event in result.trace] == [
        "received",
        "admitted",
        "first_token",
        "finished",
        "finished",
        "aborted",
    ]
    assert result.trace[1].detail == {"units": ["ab:0"], "cached_tokens": 16}
    assert result.error is None


def test_a_migrated_attempt_counts_tokens_of_the_former() -> None:
    attempt = OpenAttempt(WORKER, request(num_choices=2, emitted=((1, 2, 3), ())), 0.0)
    attempt.admitted(AdmittedSequences((sequence(1),), 0, (), "not_covered", (finished(0, num_tokens=3),)), 0.1)
    assert attempt.open_choices == [1]
    attempt.aborted(1, SequenceTimes(0, 0, 0, 0), 0.2)
    assert [c.num_tokens for c in attempt.result().choices] == [3, 0]


def test_the_trace_has_the_steps_and_the_stays_at_the_doorstep_with_their_beginnings() -> None:
    attempt = OpenAttempt(WORKER, request(), 10.0)
    attempt.prefilled(0, 0, 16, 10.5, step_s=0.25)
    attempt.finished(
        FinishedSequence(sequence(0), "stop", 4, 40, 0, SequenceTimes(0.1, 0.5, 1.0, 2.0, 3.0, ((10.5, 11.5),))), 13.0
    )
    events = {event.name: event for event in attempt.result().trace}
    assert (events["prefill"].at_s, events["prefill"].detail["from_s"]) == (10.5, 10.25)
    assert (events["held"].at_s, events["held"].detail) == (11.5, {"choice": 0, "from_s": 10.5})


def test_the_trace_is_in_the_order_of_time_and_bounded() -> None:
    attempt = OpenAttempt(WORKER, request(), 0.0)
    attempt.note("unit_landed", 5.0)
    for at in range(4 * MAX_PREFILL_EVENTS):
        attempt.prefilled(0, at, at + 1, 1.0 + at / 1000, step_s=0.25)
    trace = attempt.result(FeatureMismatch("no")).trace
    assert [event.at_s for event in trace] == sorted(event.at_s for event in trace)
    prefills = [event.detail for event in trace if event.name == "prefill"]
    assert len(prefills) == MAX_PREFILL_EVENTS
    assert [p["start"] for p in prefills] == [0, *(p["end"] for p in prefills[:-1])]
    assert prefills[-1]["end"] == 4 * MAX_PREFILL_EVENTS
    assert sum(p["steps_s"] for p in prefills) == MAX_PREFILL_EVENTS, "a merged event has the time of its steps"
    assert attempt.result(FeatureMismatch("no")).error.code == "feature_mismatch"


def test_the_result_has_the_outputs_of_the_prompt_unless_the_attempt_failed() -> None:
    attempt = OpenAttempt(WORKER, request(), 10.0)
    assert (attempt.result().embedding, attempt.result().prompt_logprobs) == (b"", None)
    logprobs = PromptLogprobs(0, b"1234", b"5678", b"9012")
    attempt.read(SequenceOutputs(sequence(0), b"abcd", logprobs), 10.5)
    assert (attempt.result().embedding, attempt.result().prompt_logprobs) == (b"abcd", logprobs)
    assert attempt.result().first_token_s == 0.0
    failed = attempt.result(FeatureMismatch("wrong"))
    assert (failed.embedding, failed.prompt_logprobs) == (b"", None)


def test_outputs_stand_for_the_first_token_if_nothing_is_generated() -> None:
    """Predictions of the time to the first token are compared with this time."""
    attempt = OpenAttempt(WORKER, structs.replace(request(), stop=StopConditions(max_tokens=0)), 10.0)
    attempt.read(SequenceOutputs(sequence(0), b"abcd", None), 10.5)
    attempt.finished(finished(0, num_tokens=0), 10.6)
    assert attempt.result().first_token_s == 0.5

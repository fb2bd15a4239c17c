"""Tests what becomes of requests and of the worker when a step, an admission or the device of the engine fails."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs
from scheduling_cases import reference
from watched_engine import POSITIONS, UNIT, OutOfMemoryError, Watched, raising, request

from fabric.contracts import (
    AttemptId,
    EngineFailed,
    InvalidRequest,
    PromptOutputs,
    RequestId,
    SamplingParams,
    StopConditions,
    WorkerLost,
    split_hashes,
)
from llm_workers.engine import MAX_FAILED_STEPS, PROBE_ID, is_device_error, probe_plan
from llm_workers.scheduling import BROKEN_GRAMMAR_TOKEN, AdmittedSequences, Arrival, Splice, StepPlan, StepResult


def test_one_poisoned_request_ends_alone(watched: Watched) -> None:
    watched.executor.broken, watched.executor.infinite = {"b"}, {"d"}
    for name in "abcd":
        watched.engine.add(request(name), POSITIONS)
    watched.until(lambda: len(watched.finished()) == 2 and len(watched.failed()) == 2)
    assert watched.finished() == {"a": "length", "c": "length"}
    assert watched.tokens("a") == watched.tokens("c") == [100, 101, 102]
    assert {name: type(error) for name, error in watched.failed().items()} == {"b": EngineFailed, "d": EngineFailed}
    assert watched.tokens("b") == watched.tokens("d") == []
    assert watched.seen[-1].stats.kv_blocks_used == 0
    watched.engine.check_health()


@pytest.mark.parametrize("num_requests", [1, 4])
def test_a_device_that_fails_for_good_loses_the_worker_and_no_request(num_requests: int) -> None:
    watched = Watched()
    watched.executor.fails = raising(RuntimeError("it has gone"))
    for number in range(num_requests):
        watched.engine.add(request(f"r{number}"), POSITIONS)
    watched.engine.start()
    watched.until(watched.deaths)
    assert [type(death) for death in watched.deaths()] == [WorkerLost]
    assert watched.failed() == {}, "none is told that it is its own fault"
    assert len(watched.executor.plans) == 3, "the step, its first sequence alone, and a probe"
    with pytest.raises(WorkerLost, match="the device fails every step"):
        watched.engine.check_health()
    watched.engine.stop()


def test_an_error_of_the_device_needs_no_probe_the_second_time(watched: Watched) -> None:
    watched.executor.fails = raising(OutOfMemoryError("out of memory"))
    watched.engine.add(request("a"), POSITIONS)
    watched.until(watched.deaths)
    assert type(watched.deaths()[0]) is WorkerLost
    assert len(watched.executor.plans) == 2
    assert watched.executor.num_probes == 0


def test_a_step_too_large_for_its_memory_is_computed_in_parts() -> None:
    watched = Watched()

    def fails(plan: StepPlan) -> None:
        if len(plan.chunks) > 1:
            raise OutOfMemoryError("out of memory")

    watched.executor.fails = fails
    for name in "abc":
        watched.engine.add(request(name), POSITIONS)
    watched.engine.start()
    watched.until(lambda: len(watched.finished()) == 3)
    assert watched.failed() == {}
    assert watched.tokens("a") == watched.tokens("b") == watched.tokens("c") == [100, 101, 102]
    watched.engine.check_health()
    watched.engine.stop()


def test_an_embedding_survives_a_step_that_is_computed_in_parts(watched: Watched) -> None:
    wanted = {"prompt_outputs": PromptOutputs("last"), "stop": StopConditions(max_tokens=0)}
    watched.executor.broken = {"b"}
    watched.engine.add(structs.replace(request("a"), **wanted), POSITIONS)
    watched.engine.add(structs.replace(request("b"), **wanted), POSITIONS)
    watched.until(lambda: watched.finished() and watched.failed())
    assert watched.finished() == {"a": "length"}
    assert list(watched.failed()) == ["b"]
    (outputs,) = [one for update in watched.seen if update.events for one in update.events.prompt_outputs]
    assert outputs.sequence_id.request_id == "a"
    assert np.frombuffer(outputs.embedding, "<f4").tolist() == pytest.approx([0.6, 0.8])


def test_several_poisoned_requests_in_one_step_do_not_cost_the_worker() -> None:
    watched = Watched()
    watched.executor.broken = {"a", "b"}
    for name in "abc":
        watched.engine.add(request(name), POSITIONS)
    watched.engine.start()
    watched.until(lambda: "c" in watched.finished() and len(watched.failed()) == 2)
    assert {name: type(error) for name, error in watched.failed().items()} == {"a": EngineFailed, "b": EngineFailed}
    assert watched.executor.num_probes == 2
    watched.engine.check_health()
    watched.engine.stop()


def test_a_poisoned_request_that_runs_alone_fails_alone(watched: Watched) -> None:
    watched.executor.broken = {"a"}
    watched.engine.add(request("a"), POSITIONS)
    watched.until(watched.failed)
    watched.engine.add(request("b"), POSITIONS)
    watched.until(lambda: "b" in watched.finished())
    assert list(watched.failed()) == ["a"]
    assert watched.deaths() == []


def test_one_answer_that_is_not_finite_is_probed_and_ends_alone(watched: Watched) -> None:
    watched.executor.infinite = {"a"}
    watched.engine.add(request("a"), POSITIONS)
    watched.until(watched.failed)
    assert watched.executor.num_probes == 1
    watched.engine.check_health()


def test_a_chunk_that_is_not_finite_is_not_found_though_nothing_was_drawn_from_it() -> None:
    """The prompt is computed in chunks of 8, and the second chunk is spoiled. The blocks that the first chunk wrote may
    be found, and the neighbour continues; the unit that the spoiled chunk read is released and no longer trusted."""
    watched = Watched(max_step_tokens=8, max_sequences=2)
    watched.executor.not_finite = {"a": 9}
    watched.engine.add(request("a", with_unit=True), POSITIONS)
    watched.engine.hold_feature(reference(UNIT))
    watched.engine.start()
    try:
        watched.until(watched.failed)
        assert watched.executor.num_probes == 1
        (update,) = [update for update in watched.seen if update.failed]
        assert update.distrusted == [UNIT]
        assert [released.unit for released in watched.released()] == [UNIT]
        stored = [block for u in watched.seen for event in u.kv_events for block in split_hashes(event.hashes)]
        assert len(stored) == 2
        watched.executor.not_finite = {}
        watched.engine.add(request("b"), POSITIONS)
        watched.until(watched.finished)
        assert watched.tokens("b") == [100, 101, 102]
        watched.engine.check_health()
    finally:
        watched.engine.stop()


def test_a_neighbour_of_a_chunk_that_is_not_finite_goes_on(watched: Watched) -> None:
    watched.executor.not_finite = {"b": 0}
    for name in "abc":
        watched.engine.add(request(name), POSITIONS)
    watched.until(lambda: len(watched.finished()) == 2 and watched.failed())
    assert watched.finished() == {"a": "length", "c": "length"}
    assert watched.tokens("a") == watched.tokens("c") == [100, 101, 102]
    assert list(watched.failed()) == ["b"]


def test_a_device_that_gives_no_finite_number_loses_the_worker(watched: Watched) -> None:
    watched.executor.infinite = {"a", PROBE_ID.request_id}
    watched.engine.add(request("a"), POSITIONS)
    watched.until(watched.deaths)
    assert type(watched.deaths()[0]) is WorkerLost
    assert watched.failed() == {}


def test_requests_that_fail_in_a_row_although_probes_go_well_end_the_worker(watched: Watched) -> None:
    watched.executor.broken = {f"r{number}" for number in range(MAX_FAILED_STEPS)}
    for number in range(MAX_FAILED_STEPS):
        watched.engine.check_health()
        watched.engine.add(request(f"r{number}"), POSITIONS)
        watched.until(lambda number=number: len(watched.failed()) > number or watched.deaths())
    assert [type(death) for death in watched.deaths()] == [WorkerLost]
    assert len(watched.failed()) == MAX_FAILED_STEPS - 1


def test_a_success_between_them_is_counted(watched: Watched) -> None:
    for number in range(2 * MAX_FAILED_STEPS):
        name = f"r{number}"
        if number % MAX_FAILED_STEPS:
            watched.executor.broken.add(name)
        watched.engine.add(request(name), POSITIONS)
        watched.until(lambda name=name: name in watched.failed() or name in watched.finished())
    watched.engine.check_health()


def test_a_fault_of_the_books_loses_the_worker_too(watched: Watched) -> None:
    """Any error that ends the engine is reported as `WorkerLost`, so its requests may continue elsewhere."""

    def plan_step() -> None:
        raise AssertionError("the books are wrong")

    watched.engine._scheduler.plan_step = plan_step
    watched.engine.add(request("a"), POSITIONS)
    watched.until(watched.deaths)
    assert type(watched.deaths()[0]) is WorkerLost


def of_request(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    """Returns the messages of the lines that carry the id of the request. Each of these lines has a traceback."""
    found = [record for record in caplog.records if getattr(record, "request_id", None) == name]
    assert all(record.exc_info for record in found)
    return [record.getMessage() for record in found]


def test_a_failed_step_is_logged_with_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.executor.broken = {"b"}
    for name in "ab":
        watched.engine.add(request(name), POSITIONS)
    watched.engine.start()
    watched.until(lambda: watched.finished() and watched.failed())
    watched.engine.stop()
    first = caplog.records[0].getMessage()
    assert first.endswith("failed (requests: a, b)"), "the whole step comes first"
    assert of_request(caplog, "a") == [], "it succeeds alone"
    assert of_request(caplog, "b") == [first.replace("a, b", "b")]
    assert len([failed for u in watched.seen for failed in u.failed]) == 1, "it ends once"


def test_a_request_whose_admission_breaks_ends_alone_and_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    add = watched.engine._scheduler.add

    def fails(arrival: Arrival) -> AdmittedSequences:
        admission = add(arrival)
        if arrival.attempt_id.request_id == "a":
            raise IndexError("a bug")
        return admission

    watched.engine._scheduler.add = fails
    for name in "ab":
        watched.engine.add(request(name), POSITIONS)
    watched.until(lambda: "b" in watched.finished())
    (failed,) = [failed for u in watched.seen for failed in u.failed]
    assert failed.attempt == AttemptId(RequestId("a"), 0)
    assert type(failed.error) is EngineFailed
    assert failed.error.message == "the request could not be admitted: IndexError"
    assert of_request(caplog, "a") == ["request a could not be admitted"]
    assert [a.attempt.request_id for u in watched.seen for a in u.admitted] == ["b"]
    assert watched.tokens("a") == []
    assert watched.seen[-1].stats.kv_blocks_used == 0, "nothing of it stays"
    watched.engine.check_health()


def test_a_bug_before_a_request_reaches_the_engine_is_the_callers(watched: Watched) -> None:
    def fails(*_: object) -> None:
        raise IndexError("a bug")

    watched.engine._scheduler.prepare = fails
    with pytest.raises(IndexError, match="a bug"):
        watched.engine.add(request("a"), POSITIONS)
    watched.engine.request_snapshot("local://router")
    watched.until(lambda: watched.seen and watched.seen[-1].snapshots)
    assert watched.failed() == {}
    watched.engine.check_health()


def test_the_end_of_the_engine_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.executor.fails = raising(WorkerLost("a rank is gone"))
    watched.engine.add(request("a"), POSITIONS)
    watched.engine.start()
    watched.until(watched.deaths)
    watched.engine.stop()
    assert [record.getMessage() for record in caplog.records] == ["the engine has died"]
    assert [death.message for death in watched.deaths()] == ["a rank is gone"]


@pytest.mark.parametrize(
    ("error", "is_devices"),
    [
        (OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
        (RuntimeError("shape mismatch"), False),
        (ValueError("token 9 is not in the vocabulary"), False),
    ],
)
def test_errors_of_the_device_are_told_from_others(error: Exception, is_devices: bool) -> None:
    assert is_device_error(error) == is_devices


def test_a_probe_has_nothing_of_the_request_and_writes_where_nobody_reads() -> None:
    watched = Watched()
    watched.executor.broken = {"a"}
    watched.engine.add(request("a", with_unit=True), POSITIONS)
    watched.engine.hold_feature(reference(UNIT))
    watched.engine.start()
    watched.until(watched.failed)
    watched.engine.stop()
    failed, probe = watched.executor.plans[-2].chunks[0], watched.executor.plans[-1].chunks[0]
    assert failed.splices == (Splice(6, 4, UNIT, 0),)
    assert probe.splices == ()
    assert (probe.start, probe.num_tokens, probe.token_ids.tolist(), probe.positions.tolist()) == (0, 1, [0], [[0]])
    assert len(probe.block_ids) == 1
    assert probe.block_ids[0] not in failed.block_ids
    assert probe_plan(watched.executor.plans[-2], failed, 3).chunks[0].sampling == SamplingParams(temperature=0.0)


def test_a_probe_leaves_the_prefix_cache_alone() -> None:
    """The last token of a prompt that is wholly found is computed into a block that other sequences read."""
    watched = Watched()
    watched.engine.start()
    watched.engine.add(request("a"), POSITIONS)
    watched.until(lambda: "a" in watched.finished())
    watched.executor.broken = {"b"}
    watched.engine.add(request("b"), POSITIONS)
    watched.until(lambda: "b" in watched.failed())
    watched.engine.stop()
    failed, probe = watched.executor.plans[-2].chunks[0], watched.executor.plans[-1].chunks[0]
    published = watched.executor.plans[0].chunks[0].block_ids
    assert failed.block_ids[0] == published[0], "the prompt was found"
    assert probe.sequence_id == PROBE_ID
    assert probe.block_ids[0] not in published


def test_grammars_that_break_in_a_row_are_not_the_workers_fault(watched: Watched) -> None:
    watched.executor.execute = lambda plan: StepResult(
        {chunk.sequence_id: (BROKEN_GRAMMAR_TOKEN,) for chunk in plan.chunks}
    )
    for number in range(2 * MAX_FAILED_STEPS):
        name = f"r{number}"
        watched.engine.add(request(name), POSITIONS)
        watched.until(lambda name=name: name in watched.failed())
    assert {type(error) for error in watched.failed().values()} == {InvalidRequest}
    assert watched.deaths() == []
    watched.engine.check_health()

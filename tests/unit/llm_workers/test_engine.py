"""Tests the engine thread with the real scheduler and an executor that draws from a table."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from scheduling_cases import reference

from fabric.contracts import (
    AttemptId,
    BlockHash,
    BlocksStored,
    EngineFailed,
    EngineStats,
    FeatureStats,
    GenerateRequest,
    InvalidRequest,
    MediaItem,
    MemberId,
    MmHash,
    PlaceholderRange,
    ProtocolError,
    RequestId,
    SamplingParams,
    SequenceId,
    StopConditions,
    SystemClock,
    UnitKey,
    WeftError,
    WorkerLost,
    split_hashes,
)
from llm_workers import engine
from llm_workers.engine import MAX_FAILED_STEPS, PROBE_ID, Engine, is_device_error, probe_plan
from llm_workers.engine_interface import Update
from llm_workers.scheduling import (
    BROKEN_GRAMMAR_TOKEN,
    AdmittedSequences,
    Arrival,
    FeatureReference,
    ReleasedFeature,
    Scheduler,
    Splice,
    StepPlan,
    StepResult,
    StepWork,
)
from llm_workers.worker_config import WorkerConfig
from llm_workers.worker_reports import WorkerReporter
from modalities.family import Positions

UNIT = UnitKey(MmHash("ab"), 0)


def request(name: str, num_tokens: int = 3, with_unit: bool = False, attempt: int = 0) -> GenerateRequest:
    media = (MediaItem(0, "image", UNIT.mm_hash, (1, 4, 4), (4,), 16, "p"),) if with_unit else ()
    runs = (PlaceholderRange(6, 4, 0, 0, 0),) if with_unit else ()
    return GenerateRequest(
        request_id=RequestId(name),
        attempt=attempt,
        router_id=MemberId("router"),
        router_address="local://router",
        token_ids=tuple(range(20)),
        placeholders=runs,
        media=media,
        sampling=SamplingParams(temperature=0.0),
        stop=StopConditions(max_tokens=num_tokens),
        age=(0.0, name),
    )


POSITIONS = Positions(np.arange(20)[None], 0)


class OutOfMemoryError(RuntimeError):
    """An `OutOfMemoryError` has the same name as torch's own error."""


class Executor:
    """Draws 100 + draw index. Requests whose ids are in `broken` raise, those in `infinite` give a negative token, and
    `fails` may raise for any plan."""

    def __init__(self) -> None:
        self.broken, self.infinite = set(), set()
        self.not_finite = {}
        """Maps request ids to the position that spoils their chunks."""
        self.fails: Callable[[StepPlan], None] = lambda plan: None
        self.plans = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.fails(plan)
        if any(chunk.sequence_id.request_id in self.broken for chunk in plan.chunks):
            raise RuntimeError("poisoned")
        return StepResult(
            {
                chunk.sequence_id: (-1 if chunk.sequence_id.request_id in self.infinite else 100 + chunk.draw_index,)
                for chunk in plan.chunks
                if chunk.sampling is not None
            },
            not_finite={
                chunk.sequence_id
                for chunk in plan.chunks
                if chunk.end > self.not_finite.get(chunk.sequence_id.request_id, 1000)
            },
        )

    @property
    def num_probes(self) -> int:
        return sum(plan.chunks[0].sequence_id == PROBE_ID for plan in self.plans)


def raising(error: Exception) -> Callable[[StepPlan], None]:
    def fails(plan: StepPlan) -> None:
        raise error

    return fails


class Watched:
    """A `Watched` runs an engine and collects its updates until something is true."""

    def __init__(self, **config: Any) -> None:
        self.executor, self._updates = Executor(), queue.SimpleQueue()
        clock = SystemClock()
        scheduler = Scheduler(WorkerConfig(block_size=4, num_blocks=64, **config), 1000, clock)
        self.engine = Engine(scheduler, self.executor, clock, self._updates.put)
        self.seen = []

    def until(self, is_true: Callable[[], object]) -> Update:
        while not is_true():
            self.seen.append(self._updates.get(timeout=10.0))
        return self.seen[-1]

    def tokens(self, name: str) -> list[int]:
        frames = [t for u in self.seen if u.events for t in u.events.tokens if t.sequence_id.request_id == name]
        return [token for frame in frames for token in frame.token_ids]

    def finished(self) -> dict[RequestId, str]:
        return {f.sequence_id.request_id: f.finish_reason for u in self.seen if u.events for f in u.events.finished}

    def failed(self) -> dict[RequestId, WeftError]:
        return {f.attempt.request_id: f.error for u in self.seen for f in u.failed}

    def deaths(self) -> list[WeftError]:
        return [u.death for u in self.seen if u.death]

    def released(self) -> list[ReleasedFeature]:
        return [released for u in self.seen for released in u.released]

    def given_back(self) -> list[FeatureReference]:
        return [reference for released in self.released() for reference in released.references]


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    watched.engine.start()
    yield watched
    watched.engine.stop()


def test_requests_run_to_their_end_and_leave_nothing(watched: Watched) -> None:
    for name in "ab":
        watched.engine.add(request(name), POSITIONS)
    watched.until(lambda: len(watched.finished()) == 2)
    assert watched.finished() == {"a": "length", "b": "length"}
    assert watched.tokens("a") == watched.tokens("b") == [100, 101, 102]
    last = watched.seen[-1].stats
    assert (last.num_running, last.num_waiting, last.kv_blocks_used) == (0, 0, 0)
    assert watched.engine.times.num_steps == last.steps
    assert [a.attempt.request_id for u in watched.seen for a in u.admitted] == ["a", "b"]
    stored = [event for u in watched.seen for event in u.kv_events]
    assert len(stored) > 0
    watched.engine.request_snapshot("local://router")
    snapshot = watched.until(lambda: watched.seen[-1].snapshots).snapshots[0]
    assert snapshot.address == "local://router"
    assert snapshot.last_seq == len(stored)


def test_snapshots_come_in_pages_that_share_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two routers ask while the engine is idle, and one of them asks again before its last page."""
    monkeypatch.setattr(engine, "SNAPSHOT_PAGE_BLOCKS", 2)
    watched = Watched()
    pool, owner = watched.engine._scheduler._pool, SequenceId(RequestId("x"), 0, 0)
    chain = [BlockHash(bytes([number]) * 16) for number in range(5)]
    blocks = pool.allocate(owner, 5)
    pool.publish(owner, None, blocks, chain)
    pool.free(owner, blocks)
    for address in ("one", "two", "one"):
        watched.engine.request_snapshot(address)
    watched.engine.start()
    watched.until(lambda: sum(len(update.snapshots) for update in watched.seen) == 6)
    watched.engine.stop()
    assert all(len(update.snapshots) == 1 for update in watched.seen)
    pages = [page for update in watched.seen for page in update.snapshots]
    assert [page.address for page in pages] == ["one", "two"] * 3
    for address in ("one", "two"):
        mine = [page for page in pages if page.address == address]
        assert [(page.page, page.is_last, page.last_seq) for page in mine] == [
            (0, False, 1),
            (1, False, 1),
            (2, True, 1),
        ]
        assert b"".join(stored.hashes for page in mine for stored in page.chains) == b"".join(chain)
    assert watched.seen[0].kv_events == [BlocksStored(None, b"".join(chain))]


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


def test_a_refused_admission_changes_nothing_and_is_no_fault_of_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    for _ in range(2):
        watched.engine.add(request("a"), POSITIONS)
    watched.engine.start()
    watched.until(watched.finished)
    watched.engine.stop()
    (failed,) = [failed for u in watched.seen for failed in u.failed]
    assert type(failed.error) is ProtocolError
    assert watched.tokens("a") == [100, 101, 102], "the one that is here goes on"
    assert caplog.records == []


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


def test_a_refused_request_is_answered(watched: Watched) -> None:
    watched.engine.add(request("a"), Positions(np.arange(3)[None], 0))
    watched.engine.add(request("b"), POSITIONS)
    watched.until(lambda: "b" in watched.finished())
    assert list(watched.failed()) == ["a"]


def test_every_reference_is_given_back_once(watched: Watched) -> None:
    engine, references = watched.engine, [reference(UNIT) for _ in range(4)]
    engine.hold_feature(references[0])
    watched.until(watched.released)
    assert watched.released() == [(UNIT, (references[0],), ())], "no sequence needs it"
    engine.add(request("a", with_unit=True), POSITIONS)
    watched.until(lambda: watched.seen and watched.seen[-1].admitted)
    assert watched.seen[-1].admitted[0].admission.missing_units == (UNIT,)
    engine.hold_feature(references[1])
    watched.until(lambda: "a" in watched.finished())
    assert watched.given_back() == references[:2]
    engine.evict_feature(UNIT)
    engine.hold_feature(references[2])
    engine.hold_feature(references[3])
    watched.until(lambda: len(watched.given_back()) == 4)
    assert watched.given_back() == references
    assert all(not released.missed_by for released in watched.released())


def test_an_evicted_unit_is_missed_by_those_that_need_it() -> None:
    watched = Watched()
    commands = watched.engine
    commands.add(request("a", with_unit=True), POSITIONS)
    held = reference(UNIT)
    commands.hold_feature(held)
    commands.evict_feature(UNIT)
    commands.start()
    try:
        watched.until(watched.released)
        assert watched.released() == [(UNIT, (held,), (AttemptId(RequestId("a"), 0),))]
        watched.until(lambda: watched.seen[-1].stats.num_at_doorstep or watched.tokens("a"))
        assert watched.tokens("a") == []
        commands.abort(AttemptId(RequestId("a"), 0))
        watched.until(lambda: watched.seen[-1].aborted)
        assert watched.seen[-1].aborted[0].times.held_s >= 0.0
        assert watched.seen[-1].stats.kv_blocks_used == 0
    finally:
        commands.stop()


def test_a_step_of_prompt_tokens_is_told_before_it_is_computed(watched: Watched) -> None:
    watched.engine.add(request("a"), POSITIONS)
    watched.until(lambda: len(watched.finished()) == 1)
    (begun,) = [update for update in watched.seen if update.begun_work is not None]
    assert begun.begun_work == StepWork(0, 20.0), "steps that only decode are not told"
    assert [each.attempt.request_id for each in begun.admitted] == ["a"], "its requests are admitted by then"
    assert (begun.events, begun.step_work) == (None, None)
    ended = next(update for update in watched.seen if update.step_work is not None)
    assert ended.step_work == begun.begun_work
    assert ended.admitted == []
    assert (begun.stats.steps, ended.stats.steps) == (0, 1)


def test_a_report_says_how_long_the_running_step_takes() -> None:
    costs = [(StepWork(0, 10.0), 0.2), (StepWork(0, 20.0), 0.3), (StepWork(1, 0.0), 0.15), (StepWork(4, 0.0), 0.3)]
    reporter = WorkerReporter(MemberId("w"), WorkerConfig(), EngineStats(), FeatureStats)
    reporter.costs.fit(costs)
    assert (reporter.report(5.0).step_left_s, reporter.report(5.0).step_weighted_tokens) == (0.0, 0.0)
    stats = EngineStats(queued_weighted_tokens=50.0)
    reporter.take(Update(begun_work=StepWork(2, 30.0), at_s=10.0, stats=stats))
    whole_s = reporter.costs.seconds(StepWork(2, 30.0))
    assert whole_s == pytest.approx(0.1 + 2 * 0.05 + 30 * 0.01)
    assert reporter.report(10.0).step_left_s == pytest.approx(whole_s)
    report = reporter.report(10.2)
    assert report.step_left_s == pytest.approx(whole_s - 0.2)
    assert (report.step_weighted_tokens, report.engine.queued_weighted_tokens) == (30.0, 50.0)
    assert reporter.report(99.0).step_left_s == 0.0
    reporter.take(Update(step_work=StepWork(2, 30.0), step_s=whole_s, at_s=10.5, stats=EngineStats()))
    assert (reporter.report(10.5).step_left_s, reporter.report(10.5).step_weighted_tokens) == (0.0, 0.0)


def test_commands_in_one_turn_keep_their_order() -> None:
    watched = Watched()
    for attempt in range(3):
        watched.engine.add(request("a", attempt=attempt), POSITIONS)
        watched.engine.abort(AttemptId(RequestId("a"), attempt))
    watched.engine.start()
    try:
        watched.until(lambda: sum(len(u.aborted) for u in watched.seen) == 3)
        assert watched.executor.plans == []
    finally:
        watched.engine.stop()
    with pytest.raises(EngineFailed, match="stopped"):
        watched.engine.check_health()

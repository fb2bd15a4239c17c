"""Tests the engine thread with the real scheduler and an executor that draws from a table."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from scheduling_cases import reference
from watched_engine import POSITIONS, UNIT, Watched, request

from fabric.contracts import (
    AttemptId,
    BlockHash,
    BlocksStored,
    EngineFailed,
    EngineStats,
    FeatureStats,
    MemberId,
    ProtocolError,
    RequestId,
    SequenceId,
)
from llm_workers import engine_thread
from llm_workers.engine_interface import Update
from llm_workers.scheduling import StepWork
from llm_workers.worker_config import WorkerConfig
from llm_workers.worker_reports import WorkerReporter
from modalities.family import Positions


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
    monkeypatch.setattr(engine_thread, "SNAPSHOT_PAGE_BLOCKS", 2)
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


def test_an_adapter_is_refused_alone(watched: Watched) -> None:
    watched.engine.add(msgspec.structs.replace(request("a"), adapter="poet"), POSITIONS)
    watched.engine.add(request("b"), POSITIONS)
    watched.until(lambda: watched.finished())
    (failed,) = [failed for update in watched.seen for failed in update.failed]
    assert (failed.attempt.request_id, failed.error.code) == ("a", "model_not_found")
    assert failed.error.message == "workers.engine is weft, which has no adapter `poet`"
    assert watched.finished() == {"b": "length"}

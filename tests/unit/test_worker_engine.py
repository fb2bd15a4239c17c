"""The engine thread with the real scheduler and an executor that draws from a table."""

from __future__ import annotations

import queue

import numpy as np
import pytest

from fabric.clock import SystemClock
from fabric.errors import EngineFailed
from fabric.ids import AttemptId, MemberId, MmHash, RequestId, UnitKey
from fabric.messages import GenerateRequest, MediaItem, PlaceholderRange, SamplingParams, StopConditions
from llm_workers.config import WorkerConfig
from llm_workers.engine import MAX_FAILED_STEPS, Engine
from llm_workers.scheduling.plan import StepResult
from llm_workers.scheduling.scheduler import Scheduler
from modalities.family import Positions

UNIT = UnitKey(MmHash("ab"), 0)


def request(name, num_tokens=3, with_unit=False, attempt=0):
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


class Executor:
    """Draws 100 + draw index. `broken` request ids raise, `infinite` ones give a negative token."""

    def __init__(self):
        self.broken, self.infinite = set(), set()
        self.is_dead = False
        self.plans = []

    def execute(self, plan):
        self.plans.append(plan)
        if self.is_dead or any(chunk.sequence_id.request_id in self.broken for chunk in plan.chunks):
            raise RuntimeError("poisoned")
        return StepResult(
            {
                chunk.sequence_id: (-1 if chunk.sequence_id.request_id in self.infinite else 100 + chunk.draw_index,)
                for chunk in plan.chunks
                if chunk.sampling is not None
            }
        )


class Watched:
    """An engine whose updates are collected until something is true."""

    def __init__(self, **config):
        self.executor, self._updates = Executor(), queue.SimpleQueue()
        clock = SystemClock()
        scheduler = Scheduler(WorkerConfig(block_size=4, num_blocks=64, **config), 1000, clock)
        self.engine = Engine(scheduler, self.executor, clock, self._updates.put)
        self.seen = []

    def until(self, is_true):
        while not is_true():
            self.seen.append(self._updates.get(timeout=10.0))
        return self.seen[-1]

    def tokens(self, name):
        frames = [t for u in self.seen if u.events for t in u.events.tokens if t.sequence_id.request_id == name]
        return [token for frame in frames for token in frame.token_ids]

    def finished(self):
        return {f.sequence_id.request_id: f.finish_reason for u in self.seen if u.events for f in u.events.finished}

    def failed(self):
        return {f.attempt.request_id: f.error for u in self.seen for f in u.failed}

    def deaths(self):
        return [u.death for u in self.seen if u.death]

    def let_go(self):
        return [let_go for u in self.seen for let_go in u.let_go]


@pytest.fixture
def watched():
    watched = Watched()
    watched.engine.start()
    yield watched
    watched.engine.stop()


def test_requests_run_to_their_end_and_leave_nothing(watched):
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


def test_one_poisoned_request_ends_alone(watched):
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


def test_a_device_that_fails_every_step_ends_the_engine(watched):
    watched.executor.is_dead = True
    for number in range(MAX_FAILED_STEPS):
        watched.engine.check_health()
        watched.engine.add(request(f"r{number}"), POSITIONS)
        watched.until(lambda number=number: len(watched.failed()) > number or watched.deaths())
    assert [type(death) for death in watched.deaths()] == [EngineFailed]
    with pytest.raises(EngineFailed, match="died"):
        watched.engine.check_health()


def test_a_refused_request_is_answered(watched):
    watched.engine.add(request("a"), Positions(np.arange(3)[None], 0))
    watched.engine.add(request("b"), POSITIONS)
    watched.until(lambda: "b" in watched.finished())
    assert list(watched.failed()) == ["a"]


def test_every_word_on_a_unit_is_answered_once(watched):
    engine = watched.engine
    engine.unit_landed(UNIT)
    watched.until(watched.let_go)
    assert watched.let_go() == [(UNIT, 1, ())], "landed for nobody"
    engine.add(request("a", with_unit=True), POSITIONS)
    watched.until(lambda: watched.seen and watched.seen[-1].admitted)
    assert watched.seen[-1].admitted[0].admission.missing_units == (UNIT,)
    engine.unit_landed(UNIT)
    watched.until(lambda: "a" in watched.finished())
    assert sum(let_go.num_told for let_go in watched.let_go()) == 2
    engine.evict_unit(UNIT)
    engine.unit_landed(UNIT)
    engine.unit_landed(UNIT)
    watched.until(lambda: sum(let_go.num_told for let_go in watched.let_go()) == 4)
    assert all(not let_go.missed_by for let_go in watched.let_go())


def test_an_evicted_unit_is_missed_by_those_that_need_it():
    watched = Watched()
    commands = watched.engine
    commands.add(request("a", with_unit=True), POSITIONS)
    commands.unit_landed(UNIT)
    commands.evict_unit(UNIT)
    commands.start()
    try:
        watched.until(watched.let_go)
        assert watched.let_go() == [(UNIT, 1, (AttemptId(RequestId("a"), 0),))]
        watched.until(lambda: watched.seen[-1].stats.num_at_doorstep or watched.tokens("a"))
        assert watched.tokens("a") == []
        commands.abort(AttemptId(RequestId("a"), 0))
        watched.until(lambda: watched.seen[-1].aborted)
        assert watched.seen[-1].aborted[0].times.held_s >= 0.0
        assert watched.seen[-1].stats.kv_blocks_used == 0
    finally:
        commands.stop()


def test_commands_in_one_turn_keep_their_order():
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

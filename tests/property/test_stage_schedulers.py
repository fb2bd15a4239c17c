"""Drives the schedulers of stages through random histories with a model that only counts.

An autoregressive request has rows of a prompt, and then one row for each token that chunks bring; each of these rows
needs the output of the row before it. A request of the other kind has units that chunks bring, and no order between
them. In both kinds each step must compute only what is ready, once, within the limits, and in the end everything. With
a pacing, listeners play each unit for a second, and what they need first must come first."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stage_chunks import chunk, stage_request

from fabric.contracts import ConfigError, ManualClock, ProtocolError, StageKey
from llm_workers.stages import (
    ArStageScheduler,
    GenerationStageScheduler,
    LoadedChunks,
    Pacing,
    RestoredRequest,
    StageChunk,
    StageScheduler,
    StageStatus,
    StageStep,
)

BLOCK = 4


@dataclass
class Counted:
    """Holds what the model and the adapter of the test know of one request."""

    name: str
    num_prompt: int
    sizes: deque[int]
    """Holds the units of the chunks that have not arrived yet."""
    arrived: list[StageChunk] = field(default_factory=list)
    num_chunks: int = 0
    num_units: int = 0
    """Counts the units of the chunks that the model has received."""
    num_made: int = 0
    """Counts the units that were computed at least once."""
    num_computed: int = 0
    has_last: bool = False
    is_waiting: bool = False
    due_s: float | None = None
    """Says when its listener has heard everything."""

    @property
    def is_complete(self) -> bool:
        return self.has_last and self.num_made == self.num_prompt + self.num_units


class CountingSource:
    """Implements `ChunkSource` on the requests of the test."""

    def __init__(self, requests: dict[StageKey, Counted]) -> None:
        self._requests = requests

    def load_async(self, key: StageKey) -> None:
        found = self._requests[key]
        assert not found.is_waiting
        assert not found.has_last
        found.is_waiting = True

    def get_finished_requests(self) -> list[StageKey]:
        return [key for key, found in self._requests.items() if found.is_waiting and found.arrived]

    def take(self, key: StageKey) -> LoadedChunks:
        found = self._requests[key]
        found.is_waiting = False
        chunks, found.arrived = tuple(found.arrived), []
        return LoadedChunks(chunks)


class SchedulerMachine(RuleBasedStateMachine):
    is_autoregressive = True
    is_just_in_time = False

    @initialize(
        max_num_seqs=st.integers(1, 4),
        num_blocks=st.integers(5, 14),
        max_step_units=st.integers(1, 12),
        max_states=st.integers(1, 4),
    )
    def begin(self, max_num_seqs: int, num_blocks: int, max_step_units: int, max_states: int) -> None:
        self.requests: dict[StageKey, Counted] = {}
        self.max_num_seqs, self.max_step_units, self.num_blocks = max_num_seqs, max_step_units, num_blocks
        self.num_opened = 0
        source = CountingSource(self.requests)
        self.scheduler = self.new_scheduler(source, max_states)

    def new_scheduler(self, source: CountingSource, max_states: int) -> StageScheduler:
        limits = self.max_num_seqs, self.num_blocks, BLOCK, self.max_step_units
        return ArStageScheduler(source, self.ready, *limits)

    def ready(self, key: StageKey) -> int:
        found = self.requests[key]
        if self.is_autoregressive:
            num_outputs = max(found.num_made - found.num_prompt, 0)
            return found.num_prompt + min(found.num_units, num_outputs + 1)
        return found.num_units

    @rule(num_prompt=st.integers(1, 14), sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4))
    def open(self, num_prompt: int, sizes: list[int]) -> None:
        self.num_opened += 1
        name = f"r{self.num_opened}"
        # Requests arrive out of the order of their age.
        request = stage_request(name, arrived_s=float(self.num_opened ^ 1))
        prompt = num_prompt if self.is_autoregressive else 0
        while prompt + sum(sizes) > self.num_blocks * BLOCK:
            prompt -= 1
        self.requests[request.key] = Counted(name, max(prompt, 0), deque(sizes))
        self.scheduler.add(request)
        with pytest.raises(ProtocolError):
            self.scheduler.add(request)

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def arrive(self, data: st.DataObject) -> None:
        """A chunk reaches the adapter."""
        self.bring(self.requests[data.draw(st.sampled_from(sorted(self.requests)))])

    def bring(self, found: Counted) -> None:
        if found.sizes:
            size = found.sizes.popleft()
            found.arrived.append(chunk(found.name, found.num_chunks, not found.sizes, size))
            found.num_chunks += 1

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.requests)))
        self.scheduler.remove(key)
        self.scheduler.remove(key)
        del self.requests[key]

    @rule(is_early=st.booleans(), failing=st.sets(st.integers(0, 3), max_size=2))
    def step(self, is_early: bool, failing: set[int]) -> None:
        if is_early:
            self.receive(self.scheduler.take_chunks())
        waiting = {key for key, found in self.requests.items() if self.is_at_rest(key)}
        plan = self.scheduler.schedule()
        for key in plan.preempted:
            self.requests[key].num_computed = 0
        self.check(plan, waiting)
        done = [span for place, span in enumerate(plan.spans) if place not in failing]
        for span in done:
            found = self.requests[span.key]
            found.num_computed += span.num_units
            found.num_made = max(found.num_made, found.num_computed)
            self.played_later(found, span.num_units)
        self.scheduler.commit(done)
        self.receive(plan.restored)
        for key in plan.idle:
            assert self.requests[key].is_complete or key in {each.key for each in plan.restored}
        for key in [key for key, found in self.requests.items() if found.is_complete]:
            self.scheduler.remove(key)
            del self.requests[key]

    def receive(self, restored: tuple[RestoredRequest, ...]) -> None:
        for key, loaded in restored:
            found = self.requests[key]
            for each in loaded.chunks:
                found.num_units += each.payload["value"]
                found.has_last = each.is_last

    def check(self, plan: StageStep, waiting: set[StageKey]) -> None:
        keys = [span.key for span in plan.spans]
        assert len(set(keys)) == len(keys) <= self.max_num_seqs
        assert sum(span.num_units for span in plan.spans) <= self.max_step_units
        assert not waiting & set(keys)
        assert not plan.refused
        blocks = [block for span in plan.spans for block in span.block_ids.tolist()]
        assert len(set(blocks)) == len(blocks)
        for span in plan.spans:
            assert span.num_units >= 1
            assert span.start == self.requests[span.key].num_computed
            assert span.start + span.num_units <= self.ready(span.key)
            if self.is_autoregressive:
                assert len(span.block_ids) == -(-(span.start + span.num_units) // BLOCK)
        can_go = [key for key in self.requests if self.can_go(key)]
        # Requests that wait for a chunk, or that end with this step, may hold what the others need.
        num_others = len(plan.restored) + len(plan.idle) + sum(found.is_waiting for found in self.requests.values())
        if not num_others and can_go:
            assert keys, "a step computes something"

    def is_at_rest(self, key: StageKey) -> bool:
        return self.requests[key].is_waiting and not (self.is_just_in_time and self.has_units(key))

    def has_units(self, key: StageKey) -> bool:
        return self.ready(key) > self.requests[key].num_computed

    def can_go(self, key: StageKey) -> bool:
        return self.has_units(key)

    def played_later(self, found: Counted, num_units: int) -> None:
        """Notes that a listener has more to hear."""

    @invariant()
    @precondition(lambda self: hasattr(self, "scheduler"))
    def bookkeeping_is_consistent(self) -> None:
        self.scheduler.check_invariants()
        assert len(self.scheduler) == len(self.requests)
        num_waiting = sum(self.is_at_rest(key) for key in self.requests)
        found = self.scheduler.count(StageStatus.WAITING_FOR_CHUNK)
        # Just in time, a request that has asked early and was then computed leaves the queues before the next step.
        assert found == num_waiting or (self.is_just_in_time and found < num_waiting)

    def pause(self) -> None:
        """Lets time pass."""

    def teardown(self) -> None:
        """Lets all chunks arrive, and finds that every request ends and nothing is held."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(60 * (len(self.requests) + 1)):
            for found in self.requests.values():
                self.bring(found)
            self.pause()
            self.step(True, set())
            self.bookkeeping_is_consistent()
        assert not self.requests
        assert self.scheduler.pool_used == 0


class GenerationMachine(SchedulerMachine):
    is_autoregressive = False

    def new_scheduler(self, source: CountingSource, max_states: int) -> StageScheduler:
        return GenerationStageScheduler(source, self.ready, self.max_num_seqs, max_states, self.max_step_units)

    def check(self, plan: StageStep, waiting: set[StageKey]) -> None:
        super().check(plan, waiting)
        for span in plan.spans[1:]:
            assert span.start + span.num_units == self.ready(span.key), "only the first request of a step is split"


class PacedMachine(GenerationMachine):
    PATIENCE_S = 2.0

    def new_scheduler(self, source: CountingSource, max_states: int) -> StageScheduler:
        self.clock = ManualClock()
        pacing = Pacing(1.0, self.clock, self.is_just_in_time, not self.is_just_in_time, self.PATIENCE_S)
        return GenerationStageScheduler(source, self.ready, self.max_num_seqs, max_states, self.max_step_units, pacing)

    @rule(seconds=st.sampled_from([0.25, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def pause(self) -> None:
        self.clock.advance(1.0)

    def played_later(self, found: Counted, num_units: int) -> None:
        now_s = self.clock.now()
        found.due_s = max(now_s, now_s if found.due_s is None else found.due_s) + num_units

    def is_urgent(self, key: StageKey) -> bool:
        due_s = self.requests[key].due_s
        return due_s is None or due_s <= self.clock.now() + self.PATIENCE_S

    def can_go(self, key: StageKey) -> bool:
        is_early = self.is_just_in_time and not self.requests[key].has_last and not self.is_urgent(key)
        return self.has_units(key) and not is_early

    def check(self, plan: StageStep, waiting: set[StageKey]) -> None:
        super().check(plan, waiting)
        chosen = {span.key for span in plan.spans}
        num_left = self.max_step_units - sum(span.num_units for span in plan.spans)
        restored = {each.key for each in plan.restored}
        for key in self.requests.keys() - restored:
            has_begun = self.requests[key].num_computed > 0
            if has_begun and self.has_units(key) and self.is_urgent(key) and key not in chosen:
                num_ready = self.ready(key) - self.requests[key].num_computed
                is_full = len(chosen) == self.max_num_seqs or num_ready > num_left
                assert is_full, "a listener who needs more is passed over only if the step is full"
                due_s = self.requests[key].due_s
                first_due_s = self.requests[plan.spans[0].key].due_s
                assert first_due_s is None or due_s is None or first_due_s <= due_s
        if self.is_just_in_time:
            assert all(self.can_go(key) for key in chosen)
            assert len({self.is_urgent(key) for key in chosen}) <= 1, "what can wait delays nothing that is urgent"


class JustInTimeMachine(PacedMachine):
    is_just_in_time = True


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
GenerationMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
PacedMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
JustInTimeMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestPacedScheduler = PacedMachine.TestCase
TestJustInTimeScheduler = JustInTimeMachine.TestCase
TestArScheduler = SchedulerMachine.TestCase
TestGenerationScheduler = GenerationMachine.TestCase


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "max_step_units", "max_num_seqs"])
def test_limits_that_allow_no_step_are_refused(name: str) -> None:
    limits = {"max_num_seqs": 1, "num_blocks": 1, "block_size": 1, "max_step_units": 1, name: 0}
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not 0"):
        ArStageScheduler(CountingSource({}), len, **limits)


def test_a_request_that_outgrows_the_pool_is_refused() -> None:
    requests: dict[StageKey, Counted] = {}
    scheduler = ArStageScheduler(CountingSource(requests), lambda key: requests[key].num_prompt, 4, 4, BLOCK, 100)
    for name, num_rows in (("fits", 16), ("large", 17)):
        request = stage_request(name)
        requests[request.key] = Counted(name, num_rows, deque())
        scheduler.add(request)
    plan = scheduler.schedule()
    assert [(span.key, span.num_units) for span in plan.spans] == [("fits.0", 16)]
    assert [(key, error.code) for key, error in plan.refused] == [("large.0", "context_length_exceeded")]


def test_the_youngest_is_preempted_and_begins_again() -> None:
    rows = {StageKey("old.0"): 8, StageKey("young.0"): 8}
    scheduler = ArStageScheduler(CountingSource({}), lambda key: rows[key], 4, 4, BLOCK, 100)
    scheduler.add(stage_request("young", arrived_s=2.0))
    scheduler.add(stage_request("old", arrived_s=1.0))
    plan = scheduler.schedule()
    assert [(span.key, span.start, span.num_units) for span in plan.spans] == [("old.0", 0, 8), ("young.0", 0, 8)]
    scheduler.commit(plan.spans)
    rows[StageKey("old.0")] = 9
    rows[StageKey("young.0")] = 9
    plan = scheduler.schedule()
    assert [(span.key, span.start, span.num_units) for span in plan.spans] == [("old.0", 8, 1)]
    assert plan.preempted == ("young.0",)
    scheduler.commit(plan.spans)
    scheduler.remove(StageKey("old.0"))
    plan = scheduler.schedule()
    assert [(span.key, span.start, span.num_units) for span in plan.spans] == [("young.0", 0, 9)]
    assert plan.spans[0].block_ids.dtype == np.int64


def test_a_long_prompt_leaves_a_row_to_each_request_behind_it() -> None:
    rows = {StageKey("long.0"): 100, StageKey("b.0"): 1, StageKey("c.0"): 1}
    scheduler = ArStageScheduler(CountingSource({}), lambda key: rows[key], 4, 100, BLOCK, 10)
    for place, name in enumerate(["long", "b", "c"]):
        scheduler.add(stage_request(name, arrived_s=float(place)))
    plan = scheduler.schedule()
    assert [(span.key, span.num_units) for span in plan.spans] == [("long.0", 8), ("b.0", 1), ("c.0", 1)]


def test_a_request_that_waits_for_a_chunk_gives_its_place_to_another() -> None:
    requests = {StageKey(f"r{place}.0"): Counted(f"r{place}", 0, deque([1, 1])) for place in range(3)}
    scheduler = GenerationStageScheduler(CountingSource(requests), lambda key: requests[key].num_units, 1, 3, 100)
    for place in range(3):
        scheduler.add(stage_request(f"r{place}", arrived_s=float(place)))
    requests[StageKey("r2.0")].num_units = 5
    plan = scheduler.schedule()
    assert [(span.key, span.num_units) for span in plan.spans] == [("r2.0", 5)]
    assert scheduler.count(StageStatus.WAITING_FOR_CHUNK) == 2
    assert scheduler.count(StageStatus.RUNNING) == 1

"""Drives the adapters of two stages through random histories, without threads and with a virtual clock. Puts fail and
arrive twice, chunks come late and before their request, requests are aborted, fail, and come again with the same key.

The model is a list of numbers for each life of a request: the consumer must see a beginning of what its own producer
has made, all of it if nothing has ended early, and never anything of another life."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stage_chunks import FlakyConnector, numbers_in_pairs, stage_request, target_of

from fabric.contracts import ErrorInfo, ManualClock, StageKey, StageRequest, WeftError
from fabric.transport import LocalStageConnector, LocalStageHub
from llm_workers.stages import ChunkPatience, ChunkSettings, ChunkTransferAdapter, SaveRetries, StageOutput

NAMES = st.sampled_from(["a", "b", "a_1", "a.0_0"])
STALL_S = 20.0
GIVE_UP_S = 8.0


class Life:
    """Holds what the test knows of one request, from its opening at either side to its end at both."""

    def __init__(self, name: str, age_s: float, producer: StageRequest, consumer: StageRequest) -> None:
        self.name, self.age_s, self.producer, self.consumer = name, age_s, producer, consumer
        self.made: list[int] = []
        self.seen: list[int] = []
        self.is_producing = self.is_consuming = False
        self.was_opened_here = self.was_opened_there = False
        self.is_finished = self.is_waiting = self.has_last = False
        self.has_failed = False


class TransferMachine(RuleBasedStateMachine):
    @initialize(is_async=st.booleans())
    def begin(self, is_async: bool) -> None:
        self.clock = ManualClock()
        hub = LocalStageHub()
        self.sender, self.owner = FlakyConnector(LocalStageConnector(hub)), LocalStageConnector(hub)
        self.saved: dict[StageKey, WeftError | None] = {}
        self.num_loaded = 0
        out = ChunkSettings(numbers_in_pairs, is_async, retries=SaveRetries(0.5, 4.0, GIVE_UP_S))
        into = ChunkSettings(patience=ChunkPatience(STALL_S, STALL_S, early_s=30.0))
        self.producer = ChunkTransferAdapter({"in_process": self.sender}, self.clock, out, on_saved=self._note_saved)
        self.consumer = ChunkTransferAdapter({"in_process": self.owner}, self.clock, into, self._note_loaded)
        self.lives: dict[str, Life] = {}

    def _note_saved(self, key: StageKey, error: WeftError | None) -> None:
        self.saved[key] = error
        life = next(each for each in self.lives.values() if each.producer.key == key)
        life.is_producing = False
        life.has_failed |= error is not None

    def _note_loaded(self) -> None:
        self.num_loaded += 1

    # ------------------------------------------------------------ the stages

    @rule(name=NAMES)
    def arrive(self, name: str) -> None:
        """The router plans a request; a name comes again once its former life has ended at both sides."""
        if name in self.lives:
            return
        age_s = self.clock.now()
        self.clock.advance(0.001)
        producer = stage_request(name, 0, age_s, target_of(self.owner))
        self.lives[name] = Life(name, age_s, producer, stage_request(name, 1, age_s))

    @rule(name=NAMES)
    def open_at_producer(self, name: str) -> None:
        life = self.lives.get(name)
        if life is not None and not life.was_opened_there:
            life.was_opened_there = life.is_producing = True
            self.producer.open(life.producer)

    @rule(name=NAMES)
    def open_at_consumer(self, name: str) -> None:
        life = self.lives.get(name)
        if life is not None and not life.was_opened_here:
            life.was_opened_here = life.is_consuming = True
            self.consumer.open(life.consumer)

    @rule(name=NAMES, count=st.integers(0, 4), is_finished=st.booleans())
    def produce(self, name: str, count: int, is_finished: bool) -> None:
        life = self.lives.get(name)
        if life is None or not life.is_producing or life.is_finished:
            return
        first = len(life.made)
        numbers = [int(life.age_s * 1000) * 1000 + first + place for place in range(count)]
        life.made += numbers
        life.is_finished = is_finished
        output = StageOutput({"number": np.array(numbers, dtype=np.int64)}, is_finished, count)
        self.producer.save_async(output, life.producer)

    @rule(name=NAMES, is_failure=st.booleans())
    def end_at_producer(self, name: str, is_failure: bool) -> None:
        life = self.lives.get(name)
        if life is None or not life.is_producing:
            return
        self.producer.abort(life.producer, ErrorInfo("engine_failed", "it broke") if is_failure else None)
        life.is_producing, life.has_failed = False, True
        num_puts = len(self.sender.put_keys)
        self.producer.save_once()
        later = [key for key in self.sender.put_keys[num_puts:] if key.startswith(f"{life.producer.key}_0_")]
        assert len(later) <= is_failure

    @rule(name=NAMES)
    def end_at_consumer(self, name: str) -> None:
        life = self.lives.get(name)
        if life is not None and life.is_consuming:
            self.consumer.abort(life.consumer)
            life.is_consuming, life.has_failed = False, True

    @rule(name=NAMES)
    def forget(self, name: str) -> None:
        life = self.lives.get(name)
        if life is None or life.is_producing or life.is_consuming:
            return
        if life.was_opened_here and life.was_opened_there:
            del self.lives[name]

    # ------------------------------------------------------------ the loops

    @rule(outcomes=st.lists(st.sampled_from(["good", "lost", "doubtful"]), max_size=6))
    def save(self, outcomes: list[str]) -> None:
        left = iter(outcomes)
        self.sender.next_put = lambda: next(left, "good")
        self.producer.save_once()

    @rule()
    def receive(self) -> None:
        self.consumer.receive_once("in_process", 0.0)

    @rule(seconds=st.sampled_from([0.3, 1.0, 5.0, 25.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # ------------------------------------------------------------ the consumer's scheduler

    @rule()
    def schedule(self) -> None:
        for life in self.lives.values():
            if life.is_consuming and not life.has_last and not life.is_waiting:
                self.consumer.load_async(life.consumer.key)
                life.is_waiting = True
        key_to_life = {life.consumer.key: life for life in self.lives.values() if life.is_consuming}
        for key in self.consumer.get_finished_requests():
            life = key_to_life[key]
            assert life.is_waiting
            self._take(life)

    def _take(self, life: Life) -> None:
        loaded = self.consumer.take(life.consumer.key)
        life.is_waiting = False
        if loaded.error is not None:
            assert loaded.error.code in ("stage_stalled", "engine_failed")
            assert loaded.error.code != "engine_failed" or life.has_failed
            self.consumer.close(life.consumer.key)
            life.is_consuming, life.has_failed = False, True
            return
        for chunk in loaded.chunks:
            assert not life.has_last
            if "numbers" in chunk.payload:
                life.seen += chunk.payload["numbers"].tolist()
            life.has_last = chunk.is_last
        assert life.seen == life.made[: len(life.seen)]
        if life.has_last:
            assert life.seen == life.made
            self.consumer.close(life.consumer.key)
            life.is_consuming = False

    # ------------------------------------------------------------ what holds

    @invariant()
    @precondition(lambda self: hasattr(self, "consumer"))
    def bookkeeping_is_consistent(self) -> None:
        self.consumer._inputs.check_invariants()
        open_here = sum(life.is_consuming for life in self.lives.values())
        assert self.consumer.num_open == open_here
        assert self.producer.num_open == sum(life.is_producing for life in self.lives.values())

    def teardown(self) -> None:
        """Lets all that goes on end well, unless it has failed, and finds nothing left anywhere."""
        if not hasattr(self, "consumer"):
            return
        self._finish_all()
        for life in self.lives.values():
            assert life.has_failed or life.seen == life.made
        self.clock.advance(1000.0)
        self.producer.save_once()
        self.consumer.receive_once("in_process", 0.0)
        self.clock.advance(1000.0)
        self.consumer.receive_once("in_process", 0.0)
        self.consumer.receive_once("in_process", 0.0)
        assert self.producer.num_open == self.consumer.num_open == 0
        assert self.producer.num_held == self.consumer.num_held == 0
        assert self.owner.discard("") == 0

    def _finish_all(self) -> None:
        steps: list[Callable[[], None]] = [self.receive, self.schedule, self.receive, self.schedule]
        self.sender.next_put = lambda: "good"
        for name, life in list(self.lives.items()):
            self.open_at_consumer(name)
            self.open_at_producer(name)
            self.produce(name, 3, True)
            assert life.was_opened_here
        for _ in range(4):
            self.producer.save_once()
            for step in steps:
                step()
            self.clock.advance(3.0)
        for name in list(self.lives):
            self.end_at_consumer(name) if self.lives[name].has_failed else None


TransferMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
TestTransfers = TransferMachine.TestCase

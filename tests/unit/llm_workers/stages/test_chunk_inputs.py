"""Tests the bookkeeping of arriving chunks: order, fences, early chunks and the stall clock."""

from __future__ import annotations

import math

from stage_chunks import chunk

from fabric.contracts import ErrorInfo, RequestId, StageKey, stage_key
from llm_workers.stages import ChunkInputs, ChunkPatience, Disposition, ReceivedChunk

PATIENCE = ChunkPatience(stall_s=5.0, first_stall_s=60.0, early_s=10.0)
AGE = (0.0, "r")
KEY = stage_key(RequestId("r"), 0)


def received(number: int, is_last: bool = False, age: tuple[float, str] = AGE) -> ReceivedChunk:
    return ReceivedChunk(chunk("r", number, is_last), age, None)


def opened() -> ChunkInputs[str]:
    inputs: ChunkInputs[str] = ChunkInputs(PATIENCE)
    assert inputs.open(KEY, AGE) == []
    return inputs


def numbers(inputs: ChunkInputs[str]) -> list[int]:
    return [each.number for each in inputs.take(KEY).chunks]


def test_chunks_come_in_order_and_none_is_lost() -> None:
    inputs = opened()
    inputs.wait(KEY, 0.0)
    assert not inputs.deliver(received(2))
    assert not inputs.deliver(received(1))
    assert inputs.loaded() == []
    assert inputs.deliver(received(0))
    assert inputs.loaded() == [KEY]
    assert inputs.loaded() == []
    assert numbers(inputs) == [0, 1, 2]
    assert not inputs.deliver(received(1))
    assert not inputs.deliver(received(3, is_last=True))
    inputs.wait(KEY, 1.0)
    assert inputs.loaded() == [KEY]
    assert numbers(inputs) == [3]
    assert not inputs.deliver(received(4))
    assert inputs.num_held == 0
    inputs.check_invariants()


def test_chunks_of_a_closed_request_are_dropped() -> None:
    inputs = opened()
    inputs.deliver(received(1))
    inputs.close(KEY)
    inputs.close(KEY)
    assert inputs.announce(KEY, "entry", 0.0) is Disposition.DROP
    assert not inputs.deliver(received(0))
    assert inputs.num_held == len(inputs) == 0


def test_a_key_that_comes_again_gets_no_chunk_of_its_former_request() -> None:
    inputs = opened()
    inputs.close(KEY)
    assert inputs.open(KEY, (7.0, "r")) == []
    inputs.wait(KEY, 0.0)
    assert inputs.announce(KEY, "old", 0.0) is Disposition.READ
    assert not inputs.deliver(received(0))
    assert inputs.deliver(received(0, age=(7.0, "r")))
    assert numbers(inputs) == [0]


def test_chunks_before_their_request_are_kept_for_a_while() -> None:
    inputs: ChunkInputs[str] = ChunkInputs(PATIENCE)
    assert inputs.announce(KEY, "first", 0.0) is Disposition.KEEP
    assert inputs.announce(KEY, "second", 1.0) is Disposition.KEEP
    assert inputs.announce(KEY, "first", 2.0) is Disposition.KEEP
    assert inputs.announce(StageKey("other.0"), "third", 5.0) is Disposition.KEEP
    assert inputs.num_held == 3
    assert inputs.open(KEY, AGE) == ["first", "second"]
    assert inputs.expire(14.9) == ([], [])
    assert inputs.expire(15.0) == ([], ["third"])
    assert inputs.num_held == 0
    inputs.check_invariants()


def test_a_wait_stalls_by_its_own_clock() -> None:
    inputs = opened()
    assert inputs.next_stall_s() == math.inf
    assert inputs.expire(1e9) == ([], [])
    inputs.wait(KEY, 10.0)
    inputs.wait(KEY, 50.0)  # The clock of the wait runs already.
    assert inputs.next_stall_s() == 70.0
    assert inputs.expire(69.9) == ([], [])
    inputs.deliver(received(0))
    assert inputs.expire(1e9) == ([], [])
    assert numbers(inputs) == [0]
    inputs.wait(KEY, 80.0)
    assert inputs.expire(84.9) == ([], [])
    assert inputs.expire(85.0) == ([KEY], [])
    assert inputs.loaded() == [KEY]
    loaded = inputs.take(KEY)
    assert loaded.chunks == ()
    assert loaded.error is not None
    assert loaded.error.code == "stage_stalled"
    assert str(loaded.error) == "chunk 1 from the stage before did not come in 5.0 s"


def test_an_error_chunk_ends_the_wait_at_once() -> None:
    inputs = opened()
    inputs.wait(KEY, 0.0)
    failed = ReceivedChunk(chunk("r", 9, is_last=True), AGE, ErrorInfo("engine_failed", "it broke"))
    assert inputs.deliver(failed)
    assert inputs.loaded() == [KEY]
    assert inputs.take(KEY).error.code == "engine_failed"

"""Tests the sink of pulled features with a reader that ends its reads when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from math import exp, log

import numpy as np
import pytest

from fabric.contracts import FeatureTicket, LeaseLost, ManualClock, TransferFailed, corrected
from fabric.transport import HEADER_BYTES, LandedFeature, LocalChannelHub, LocalFeatureSink, LocalFeatureSource, pulling
from fabric.transport.feature_channel import SlotMemory
from fabric.transport.pulling import PullingSink, ReadState
from fabric.transport.transfer_memory import MemoryPlace

WAIT_S = 20.0
SLOT_BYTES = 64 + HEADER_BYTES


class ScriptedReader:
    """A `ScriptedReader` keeps each read pending until the test sets how the read ends, and records what is released
    and disconnected."""

    def __init__(self, slots: SlotMemory) -> None:
        self.slots = slots
        self.posted: list[tuple[str, int, int, int]] = []
        self.state_of: dict[int, ReadState] = {}
        self.released: list[int] = []
        self.disconnected: list[str] = []
        self.is_refusing = False
        self.is_closed = self.is_broken = False
        self.changed = threading.Condition()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def post(self, ticket: FeatureTicket, source: MemoryPlace, target: MemoryPlace) -> int:
        with self.changed:
            if self.is_refusing:
                raise TransferFailed("no way there")
            offset = target.address - self.slots.address
            self.posted.append((ticket.source, source.address, offset, source.nbytes))
            self.changed.notify_all()
        assert self.goes_on.wait(WAIT_S)
        return len(self.posted) - 1

    def state(self, read: int) -> ReadState:
        if self.is_broken:
            raise RuntimeError("a bug")
        return self.state_of.get(read, ReadState.PENDING)

    def release(self, read: int) -> None:
        self.released.append(read)

    def disconnect(self, source: str) -> None:
        with self.changed:
            self.disconnected.append(source)
            self.changed.notify_all()

    def close(self) -> None:
        self.is_closed = True

    def wait_for(self, num_posted: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.posted) >= num_posted, WAIT_S)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def reader() -> ScriptedReader:
    return ScriptedReader(SlotMemory(4096))


@pytest.fixture
def sink(reader: ScriptedReader, clock: ManualClock) -> Iterator[PullingSink]:
    made = PullingSink("worker-1", reader.slots, reader, clock)
    yield made
    made.close()


def ticket(source: str = "encoder-1", generation: int = 7) -> FeatureTicket:
    return FeatureTicket(source, b"", 5000, 4000, 64, generation, (1, 2, 8), "float32", 60.0)


def error_of(future: Future[LandedFeature]) -> BaseException:
    error = future.exception(WAIT_S)
    assert error is not None
    return error


def test_a_pull_reads_the_payload_then_the_word_and_is_held_against_it(
    reader: ScriptedReader, sink: PullingSink, clock: ManualClock
) -> None:
    future = sink.pull(ticket(), timeout_s=5.0)
    reader.wait_for(1)
    source, address, offset, nbytes = reader.posted[0]
    assert (source, address, nbytes) == ("encoder-1", 5000, 64)
    reader.slots.memory[offset : offset + 64] = np.arange(64, dtype=np.uint8)
    clock.advance(0.25)
    reader.state_of[0] = ReadState.DONE
    reader.wait_for(2)
    word = reader.posted[1]
    assert word == ("encoder-1", 4000, offset - HEADER_BYTES, 8)
    assert not future.done(), "not before the word is known"
    reader.slots.memory[word[2] : word[2] + 8] = np.frombuffer((7).to_bytes(8, "little"), np.uint8)
    reader.state_of[1] = ReadState.DONE
    landed = future.result(WAIT_S)
    assert bytes(landed.buffer) == bytes(range(64))
    assert landed.seconds == 0.25
    assert landed.ticket == ticket()
    assert reader.released == [0, 1]
    sink.free(landed.slot_id)
    assert sink.usage().used_bytes == 0


def test_a_slot_that_was_given_away_meanwhile_is_a_lost_lease(reader: ScriptedReader, sink: PullingSink) -> None:
    reader.state_of = {0: ReadState.DONE, 1: ReadState.DONE}
    error = error_of(sink.pull(ticket(generation=9), timeout_s=5.0))
    assert isinstance(error, LeaseLost)
    assert error.message == "encoder-1 has given the slot to another feature"
    assert sink.usage().used_bytes == 0


def test_reads_that_fail_say_of_whom(reader: ScriptedReader, sink: PullingSink) -> None:
    reader.state_of = {0: ReadState.FAILED}
    error = error_of(sink.pull(ticket(), timeout_s=5.0))
    assert isinstance(error, TransferFailed)
    assert error.message == "the read from encoder-1 failed"
    reader.is_refusing = True
    assert str(error_of(sink.pull(ticket(), timeout_s=5.0))) == "no way there"
    assert sink.usage().used_bytes == 0


def test_the_dead_are_disconnected_once_and_only_they(reader: ScriptedReader, sink: PullingSink) -> None:
    """The sink disconnects a dead source only after the last transfer from it has ended, and transfers from other
    sources continue."""
    dying, living = sink.pull(ticket("encoder-1"), 50.0), sink.pull(ticket("encoder-2"), 50.0)
    reader.wait_for(2)
    sink.peer_dead("encoder-1")
    assert "encoder-1 has left the cluster" in str(error_of(dying))
    assert reader.disconnected == []
    assert sink.usage().quarantined_bytes > 0
    reader.state_of[[source for source, *_ in reader.posted].index("encoder-1")] = ReadState.FAILED
    with reader.changed:
        assert reader.changed.wait_for(lambda: reader.disconnected, WAIT_S)
    assert reader.disconnected == ["encoder-1"]
    assert not living.done()
    sink.close()
    assert str(error_of(living)) == "the sink was closed"
    assert reader.is_closed
    assert reader.disconnected == ["encoder-1"]


def test_what_comes_too_late_is_given_up_and_says_how_long_it_took(
    reader: ScriptedReader, sink: PullingSink, clock: ManualClock
) -> None:
    future = sink.pull(ticket(), timeout_s=5.0)
    reader.wait_for(1)
    clock.advance(7.5)
    assert str(error_of(future)) == "encoder-1 did not deliver the feature within 7.5 s"


def test_the_transfer_thread_is_named_and_ends_with_the_process(sink: PullingSink) -> None:
    (thread,) = [each for each in threading.enumerate() if each.name == "worker-1-transfer"]
    assert thread.daemon
    sink.close()
    assert not thread.is_alive()
    assert not sink.is_alive
    with pytest.raises(TransferFailed, match="the sink is closed"):
        sink.pull(ticket(), 1.0)


def test_looks_at_open_reads_are_spaced_by_doubling_up_to_a_limit(sink: PullingSink) -> None:
    sink.close()  # From here on, only the test sets the numbers.
    assert sink._pause_s() is None, "nothing to watch"
    sink._pulls = [pulling._Pull(ticket(), None, Future(), 0.0, 1.0)]
    pauses = []
    for rounds in range(40):
        sink._num_idle_rounds = rounds
        pauses.append(sink._pause_s())
    shortest, longest = pauses[0], pauses[-1]
    assert shortest == pulling._SHORTEST_PAUSE_S
    assert longest == pulling._LONGEST_PAUSE_S
    assert pauses == [min(shortest * 2.0**rounds, longest) for rounds in range(40)]
    sink._pulls[0].is_given_up = True
    assert sink._pause_s() == pulling._QUARANTINE_PAUSE_S
    sink._pulls = []


def test_a_pull_that_is_cancelled_before_it_begins_is_never_read(reader: ScriptedReader, sink: PullingSink) -> None:
    reader.goes_on.clear()
    reader.state_of = {0: ReadState.FAILED}
    first = sink.pull(ticket(), 5.0)
    reader.wait_for(1)  # The transfer thread now waits inside `post`.
    second = sink.pull(ticket(), 5.0)
    assert second.cancel()
    reader.goes_on.set()
    error_of(first)
    third = sink.pull(ticket("encoder-3"), 5.0)
    reader.wait_for(2)
    assert [source for source, *_ in reader.posted] == ["encoder-1", "encoder-3"]
    assert sink.usage().used_bytes == SLOT_BYTES
    third.cancel()


def test_a_bug_in_a_reader_closes_the_sink_and_ends_what_is_open(
    reader: ScriptedReader, sink: PullingSink, caplog: pytest.LogCaptureFixture
) -> None:
    future = sink.pull(ticket(), 50.0)
    reader.wait_for(1)
    reader.is_broken = True
    assert str(error_of(future)) == "the sink was closed"
    sink.close()
    assert not sink.is_alive
    assert reader.is_closed
    assert sink.usage().used_bytes == 0
    (record,) = caplog.records
    assert record.getMessage() == "the transfer thread failed, and its sink is closed"
    assert record.exc_info is not None


def test_sources_of_one_process_have_names_of_their_own() -> None:
    hub, clock = LocalChannelHub(), ManualClock()
    source = LocalFeatureSource(hub, "encoder-1", 4096)
    with pytest.raises(ValueError, match=r"^a feature source 'encoder-1' exists already$"):
        LocalFeatureSource(hub, "encoder-1", 4096)
    sink = LocalFeatureSink(hub, "worker-9", 4096, clock)
    try:
        assert any(each.name == "worker-9-transfer" for each in threading.enumerate())
        slot = source.allocate(64)
        known = source.ticket(slot, (1, 2, 8), "float32", 60.0)
        hub.kill("encoder-1")
        assert str(error_of(sink.pull(known, 5.0))) == "the feature source encoder-1 does not exist in this process"
    finally:
        sink.close()


def test_blame_is_shared_and_nobody_has_none() -> None:
    """One of two coefficients makes up nearly all of the prediction. The two share the error as 95 and 5 parts of a
    hundred."""
    step = log(2.0) / (0.95**2 + 0.05**2)
    found = corrected((1.0, 1e-6), (1.0, 1.0), 2.0 * (1.0 + 1e-6), 1.0)
    assert found == pytest.approx((exp(0.95 * step), 1e-6 * exp(0.05 * step)))
    alone = corrected((1.0, 3.0), (2.0, 0.0), 4.0, 1.0)
    assert alone == pytest.approx((2.0, 3.0)), "what has no amount has no part in it"
    with pytest.raises(ValueError, match="zip"):
        corrected((1.0, 3.0), (2.0,), 4.0, 1.0)

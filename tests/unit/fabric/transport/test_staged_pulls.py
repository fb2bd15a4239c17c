"""Tests pulls to a device: the measurement of a link, the staged route, and what happens to memory when either fails.

The device is simulated, and the reader takes the time on the clock that the test says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from fake_device import FakeDeviceMemory

from fabric.contracts import FeatureTicket, ManualClock, MemoryKind, TransferFailed
from fabric.transport import HEADER_BYTES, DeviceView, LandedFeature, MemoryPlace, SlotMemory
from fabric.transport.pulling import PullingSink, ReadState
from fabric.transport.routes import PROBE_BYTES

WAIT_S = 20.0
NBYTES = 4096
SLOT_BYTES = NBYTES + HEADER_BYTES
GENERATION = 7
HELD = 10**9
"""So many times, a copy answers that it has not ended."""
PROBES = [("VRAM", NBYTES)] * 2 + [("DRAM", NBYTES)] * 2


class TimedReader:
    """A `TimedReader` reads at once. It advances the clock by what the read's route takes."""

    def __init__(self, clock: ManualClock, memories: tuple[SlotMemory, ...]) -> None:
        self._clock, self._memories = clock, memories
        self.kind_to_s: dict[MemoryKind, float] = {"VRAM": 1.0, "DRAM": 0.1}
        self.failing: set[MemoryKind] = set()
        self.refusing: set[MemoryKind] = set()
        self.posted: list[tuple[MemoryKind, int]] = []
        """Holds the kind of the target and the size of each read that was posted."""
        self.num_released = 0
        self.is_stuck = False

    def post(self, ticket: FeatureTicket, source: MemoryPlace, target: MemoryPlace) -> MemoryPlace:
        if target.kind in self.refusing and target.nbytes > 8:
            raise TransferFailed("no way there")
        self.posted.append((target.kind, target.nbytes))
        return target

    def state(self, read: MemoryPlace) -> ReadState:
        if self.is_stuck:
            return ReadState.PENDING
        if read.nbytes == 8:
            payload = np.frombuffer(GENERATION.to_bytes(8, "little"), np.uint8)
        elif read.kind in self.failing:
            return ReadState.FAILED
        else:
            self._clock.advance(self.kind_to_s[read.kind])
            payload = np.arange(read.nbytes, dtype=np.uint64).astype(np.uint8)
        (view,) = (found for memory in self._memories if (found := memory.view(read)) is not None)
        if isinstance(view, DeviceView):
            view.write(payload).wait()
        else:
            view[:] = payload
        return ReadState.DONE

    def release(self, read: MemoryPlace) -> None:
        self.num_released += 1

    def disconnect(self, source: str) -> None:
        """Does nothing, because there is no connection."""

    def close(self) -> None:
        """Does nothing, because there is nothing to free."""


class Rig:
    """Holds a sink for three features on a device, with staging for two features."""

    def __init__(self, num_staged: int = 2) -> None:
        self.clock = ManualClock()
        self.slots = SlotMemory(3 * SLOT_BYTES, make_memory=FakeDeviceMemory)
        self.staging = SlotMemory(num_staged * SLOT_BYTES)
        self.reader = TimedReader(self.clock, (self.slots, self.staging))
        self.sink = PullingSink("worker", self.slots, self.reader, self.clock, self.staging)

    @property
    def device(self) -> FakeDeviceMemory:
        assert isinstance(self.slots.backing, FakeDeviceMemory)
        return self.slots.backing

    def land(self, timeout_s: float = 100.0) -> LandedFeature:
        landed = self.sink.pull(ticket(), timeout_s).result(WAIT_S)
        self.sink.free(landed.slot_id)
        return landed

    def check_empty(self) -> None:
        eventually(lambda: self.sink.usage()[0] == self.sink.usage().num_quarantined == 0)
        eventually(lambda: self.staging.usage().num_slots == 0)
        assert self.reader.num_released == len(self.reader.posted)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.sink.close()


def ticket(nbytes: int = NBYTES, source: str = "encoder-1") -> FeatureTicket:
    shape = (1, 1, nbytes // 4)
    return FeatureTicket(source, b"", 5000, 4000, nbytes, GENERATION, shape, "float32", 60.0, memory_kind="VRAM")


def eventually(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up_s, "did not happen"
        time.sleep(0.001)


def test_the_first_pull_measures_both_routes_and_the_faster_one_is_taken(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fabric")
    rig.reader.kind_to_s = {"VRAM": NBYTES / 1e9, "DRAM": NBYTES / 1e10}
    rig.land()
    assert caplog.messages == ["reads of VRAM memory of encoder-1: direct 1.00 GB/s, staged 10.00 GB/s; taken: staged"]
    rig.check_empty()


@pytest.mark.parametrize("kind", ["VRAM", "DRAM"])
def test_a_device_that_is_slow_to_read_is_a_warning(
    rig: Rig, kind: MemoryKind, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a device gives a warning, because no other place for features is faster than the host's memory."""
    monkeypatch.setattr("fabric.transport.routes.SLOW_FROM_BYTES", NBYTES)
    landed = rig.sink.pull(msgspec.structs.replace(ticket(), memory_kind=kind), 100.0).result(WAIT_S)
    rig.sink.free(landed.slot_id)
    warnings = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == (kind == "VRAM")
    assert all("direct 0.00 GB/s, staged 0.00 GB/s; taken: staged; both are slow" in each for each in warnings)


def test_a_measurement_is_made_once(rig: Rig) -> None:
    landed = rig.sink.pull(ticket(), 100.0).result(WAIT_S)
    assert rig.reader.posted == [*PROBES, ("DRAM", NBYTES), ("DRAM", 8)]
    assert landed.is_staged
    assert landed.read_s == pytest.approx(0.1)
    assert landed.seconds == pytest.approx(2 * 1.0 + 3 * 0.1)
    assert landed.view.copy().tolist() == [*range(256)] * (NBYTES // 256)
    assert rig.device.threads == {"worker-transfer"}
    rig.sink.free(landed.slot_id)
    rig.check_empty()
    rig.reader.posted.clear()
    rig.reader.num_released = 0
    assert rig.land().is_staged
    assert rig.reader.posted == [("DRAM", NBYTES), ("DRAM", 8)]


def test_a_fast_device_is_read_directly(rig: Rig) -> None:
    rig.reader.kind_to_s["VRAM"] = 0.05
    landed = rig.land()
    assert not landed.is_staged
    assert landed.read_s == pytest.approx(0.05)
    assert rig.reader.posted == [*PROBES, ("VRAM", NBYTES), ("DRAM", 8)]
    rig.check_empty()


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_route_that_fails_in_its_probe_costs_no_feature(rig: Rig, is_refused: bool) -> None:
    (rig.reader.refusing if is_refused else rig.reader.failing).add("VRAM")
    assert rig.land().is_staged
    rig.reader.refusing.clear()
    rig.reader.failing = {"DRAM"}
    with pytest.raises(TransferFailed):
        rig.land()
    rig.check_empty()


def test_where_both_routes_fail_the_pull_fails_and_the_next_one_measures_again(rig: Rig) -> None:
    rig.reader.failing = {"VRAM", "DRAM"}
    with pytest.raises(TransferFailed):
        rig.land()
    rig.check_empty()
    rig.reader.failing.clear()
    assert rig.land().is_staged


def test_a_landed_feature_is_complete_only_after_the_copy_to_the_device(rig: Rig) -> None:
    rig.land()
    rig.device.num_polls = HELD
    num_copies = len(rig.device.copies)
    future = rig.sink.pull(ticket(), 100.0)
    eventually(lambda: len(rig.device.copies) > num_copies)
    assert rig.staging.usage().num_slots == 1
    assert not future.done()
    rig.device.copies[-1].wait()
    rig.device.num_polls = 0
    landed = future.result(WAIT_S)
    assert landed.view.copy().tolist() == [*range(256)] * (NBYTES // 256)
    rig.sink.free(landed.slot_id)
    rig.check_empty()


def test_a_pull_waits_for_room_in_the_staging_memory(rig: Rig) -> None:
    rig.land()
    rig.device.num_polls = HELD
    num_copies = len(rig.device.copies)
    futures = [rig.sink.pull(ticket(), 100.0) for _ in range(3)]
    eventually(lambda: len(rig.device.copies) == num_copies + 2)
    assert rig.staging.usage().num_slots == 2
    assert rig.reader.posted.count(("DRAM", NBYTES)) == 2 + 1 + 2
    rig.device.num_polls = 0
    for copy in rig.device.copies[num_copies:]:
        copy.wait()
    for future in futures:
        landed = future.result(WAIT_S)
        assert landed.view.copy().tolist() == [*range(256)] * (NBYTES // 256)
        rig.sink.free(landed.slot_id)
    rig.check_empty()


def test_a_pull_that_only_waited_is_freed_at_its_deadline(rig: Rig) -> None:
    rig.land()
    rig.device.num_polls = HELD
    num_copies = len(rig.device.copies)
    futures = [rig.sink.pull(ticket(), 100.0) for _ in range(2)]
    eventually(lambda: len(rig.device.copies) == num_copies + 2)
    waiting = rig.sink.pull(ticket(), 50.0)
    rig.clock.advance(60.0)
    with pytest.raises(TransferFailed, match="did not deliver"):
        waiting.result(WAIT_S)
    eventually(lambda: rig.sink.usage().num_quarantined == 0)
    assert rig.sink.usage().num_slots == 2
    for copy in rig.device.copies[num_copies:]:
        copy.wait()
    for future in futures:
        rig.sink.free(future.result(WAIT_S).slot_id)
    rig.check_empty()


def test_a_slot_to_which_a_copy_is_under_way_stays_in_quarantine_until_it_ends(rig: Rig) -> None:
    rig.land()
    rig.device.num_polls = HELD
    num_copies = len(rig.device.copies)
    future = rig.sink.pull(ticket(), 50.0)
    eventually(lambda: len(rig.device.copies) > num_copies)
    rig.clock.advance(60.0)
    with pytest.raises(TransferFailed, match="did not deliver"):
        future.result(WAIT_S)
    assert rig.sink.usage().num_quarantined == 1
    assert rig.staging.usage().num_slots == 1, "the copy still reads it"
    rig.device.copies[-1].wait()
    rig.check_empty()


def test_a_copy_that_fails_fails_the_pull(rig: Rig) -> None:
    rig.land()
    rig.device.num_polls = HELD
    num_copies = len(rig.device.copies)
    future = rig.sink.pull(ticket(), 100.0)
    eventually(lambda: len(rig.device.copies) > num_copies)
    rig.device.copies[-1].error = TransferFailed("the device is gone")
    with pytest.raises(TransferFailed):
        future.result(WAIT_S)
    rig.check_empty()


def test_others_wait_for_a_measurement_and_go_on_when_it_is_given_up(rig: Rig) -> None:
    rig.reader.is_stuck = True
    first = rig.sink.pull(ticket(), 50.0)
    eventually(lambda: len(rig.reader.posted) == 1)
    second, elsewhere = rig.sink.pull(ticket(), 500.0), rig.sink.pull(ticket(source="encoder-2"), 500.0)
    eventually(lambda: len(rig.reader.posted) == 2)
    rig.clock.advance(60.0)
    with pytest.raises(TransferFailed):
        first.result(WAIT_S)
    assert len(rig.reader.posted) == 2, "the measurement has not ended, because its read has not"
    rig.reader.is_stuck = False
    for future in (second, elsewhere):
        landed = future.result(WAIT_S)
        assert landed.is_staged
        rig.sink.free(landed.slot_id)
    assert rig.reader.posted.count(("VRAM", NBYTES)) == 1 + 2 + 2
    rig.check_empty()


def test_a_pull_that_is_cancelled_while_it_waits_gives_its_slot_back(rig: Rig) -> None:
    rig.reader.is_stuck = True
    first, second = rig.sink.pull(ticket(), 100.0), rig.sink.pull(ticket(), 100.0)
    eventually(lambda: len(rig.reader.posted) == 1)
    assert second.cancel()
    eventually(lambda: rig.sink.usage().num_slots == 1)
    rig.reader.is_stuck = False
    rig.sink.free(first.result(WAIT_S).slot_id)
    rig.check_empty()


def test_a_dead_source_is_measured_again_when_it_comes_back(rig: Rig) -> None:
    rig.land()
    rig.sink.peer_dead("encoder-1")
    rig.reader.kind_to_s["VRAM"] = 0.01
    eventually(lambda: not rig.sink._dead and not rig.sink._commands)
    assert not rig.land().is_staged
    rig.check_empty()


def test_a_payload_beyond_the_staging_memory_goes_directly() -> None:
    rig = Rig(num_staged=1)
    rig.land()
    large = ticket(2 * NBYTES)
    landed = rig.sink.pull(large, 100.0).result(WAIT_S)
    assert not landed.is_staged
    assert 2 * NBYTES < PROBE_BYTES
    rig.sink.free(landed.slot_id)
    rig.check_empty()
    rig.sink.close()


def test_a_sink_in_the_hosts_memory_measures_nothing() -> None:
    clock, slots, staging = ManualClock(), SlotMemory(2 * SLOT_BYTES), SlotMemory(SLOT_BYTES)
    reader = TimedReader(clock, (slots, staging))
    sink = PullingSink("worker", slots, reader, clock, staging)
    landed = sink.pull(msgspec.structs.replace(ticket(), memory_kind="DRAM"), 100.0).result(WAIT_S)
    assert reader.posted == [("DRAM", NBYTES), ("DRAM", 8)]
    assert landed.read_s == pytest.approx(0.1)
    sink.close()


def test_a_sink_that_is_closed_ends_what_it_copies_and_what_waits(rig: Rig) -> None:
    rig.land()
    rig.device.num_polls = HELD
    futures = [rig.sink.pull(ticket(), 100.0) for _ in range(3)]
    eventually(lambda: rig.staging.usage().num_slots == 2)
    rig.sink.close()
    for future in futures:
        with pytest.raises(TransferFailed, match="closed"):
            future.result(WAIT_S)
    assert rig.sink.usage().num_slots == rig.staging.usage().num_slots == 0

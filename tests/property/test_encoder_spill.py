"""Draws histories of a feature table whose arena lies on a simulated device and spills to the host: leases protect
features wherever they lie, and a unit that waits for room gets it."""

from __future__ import annotations

import numpy as np
from fake_device import FakeDeviceMemory
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from encoder_pool.planning import FeatureTable, LeaseKey
from fabric.contracts import AttemptId, FeatureLog, ManualClock, MemberId, MmHash, RequestId, UnitKey
from fabric.transport import HEADER_BYTES, LocalChannelHub, LocalFeatureSource, SlotMemory, begin_copy

DEVICE_BYTES, HOST_BYTES = 1024, 512
LARGEST = DEVICE_BYTES - HEADER_BYTES
WORKER, ROUTER = MemberId("worker-1"), MemberId("router-1")
UNITS = [UnitKey(MmHash(name), 0) for name in "abcdefgh"]


class SpillingTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.source = LocalFeatureSource(
            LocalChannelHub(), "encoder-1", DEVICE_BYTES, FakeDeviceMemory, SlotMemory(HOST_BYTES)
        )
        self.table = FeatureTable(self.source, ManualClock(), 1e9, FeatureLog(MemberId("encoder-1"), 1))
        self.encoding: set[UnitKey] = set()
        self.leases: dict[LeaseKey, int] = {}
        """Holds the generation of each leased slot."""
        self.key_to_view = {}
        self.waiting: tuple[UnitKey, int] | None = None
        """Holds a unit that was refused, and its size."""
        self.num_leased = 0

    def reserve(self, unit: UnitKey, nbytes: int, *, is_due: bool) -> bool:
        slot = self.table.reserve(unit, nbytes, 1, WORKER, is_due=is_due)
        if slot is not None:
            begin_copy(np.full(nbytes, UNITS.index(unit), np.uint8), slot.view).wait()
            self.encoding.add(unit)
        return slot is not None

    @rule(unit=st.sampled_from(UNITS), nbytes=st.integers(1, LARGEST))
    def encode(self, unit: UnitKey, nbytes: int) -> None:
        is_waiting = self.waiting is not None and self.waiting[0] == unit
        if unit in self.encoding or self.table.is_ready(unit) or is_waiting:
            return
        if not self.reserve(unit, nbytes, is_due=False) and self.waiting is None:
            self.waiting = (unit, nbytes)

    @precondition(lambda self: self.waiting is not None)
    @rule()
    def try_again(self) -> None:
        assert self.waiting is not None
        if self.reserve(*self.waiting, is_due=True):
            self.waiting = None

    @precondition(lambda self: self.encoding)
    @rule(data=st.data(), is_made=st.booleans())
    def end(self, data: st.DataObject, is_made: bool) -> None:
        unit = data.draw(st.sampled_from(sorted(self.encoding)))
        self.encoding.discard(unit)
        if not is_made:
            self.table.fail(unit)
            return
        self.table.complete(unit)
        self.table.waiters_informed(unit)

    @rule(unit=st.sampled_from(UNITS))
    def lease(self, unit: UnitKey) -> None:
        if self.table.is_ready(unit):
            self.num_leased += 1
            key = LeaseKey(WORKER, AttemptId(RequestId(f"req-{self.num_leased}"), 0), unit)
            slot = self.table.lease(key, ROUTER)
            self.leases[key], self.key_to_view[key] = slot.generation, slot.view

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.leases)))
        assert self.table.release(key, self.leases.pop(key))

    @precondition(lambda self: self.waiting is not None)
    @rule()
    def the_one_that_waits_gets_room_when_the_leases_end(self) -> None:
        """The waiting unit gets room within two rounds, because what is being encoded in the claimed range is evicted
        after it has ended."""
        assert self.waiting is not None
        for _ in range(2):
            for key in sorted(self.leases):
                self.release_one(key)
            for unit in sorted(self.encoding):
                self.encoding.discard(unit)
                self.table.complete(unit)
            if self.reserve(*self.waiting, is_due=True):
                self.waiting = None
                return
        raise AssertionError("there is no room although nothing is leased or encoded")

    def release_one(self, key: LeaseKey) -> None:
        self.table.release(key, self.leases.pop(key))

    @invariant()
    def the_table_is_consistent_and_leased_bytes_are_whole(self) -> None:
        self.table.check_invariants()
        for key in self.leases:
            assert set(self.key_to_view[key].copy().tolist()) == {UNITS.index(key.unit)}


TestSpillingTable = SpillingTableMachine.TestCase
TestSpillingTable.settings = settings(deadline=None, max_examples=50, stateful_step_count=40)

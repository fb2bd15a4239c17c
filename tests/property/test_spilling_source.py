"""Draws histories of a source with two arenas, one on a simulated device and one on the host, and holds them against
what a `FeatureSource` promises."""

from __future__ import annotations

import numpy as np
from fake_device import FakeDeviceMemory
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fabric.contracts import ArenaFull, UnitTooLarge
from fabric.transport import HEADER_BYTES, DeviceView, SlotMemory, SourceMemory, SourceSlot, begin_copy

DEVICE_BYTES, HOST_BYTES = 2048, 1024
SIZES = st.integers(1, DEVICE_BYTES)


class SpillingSourceMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.source = SourceMemory("enc", DEVICE_BYTES, FakeDeviceMemory, SlotMemory(HOST_BYTES))
        self.held: dict[int, SourceSlot] = {}
        self.idle: set[int] = set()
        self.claimed: int | None = None
        """Holds the size for which a range is claimed."""
        self.in_the_way: set[int] = set()
        self.num_taken = 0

    def take(self, nbytes: int, *, is_claimed: bool = False) -> bool:
        """Allocates a slot and writes its number into it. Returns False if there is no room."""
        try:
            slot = self.source.allocate(nbytes, is_claimed=is_claimed)
        except ArenaFull:
            return False
        assert slot.slot_id not in self.held, "an id is given twice"
        self.num_taken += 1
        begin_copy(np.full(nbytes, slot.slot_id % 251, np.uint8), slot.view).wait()
        self.held[slot.slot_id] = slot
        return True

    def drop(self, slot_id: int) -> None:
        self.source.free(self.held.pop(slot_id))
        self.idle.discard(slot_id)
        self.in_the_way.discard(slot_id)

    @rule(nbytes=SIZES)
    def allocate(self, nbytes: int) -> None:
        try:
            self.take(nbytes)
        except UnitTooLarge:
            assert nbytes > DEVICE_BYTES - HEADER_BYTES

    @rule(nbytes=st.integers(1, DEVICE_BYTES - HEADER_BYTES))
    def make_room(self, nbytes: int) -> None:
        victims = self.source.victims(nbytes)
        if victims is None:
            return
        assert set(victims) <= self.idle
        for slot_id in victims:
            self.drop(slot_id)
        assert self.take(nbytes), "the victims made no room"

    @precondition(lambda self: self.claimed is None)
    @rule(nbytes=st.integers(1, DEVICE_BYTES - HEADER_BYTES))
    def claim(self, nbytes: int) -> None:
        if self.source.victims(nbytes) is not None:
            return  # It is claimed only where nothing else makes room.
        slot_ids = self.source.claim(nbytes)
        assert slot_ids is not None, "without quarantine there is always a range"
        self.claimed, self.in_the_way = nbytes, set(slot_ids)
        assert self.in_the_way <= self.held.keys()
        assert len({isinstance(self.held[slot_id].view, DeviceView) for slot_id in slot_ids}) <= 1

    @precondition(lambda self: self.claimed is not None)
    @rule()
    def take_claimed(self) -> None:
        assert self.claimed is not None
        if self.take(self.claimed, is_claimed=True):
            assert not self.in_the_way
            self.claimed = None
        else:
            assert self.in_the_way
            self.drop(min(self.in_the_way))

    @precondition(lambda self: self.claimed is not None)
    @rule()
    def unclaim(self) -> None:
        self.source.unclaim()
        self.claimed, self.in_the_way = None, set()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def change(self, data: st.DataObject) -> None:
        slot_id = data.draw(st.sampled_from(sorted(self.held)))
        match data.draw(st.sampled_from(["free", "idle", "busy"])):
            case "free":
                self.drop(slot_id)
            case "idle":
                self.source.set_idle(self.held[slot_id])
                self.idle.add(slot_id)
            case "busy":
                self.source.set_busy(self.held[slot_id])
                self.idle.discard(slot_id)

    @invariant()
    def each_slot_has_its_own_bytes_and_word(self) -> None:
        usage = self.source.usage()
        assert usage.num_slots == len(self.held)
        assert usage.total_bytes == DEVICE_BYTES + HOST_BYTES
        for slot_id, slot in self.held.items():
            assert set(slot.view.copy().tolist()) == {slot_id % 251}
            if slot.nbytes % 2 == 0:
                ticket = self.source.ticket(slot, (1, 1, slot.nbytes // 2), "float16", 1.0)
                assert ticket.memory_kind == ("VRAM" if isinstance(slot.view, DeviceView) else "DRAM")
        for arena in self.source.arenas:
            arena.check_invariants()


TestSpillingSource = SpillingSourceMachine.TestCase
TestSpillingSource.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)

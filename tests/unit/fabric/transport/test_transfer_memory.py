"""Tests slots on a device, which is simulated, and sources whose features spill into the host's memory."""

from __future__ import annotations

import numpy as np
import pytest
from fake_device import POISON, FakeDeviceMemory

from fabric.contracts import ArenaFull, UnitTooLarge
from fabric.transport import (
    HEADER_BYTES,
    DeviceView,
    HostMemory,
    MemoryPlace,
    SlotMemory,
    SourceMemory,
    SourceSlot,
    begin_copy,
)

DEVICE_BYTES, HOST_BYTES = 1024, 512


def spilling_source() -> SourceMemory:
    return SourceMemory("enc", DEVICE_BYTES, FakeDeviceMemory, SlotMemory(HOST_BYTES))


def fill(slot: SourceSlot, value: int) -> None:
    begin_copy(np.full(slot.nbytes, value, np.uint8), slot.view).wait()


def test_slots_on_a_device_have_their_words_in_the_hosts_memory() -> None:
    slots = SlotMemory(DEVICE_BYTES, make_memory=FakeDeviceMemory)
    first, second = slots.reserve(100), slots.reserve(100)
    slots.set_word(first, 2**62 + 5)
    slots.set_word(second, 7)
    assert (slots.word(first), slots.word(second)) == (2**62 + 5, 7)
    for slot, word in ((first, 2**62 + 5), (second, 7)):
        place = slots.word_place(slot)
        view = slots.view(place)
        assert place.kind == "DRAM"
        assert isinstance(view, np.ndarray)
        assert view.view(np.uint64).tolist() == [word]
    device, words = slots.places
    assert device.kind == "VRAM"
    assert words.holds(slots.word_place(second))
    assert device.holds(slots.payload_place(second))


@pytest.mark.parametrize("granule_bytes", [64, 256])
def test_a_device_has_a_word_for_every_slot_that_it_can_hold(granule_bytes: int) -> None:
    def make_memory(nbytes: int) -> FakeDeviceMemory:
        return FakeDeviceMemory(nbytes, granule_bytes=granule_bytes)

    slots = SlotMemory(4096, make_memory=make_memory)
    taken = []
    while True:
        try:
            taken.append(slots.reserve(1))
        except ArenaFull:
            break
    for number, slot in enumerate(taken):
        slots.set_word(slot, number)
    assert [slots.word(slot) for slot in taken] == [*range(len(taken))]
    assert {slots.payload_place(slot).address % 64 for slot in taken} == {0}
    assert len(taken) == 4096 // max(granule_bytes, 2 * 64)


def test_the_host_can_not_read_a_device_in_place() -> None:
    slots = SlotMemory(DEVICE_BYTES, make_memory=FakeDeviceMemory)
    slot = SourceMemory("enc", DEVICE_BYTES, FakeDeviceMemory).allocate(8)
    with pytest.raises(TypeError, match="memory of a device"):
        _ = slot.buffer
    with pytest.raises(TypeError, match="memory of a device"):
        _ = slots.memory


def test_a_range_that_is_in_no_memory_has_no_bytes() -> None:
    slots = SlotMemory(DEVICE_BYTES, make_memory=FakeDeviceMemory)
    inside = MemoryPlace("VRAM", slots.address + 8, 16)
    view = slots.view(inside)
    assert isinstance(view, DeviceView)
    assert view.place == inside
    for other in (
        inside._replace(kind="DRAM"),
        inside._replace(device_id=1),
        inside._replace(address=slots.address - 8),
        inside._replace(nbytes=DEVICE_BYTES),
    ):
        assert slots.view(other) is None


def test_what_a_copy_writes_is_poison_until_it_has_ended() -> None:
    memory = FakeDeviceMemory(256, num_polls=2)
    event = memory.write(64, np.arange(64, dtype=np.uint8))
    assert memory.bytes[64:128].tolist() == [POISON] * 64
    assert [event.is_done() for _ in range(3)] == [False, False, True]
    view = memory.view(64, 64)
    into = np.zeros(64, dtype=np.uint8)
    event = view.read(into)
    assert into.tolist() == [POISON] * 64
    event.wait()
    assert into.tolist() == view.copy().tolist() == [*range(64)]


def test_a_device_view_describes_itself_to_libraries_of_cuda() -> None:
    view = FakeDeviceMemory(256).view(64, 10)
    described = view.__cuda_array_interface__
    assert (described["shape"], described["typestr"], described["data"]) == ((10,), "|u1", (view.place.address, False))


def test_copies_between_all_kinds_of_memory_bring_the_bytes() -> None:
    payload = np.arange(64, dtype=np.uint8)
    makers = (HostMemory, FakeDeviceMemory)
    for source, target in ((source(64), target(64)) for source in makers for target in makers):
        source.write(0, payload).wait()
        begin_copy(source.view(0, 64), target.view(0, 64)).wait()
        assert target.view(0, 64).copy().tolist() == payload.tolist()


def test_a_feature_without_room_on_the_device_spills_and_its_ticket_says_so() -> None:
    source = spilling_source()
    first, second = source.allocate(DEVICE_BYTES - HEADER_BYTES), source.allocate(200)
    fill(first, 1)
    fill(second, 2)
    tickets = [source.ticket(slot, (1, 1, slot.nbytes // 2), "bfloat16", 1.0) for slot in (first, second)]
    assert [ticket.memory_kind for ticket in tickets] == ["VRAM", "DRAM"]
    for ticket, arena, slot in zip(tickets, source.arenas, (first, second), strict=True):
        view = arena.view(MemoryPlace(ticket.memory_kind, ticket.address, ticket.nbytes))
        word = arena.view(MemoryPlace("DRAM", ticket.generation_address, 8))
        assert view is not None
        assert isinstance(word, np.ndarray)
        assert set(view.copy().tolist()) == {slot.slot_id + 1}
        assert word.view(np.uint64)[0] == slot.generation
    assert source.usage().total_bytes == DEVICE_BYTES + HOST_BYTES
    assert source.usage().num_slots == 2
    source.free(first)
    source.free(second)
    source.free(second)
    assert source.usage().used_bytes == 0


def test_a_source_that_spills_tells_full_from_too_large() -> None:
    source = spilling_source()
    with pytest.raises(UnitTooLarge):
        source.allocate(DEVICE_BYTES)
    large = source.allocate(DEVICE_BYTES - HEADER_BYTES)
    for _ in range(2):
        with pytest.raises(ArenaFull):
            source.allocate(HOST_BYTES)
    source.free(large)
    source.allocate(HOST_BYTES)


def test_a_small_device_leaves_large_features_to_the_host() -> None:
    source = SourceMemory("enc", 256, FakeDeviceMemory, SlotMemory(HOST_BYTES))
    slot = source.allocate(HOST_BYTES - HEADER_BYTES)
    assert source.ticket(slot, (1, 1, slot.nbytes // 2), "bfloat16", 1.0).memory_kind == "DRAM"
    with pytest.raises(ArenaFull):
        source.allocate(HOST_BYTES - HEADER_BYTES)


def test_room_is_made_on_the_device_before_it_is_made_on_the_host() -> None:
    source = spilling_source()
    half = DEVICE_BYTES // 2 - HEADER_BYTES
    slots = [source.allocate(half) for _ in range(3)]
    assert [isinstance(slot.view, DeviceView) for slot in slots] == [True, True, False]
    assert source.victims(half) is None
    source.set_idle(slots[2])
    assert source.victims(half) == [slots[2].slot_id]
    source.set_idle(slots[1])
    assert source.victims(half) == [slots[1].slot_id]
    source.set_busy(slots[1])
    assert source.victims(half) == [slots[2].slot_id]
    source.free(slots[2])
    assert source.victims(half) == []
    assert not isinstance(source.allocate(half).view, DeviceView)


def test_a_claim_is_kept_in_the_arena_that_can_hold_it() -> None:
    source = spilling_source()
    half = DEVICE_BYTES // 2 - HEADER_BYTES
    slots = [source.allocate(half) for _ in range(3)]
    claimed = source.claim(DEVICE_BYTES - HEADER_BYTES)
    assert claimed == [slots[0].slot_id, slots[1].slot_id]
    source.free(slots[0])
    with pytest.raises(ArenaFull):
        source.allocate(half)
    source.free(slots[1])
    whole = source.allocate(DEVICE_BYTES - HEADER_BYTES, is_claimed=True)
    assert isinstance(whole.view, DeviceView)
    assert source.claim(half) == [whole.slot_id]
    source.unclaim()
    source.unclaim()
    source.free(whole)
    source.allocate(half)

"""Tests slots with headers, and the generations that a source keeps there."""

from __future__ import annotations

import numpy as np
import pytest

from fabric.contracts import ArenaFull, LeaseLost, UnitTooLarge
from fabric.transport import HEADER_BYTES, SourceMemory
from fabric.transport.arena import Arena
from fabric.transport.feature_channel import SlotMemory


def word_at(source: SourceMemory, address: int) -> int:
    start = address - source.slots.address
    return int(source.slots.memory[start : start + 8].view(np.uint64)[0])


def test_payloads_are_aligned_disjoint_and_writable() -> None:
    slots = SlotMemory(4096)
    first, second = slots.reserve(100), slots.reserve(100)
    slots.payload(first)[:] = 1
    slots.payload(second)[:] = 2
    assert slots.payload(first).tolist() == [1] * 100
    assert slots.payload(second).tolist() == [2] * 100
    assert slots.payload(second).ctypes.data % 64 == 0
    slots.check_invariants()


def test_the_header_is_not_part_of_the_payload() -> None:
    slots = SlotMemory(4096)
    slot = slots.reserve(64)
    slots.set_word(slot, 2**62 + 5)
    slots.payload(slot)[:] = 255
    assert slots.word(slot) == 2**62 + 5


def test_room_counts_the_header() -> None:
    slots = SlotMemory(1024)
    with pytest.raises(UnitTooLarge):
        slots.reserve(1024)
    slot = slots.reserve(1024 - HEADER_BYTES)
    with pytest.raises(ArenaFull):
        slots.reserve(1)
    assert slots.free(slot.slot_id) is True
    assert slots.usage().used_bytes == 0


def test_a_ticket_says_where_the_payload_and_its_generation_lie() -> None:
    source = SourceMemory("enc", 4096)
    slot = source.allocate(2 * 3 * 4 * 2)
    slot.buffer[:] = np.arange(48)
    source.metadata = b"md"
    ticket = source.ticket(slot, (2, 3, 4), "bfloat16", lease_s=9.0)
    assert (ticket.source, ticket.metadata, ticket.nbytes, ticket.lease_s) == ("enc", b"md", 48, 9.0)
    start = ticket.address - source.slots.address
    assert source.slots.memory[start : start + 48].tolist() == list(range(48))
    assert word_at(source, ticket.generation_address) == ticket.generation == slot.generation


def test_freeing_raises_the_word_before_anyone_gets_the_memory() -> None:
    source = SourceMemory("enc", 4096)
    slot = source.allocate(8)
    ticket = source.ticket(slot, (1, 1, 2), "float32", 1.0)
    source.free(slot)
    assert word_at(source, ticket.generation_address) > ticket.generation
    successor = source.allocate(8)
    assert successor.generation > slot.generation
    assert word_at(source, ticket.generation_address) == successor.generation


def test_freeing_an_older_generation_is_a_no_op() -> None:
    source = SourceMemory("enc", 4096)
    old = source.allocate(8)
    source.free(old)
    new = source.allocate(8)
    source.free(old)
    assert source.usage().num_slots == 1
    assert source.ticket(new, (1, 1, 2), "float32", 1.0).generation == new.generation
    with pytest.raises(LeaseLost):
        source.ticket(old, (1, 1, 2), "float32", 1.0)


def test_a_ticket_must_fit_its_slot() -> None:
    source = SourceMemory("enc", 4096)
    slot = source.allocate(8)
    with pytest.raises(ValueError, match="does not have the 8 bytes"):
        source.ticket(slot, (1, 1, 3), "float32", 1.0)
    with pytest.raises(ValueError, match="a feature can't have shape"):
        source.ticket(slot, (1, 1, 8), "int8", 1.0)


def test_two_lives_of_a_name_have_different_generations() -> None:
    assert SourceMemory("enc", 4096).allocate(8).generation != SourceMemory("enc", 4096).allocate(8).generation


@pytest.mark.parametrize(("is_low", "offset"), [(True, 0), (False, 64)])
def test_a_claim_takes_all_that_is_free_and_only_what_it_lacks_of_a_neighbour(is_low: bool, offset: int) -> None:
    """The arena has room for four units: the lower or the upper two are free, one slot takes the others, and the claim
    asks for three."""
    arena = Arena(4 * 64, alignment=64)
    low, high = arena.allocate(2 * 64), arena.allocate(2 * 64)
    gone, neighbour = (low, high) if is_low else (high, low)
    arena.free(gone.slot_id)
    assert arena.claim(3 * 64) == [neighbour.slot_id]
    arena.check_invariants()
    arena.free(neighbour.slot_id)
    assert arena.allocate(3 * 64, is_claimed=True).offset == offset

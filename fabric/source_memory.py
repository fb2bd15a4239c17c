"""Keeps a source's arena: slots with generations, and the tickets that say where they lie. Every source has
one.

It knows nothing of the transport: a reader finds the payload and the generation word at the ticket's addresses.
"""

from __future__ import annotations

import secrets

from fabric.arena import Slot
from fabric.channel import ArenaUsage, SourceSlot
from fabric.errors import LeaseLost
from fabric.messages import FeatureTicket
from fabric.slots import HEADER_BYTES, SlotMemory, feature_nbytes


class SourceMemory:
    """Keeps the slots of one source. It is thread-safe.

    Generations start at a random number: what a later, larger slot writes over an old word matches an old ticket with
    probability 2**-62, and no client can produce such a match on purpose.
    """

    def __init__(self, name: str, total_bytes: int) -> None:
        self.name = name
        self.slots = SlotMemory(total_bytes, first_generation=1 + secrets.randbits(62))
        self._slot_id_to_slot: dict[int, Slot] = {}

    def allocate(self, nbytes: int, *, is_claimed: bool = False) -> SourceSlot:
        """Returns a new slot, which takes 64 bytes more than its payload. Raises ArenaFull or UnitTooLarge."""
        slot = self.slots.reserve(nbytes, is_claimed=is_claimed)
        self.slots.set_word(slot, slot.generation)
        self._slot_id_to_slot[slot.slot_id] = slot
        return SourceSlot(slot.slot_id, slot.generation, nbytes, self.slots.payload(slot))

    def ticket(
        self, slot: SourceSlot, shape: tuple[int, int, int], dtype: str, lease_s: float, metadata: bytes
    ) -> FeatureTicket:
        """Returns the ticket of a slot. Raises ValueError when shape and dtype do not make the slot's bytes, and
        LeaseLost when the slot was freed."""
        if feature_nbytes(shape, dtype) != slot.nbytes:
            raise ValueError(f"shape {shape} of {dtype} is not {slot.nbytes} bytes")
        held = self._slot_id_to_slot.get(slot.slot_id)
        if held is None:
            raise LeaseLost(f"slot {slot.slot_id} of {self.name} was freed")
        address = self.slots.address + held.offset
        return FeatureTicket(
            source=self.name,
            metadata=metadata,
            address=address + HEADER_BYTES,
            generation_address=address,
            nbytes=slot.nbytes,
            generation=slot.generation,
            shape=shape,
            dtype=dtype,
            lease_s=lease_s,
        )

    def free(self, slot: SourceSlot) -> None:
        """Raises the generation word before the memory becomes reusable. A second call does nothing."""
        held = self._slot_id_to_slot.pop(slot.slot_id, None)
        if held is not None:
            self.slots.retire(held)

    def set_idle(self, slot: SourceSlot) -> None:
        self.slots.set_idle(slot.slot_id)

    def set_busy(self, slot: SourceSlot) -> None:
        self.slots.set_busy(slot.slot_id)

    def victims(self, nbytes: int) -> list[int] | None:
        return self.slots.victims(nbytes)

    def claim(self, nbytes: int) -> list[int] | None:
        return self.slots.claim(nbytes)

    def unclaim(self) -> None:
        self.slots.unclaim()

    def usage(self) -> ArenaUsage:
        return self.slots.usage()

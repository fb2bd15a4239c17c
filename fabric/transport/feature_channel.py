"""Defines the contract of the feature channel, which moves the bytes of encoded features from an encoder's arena into a
worker's inbox, and the memory in which both sides keep them.

`FeatureSource` is the encoder's side and `FeatureSink` is the worker's side. `local_channel` (one process) and
`nixl_channel` (NIXL READ) implement them, and one suite of tests checks both. Every source keeps its slots and their
tickets in a `SourceMemory`; sources and sinks alike cut their memory into slots with a `SlotMemory`.

The receiver pulls, so nothing remote writes into memory that an aborted request gave back. The channel does not
announce features: tickets travel on the message plane. Two facts of NIXL shape the contract: releasing a transfer
handle does not stop the transfer, and bytes of a frozen peer may land later. So a destination slot is reusable only
after its transfer has ended (DONE or ERR). Otherwise it is quarantined until the transfer has ended. The death of the
peer's process ends the transfer; the end of the peer's lease does not, because the peer may be frozen and wake up. A
source slot carries a generation, which the source raises before it reuses the slot. The reader reads the generation
again after the payload; a mismatch is LeaseLost.

This module knows nothing of any transport, or of what a feature means.
"""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fabric.contracts import FeatureTicket, LeaseLost, feature_nbytes
from fabric.transport.arena import Arena, ArenaUsage, Slot

# ------------------------------------------------------------ the contract


class SourceSlot(NamedTuple):
    """A `SourceSlot` is a slot in the source's arena. `buffer` is writable uint8 with shape `(nbytes,)`."""

    slot_id: int
    generation: int
    nbytes: int
    buffer: npt.NDArray[np.uint8]


class LandedFeature(NamedTuple):
    """A `LandedFeature` is a feature in the inbox arena. `buffer` is uint8 with shape `(nbytes,)` and is valid until
    `FeatureSink.free(slot_id)`. `seconds` is the time since the call of `pull`."""

    slot_id: int
    buffer: npt.NDArray[np.uint8]
    ticket: FeatureTicket
    seconds: float


class FeatureSource(Protocol):
    """A `FeatureSource` is the encoder's side: an arena of registered memory. It is thread-safe."""

    def allocate(self, nbytes: int, *, is_claimed: bool = False) -> SourceSlot:
        """Returns a slot. With `is_claimed`, the slot lies in the range that `claim` reserved, and the claim ends.
        Raises ArenaFull (there is no room now; the caller evicts or waits) or UnitTooLarge (there is never room)."""
        ...

    def ticket(self, slot: SourceSlot, shape: tuple[int, int, int], dtype: str, lease_s: float) -> FeatureTicket:
        """Returns what a reader needs. The payload must be complete. The caller counts leases; the channel does not."""
        ...

    def free(self, slot: SourceSlot) -> None:
        """Raises the slot's generation, then makes the memory reusable. Freeing an older generation does nothing."""
        ...

    def set_idle(self, slot: SourceSlot) -> None:
        """Keeps the slot's bytes but allows them to be given up for others: `victims` may name the slot. Slots that
        became idle first are given up first. A slot is busy when it is allocated."""
        ...

    def set_busy(self, slot: SourceSlot) -> None:
        """Keeps the slot from being given up until it is idle again or freed."""
        ...

    def victims(self, nbytes: int) -> list[int] | None:
        """Returns the ids of idle slots; when these are freed, `allocate(nbytes)` finds room. Returns None when no
        choice of idle slots makes room, and an empty list when there is room already. It changes nothing."""
        ...

    def claim(self, nbytes: int) -> list[int] | None:
        """Keeps a range for an allocation for which neither `allocate` nor `victims` finds room; nothing else is placed
        in that range from now on. Returns the ids of the slots in use there, which must be freed first, or None if
        there is no such range. There is at most one claim at a time."""
        ...

    def unclaim(self) -> None:
        """Ends the claim. It does nothing without a claim."""
        ...

    def usage(self) -> ArenaUsage: ...

    @property
    def is_alive(self) -> bool:
        """Returns False once the source was closed or its own thread has died; nothing can be read from it any more."""
        ...

    def close(self) -> None: ...


class FeatureSink(Protocol):
    """A `FeatureSink` is the worker's side: the inbox arena and a transfer thread. It is thread-safe and never blocks
    the engine."""

    def pull(self, ticket: FeatureTicket, timeout_s: float) -> Future[LandedFeature]:
        """Reserves inbox room at once (raises ArenaFull or UnitTooLarge) and reads in the transfer thread. The future
        ends with the feature, with LeaseLost, or with TransferFailed (the peer is gone, or `timeout_s` passed; then the
        slot is quarantined and not freed). Cancelling the future frees the slot as soon as the transfer has ended."""
        ...

    def free(self, slot_id: int) -> None:
        """Makes inbox room. Freeing a slot a second time does nothing."""
        ...

    def peer_dead(self, source: str) -> None:
        """Handles a source that has left or whose lease has ended. The source's open pulls end with TransferFailed,
        and its connection is forgotten. Its quarantined slots are freed as soon as the transport confirms that nothing
        lands any more."""
        ...

    def usage(self) -> ArenaUsage: ...

    @property
    def is_alive(self) -> bool:
        """Returns False once the sink was closed or its transfer thread has died; every pull fails then."""
        ...

    def close(self) -> None: ...


# ------------------------------------------------------------ the memory of sources and sinks


class SourceMemory:
    """Keeps the slots of one source, with their generations, and writes the tickets that say where they lie. It is
    thread-safe. A reader finds the payload and the generation word at the ticket's addresses. It is all of a
    `FeatureSource` except the way on which readers reach the memory, which a subclass for each transport adds.

    Generations start at a random number: what a later, larger slot writes over an old word matches an old ticket with
    probability 2**-62, and no client can produce such a match on purpose.
    """

    def __init__(self, name: str, total_bytes: int) -> None:
        self.name = name
        self.metadata = b""
        """Holds what a reader needs in order to connect to the source; a transport that needs it sets it."""
        self.slots = SlotMemory(total_bytes, first_generation=1 + secrets.randbits(62))
        self._slot_id_to_slot: dict[int, Slot] = {}

    def allocate(self, nbytes: int, *, is_claimed: bool = False) -> SourceSlot:
        """Returns a new slot, which takes 64 bytes more than its payload. Raises ArenaFull or UnitTooLarge."""
        slot = self.slots.reserve(nbytes, is_claimed=is_claimed)
        self.slots.set_word(slot, slot.generation)
        self._slot_id_to_slot[slot.slot_id] = slot
        return SourceSlot(slot.slot_id, slot.generation, nbytes, self.slots.payload(slot))

    def ticket(self, slot: SourceSlot, shape: tuple[int, int, int], dtype: str, lease_s: float) -> FeatureTicket:
        """Returns the ticket of a slot. Raises ValueError when shape and dtype do not make the slot's bytes, and
        LeaseLost when the slot was freed."""
        if feature_nbytes(shape, dtype) != slot.nbytes:
            raise ValueError(f"a feature of shape {shape} in {dtype} does not have the {slot.nbytes} bytes of its slot")
        held = self._slot_id_to_slot.get(slot.slot_id)
        if held is None:
            raise LeaseLost(f"slot {slot.slot_id} of {self.name} is already free")
        address = self.slots.address + held.offset
        return FeatureTicket(
            source=self.name,
            metadata=self.metadata,
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


ALIGNMENT_BYTES = 64
HEADER_BYTES = ALIGNMENT_BYTES
WORD_BYTES = 8


class SlotMemory:
    """A `SlotMemory` is an arena with its bytes; it cuts them into slots, each with a header and a payload.

        slot.offset                    + HEADER_BYTES
        | generation word (8 bytes) ...| payload, `nbytes` as asked for, 64-byte aligned ... |

    A source keeps the slot's generation in the header; a sink has room there into which it reads a copy of the
    generation. The memory does not know which component reads or writes. It is thread-safe, except that a payload's
    bytes belong to its holder alone.
    """

    def __init__(self, total_bytes: int, first_generation: int = 1) -> None:
        self._lock = threading.Lock()
        self._arena = Arena(total_bytes, ALIGNMENT_BYTES, first_generation)
        raw = np.empty(self._arena.total_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
        skip = -raw.ctypes.data % ALIGNMENT_BYTES
        self.memory: npt.NDArray[np.uint8] = raw[skip : skip + self._arena.total_bytes]
        self.address: int = self.memory.ctypes.data
        self._words = self.memory.view(np.uint64)

    def reserve(self, nbytes: int, *, is_claimed: bool = False) -> Slot:
        """Returns a slot with `nbytes` of payload; with `is_claimed`, it lies in the claimed range. Raises ArenaFull or
        UnitTooLarge (both also count the header), and ValueError for less than one byte."""
        if nbytes < 1:
            raise ValueError(f"a payload must have at least 1 byte, not {nbytes}")
        with self._lock:
            return self._arena.allocate(HEADER_BYTES + nbytes, is_claimed=is_claimed)

    def claim(self, nbytes: int) -> list[int] | None:
        """Keeps a range for `nbytes` of payload. Returns the slots in use there, or None if there is no such range."""
        with self._lock:
            return self._arena.claim(HEADER_BYTES + nbytes)

    def unclaim(self) -> None:
        with self._lock:
            self._arena.unclaim()

    def payload(self, slot: Slot) -> npt.NDArray[np.uint8]:
        """Returns a writable view, uint8 with shape `(slot.nbytes - HEADER_BYTES,)`."""
        return self.memory[slot.offset + HEADER_BYTES : slot.offset + slot.nbytes]

    def word(self, slot: Slot) -> int:
        return int(self._words[slot.offset // WORD_BYTES])

    def set_word(self, slot: Slot, value: int) -> None:
        self._words[slot.offset // WORD_BYTES] = value

    def retire(self, slot: Slot) -> bool:
        """Raises the slot's generation word and then frees the slot, as one step. Returns False if the slot was not in
        use."""
        with self._lock:
            if not self._arena.is_used(slot.slot_id):
                return False
            self.set_word(slot, slot.generation + 1)
            return self._arena.free(slot.slot_id)

    def free(self, slot_id: int) -> bool:
        with self._lock:
            return self._arena.free(slot_id)

    def quarantine(self, slot_id: int) -> bool:
        with self._lock:
            return self._arena.quarantine(slot_id)

    def release_quarantine(self, slot_id: int) -> bool:
        with self._lock:
            return self._arena.release_quarantine(slot_id)

    def set_idle(self, slot_id: int) -> None:
        """Lets the slot in use be given up for another. The slot becomes the most recently used of the idle slots."""
        with self._lock:
            self._arena.set_idle(slot_id)

    def set_busy(self, slot_id: int) -> None:
        with self._lock:
            self._arena.set_busy(slot_id)

    def victims(self, nbytes: int) -> list[int] | None:
        """Returns the idle slots to free so that `nbytes` of payload can be reserved, or None if that is impossible
        now."""
        with self._lock:
            return self._arena.victims(HEADER_BYTES + nbytes)

    def is_used(self, slot_id: int) -> bool:
        with self._lock:
            return self._arena.is_used(slot_id)

    def usage(self) -> ArenaUsage:
        with self._lock:
            return self._arena.usage()

    def check_invariants(self) -> None:
        with self._lock:
            self._arena.check_invariants()

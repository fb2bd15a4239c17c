"""Defines the contract of the feature channel, which moves the bytes of encoded features from an encoder's arena into a
worker's inbox, and the memory in which both sides keep them.

`FeatureSource` is the encoder's side and `FeatureSink` is the worker's side. `local_channel` (one process) and
`nixl_channel` (NIXL READ) implement them, and one suite of tests checks both. Every source keeps its slots and their
tickets in a `SourceMemory`; sources and sinks alike cut their memory into slots with a `SlotMemory`. The memory may be
the host's or a device's (`transfer_memory`).

The receiver pulls, so nothing remote writes into memory that an aborted request gave back. The channel does not
announce features: tickets travel on the message plane. Two facts of NIXL shape the contract: releasing a transfer
handle does not stop the transfer, and bytes of a frozen peer may land later. So a destination slot is reusable only
after its transfer has ended (DONE or ERR). Otherwise it is quarantined until the transfer has ended. The death of the
peer's process ends the transfer; the end of the peer's lease does not, because the peer may be frozen and wake up. A
source slot carries a generation, which the source raises before it reuses the slot. The reader reads the generation
again after the payload; a mismatch is LeaseLost. The generation word lies in the host's memory, whatever memory the
payload lies in.

This module knows nothing of any transport, or of what a feature means.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import numpy as np

from fabric.contracts import ArenaFull, FeatureTicket, LeaseLost, UnitTooLarge, feature_nbytes
from fabric.transport.arena import Arena, ArenaUsage, Slot
from fabric.transport.transfer_memory import (
    HOST_GRANULE_BYTES,
    DeviceView,
    HostBytes,
    HostMemory,
    MakeMemory,
    MemoryPlace,
    SlotView,
    TransferMemory,
)

# ------------------------------------------------------------ the contract


class SourceSlot(NamedTuple):
    """A `SourceSlot` is a slot in the source's arena. `view` is its payload, which the holder may write."""

    slot_id: int
    generation: int
    nbytes: int
    view: SlotView

    @property
    def buffer(self) -> HostBytes:
        """Returns the payload as an array, for code that knows that it lies in the host's memory."""
        return host_bytes(self.view)


class LandedFeature(NamedTuple):
    """A `LandedFeature` is a feature in the inbox arena. `view` is its payload, which is complete, and valid until
    `FeatureSink.free(slot_id)`. Before that call, work of a device that reads the payload must have ended. `seconds` is
    the time since the call of `pull`."""

    slot_id: int
    view: SlotView
    ticket: FeatureTicket
    seconds: float
    read_s: float = 0.0
    """Holds the time in which the payload itself was read, without waits before and after; it is 0 if nothing was."""
    is_staged: bool = False
    """Says whether the payload passed the host on its way to a device (`fabric.transport.routes`)."""

    @property
    def buffer(self) -> HostBytes:
        """Returns the payload as an array, for code that knows that it lies in the host's memory."""
        return host_bytes(self.view)


def host_bytes(view: SlotView) -> HostBytes:
    """Returns a view that must lie in the host's memory. Raises TypeError for one on a device, of which `copy()` brings
    the bytes to the host."""
    if isinstance(view, DeviceView):
        raise TypeError("the bytes lie in the memory of a device, so the host can't read them in place")
    return view


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

    A source may have two arenas: the first one is used as long as it has room, and what finds none there *spills* into
    the second one. A slot's id says in which arena it lies.

    Generations start at a random number: what a later, larger slot writes over an old word matches an old ticket with
    probability 2**-62, and no client can produce such a match on purpose.
    """

    def __init__(
        self, name: str, total_bytes: int, make_memory: MakeMemory = HostMemory, spill: SlotMemory | None = None
    ) -> None:
        """Allocates the arena. Raises ConfigError if `make_memory` finds no room for it."""
        self.name = name
        self.metadata = b""
        """Holds what a reader needs in order to connect to the source; a transport that needs it sets it."""
        self.slots = SlotMemory(total_bytes, 1 + secrets.randbits(62), make_memory)
        self.arenas: tuple[SlotMemory, ...] = (self.slots,) if spill is None else (self.slots, spill)
        self._claimed: SlotMemory | None = None
        """Holds the arena in which a range is claimed."""
        self._slot_id_to_slot: dict[int, tuple[SlotMemory, Slot]] = {}

    def allocate(self, nbytes: int, *, is_claimed: bool = False) -> SourceSlot:
        """Returns a new slot, which takes 64 bytes more than its payload. Raises ArenaFull or UnitTooLarge."""
        arena, slot = self._reserve_claimed(nbytes) if is_claimed else self._reserve(nbytes)
        arena.set_word(slot, slot.generation)
        slot_id = self._outer_id(arena, slot.slot_id)
        self._slot_id_to_slot[slot_id] = (arena, slot)
        return SourceSlot(slot_id, slot.generation, nbytes, arena.payload(slot))

    def _reserve(self, nbytes: int) -> tuple[SlotMemory, Slot]:
        """Reserves a slot in the first arena that has room. If none has, raises ArenaFull where one could have."""
        refusal: ArenaFull | UnitTooLarge | None = None
        for arena in self.arenas:
            try:
                return arena, arena.reserve(nbytes)
            except ArenaFull as error:
                refusal = error
            except UnitTooLarge as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def _reserve_claimed(self, nbytes: int) -> tuple[SlotMemory, Slot]:
        arena = self._claimed or self.slots
        slot = arena.reserve(nbytes, is_claimed=True)
        self._claimed = None
        return arena, slot

    def ticket(self, slot: SourceSlot, shape: tuple[int, int, int], dtype: str, lease_s: float) -> FeatureTicket:
        """Returns the ticket of a slot. Raises ValueError when shape and dtype do not make the slot's bytes, and
        LeaseLost when the slot was freed."""
        if feature_nbytes(shape, dtype) != slot.nbytes:
            raise ValueError(f"a feature of shape {shape} in {dtype} does not have the {slot.nbytes} bytes of its slot")
        held = self._slot_id_to_slot.get(slot.slot_id)
        if held is None:
            raise LeaseLost(f"slot {slot.slot_id} of {self.name} is already free")
        arena, inner = held
        payload = arena.payload_place(inner)
        return FeatureTicket(
            source=self.name,
            metadata=self.metadata,
            address=payload.address,
            generation_address=arena.word_place(inner).address,
            nbytes=slot.nbytes,
            generation=slot.generation,
            shape=shape,
            dtype=dtype,
            lease_s=lease_s,
            memory_kind=payload.kind,
            device_id=payload.device_id,
        )

    def free(self, slot: SourceSlot) -> None:
        """Raises the generation word before the memory becomes reusable. A second call does nothing."""
        held = self._slot_id_to_slot.pop(slot.slot_id, None)
        if held is not None:
            arena, inner = held
            arena.retire(inner)

    def set_idle(self, slot: SourceSlot) -> None:
        arena, slot_id = self._inner_id(slot.slot_id)
        arena.set_idle(slot_id)

    def set_busy(self, slot: SourceSlot) -> None:
        arena, slot_id = self._inner_id(slot.slot_id)
        arena.set_busy(slot_id)

    def victims(self, nbytes: int) -> list[int] | None:
        """Names the victims of the first arena where idle slots make room, so that features stay where they are read
        fastest."""
        return self._first(lambda arena: arena.victims(nbytes))

    def claim(self, nbytes: int) -> list[int] | None:
        """Claims a range in the first arena that has one."""

        def claim_in(arena: SlotMemory) -> list[int] | None:
            slot_ids = arena.claim(nbytes)
            if slot_ids is not None:
                self._claimed = arena
            return slot_ids

        return self._first(claim_in)

    def unclaim(self) -> None:
        if self._claimed is not None:
            self._claimed.unclaim()
            self._claimed = None

    def usage(self) -> ArenaUsage:
        """Returns the sums over the arenas."""
        return ArenaUsage(*map(sum, zip(*(arena.usage() for arena in self.arenas), strict=True)))

    def _first(self, ask: Callable[[SlotMemory], list[int] | None]) -> list[int] | None:
        """Returns the slots that the first arena names, under the ids of the source."""
        for arena in self.arenas:
            if (slot_ids := ask(arena)) is not None:
                return [self._outer_id(arena, slot_id) for slot_id in slot_ids]
        return None

    def _outer_id(self, arena: SlotMemory, slot_id: int) -> int:
        return slot_id * len(self.arenas) + self.arenas.index(arena)

    def _inner_id(self, slot_id: int) -> tuple[SlotMemory, int]:
        inner, index = divmod(slot_id, len(self.arenas))
        return self.arenas[index], inner


ALIGNMENT_BYTES = HOST_GRANULE_BYTES
HEADER_BYTES = ALIGNMENT_BYTES
WORD_BYTES = 8


class SlotMemory:
    """A `SlotMemory` is an arena with its bytes; it cuts them into slots, each with a header and a payload.

        slot.offset                    + HEADER_BYTES
        | generation word (8 bytes) ...| payload, `nbytes` as asked for, 64-byte aligned ... |

    A source keeps the slot's generation in its word; a sink has a word for each slot into which it reads a copy of the
    generation. Words lie in the host's memory, because the processor writes them before memory is reused and compares
    them after a payload: on a device, each of these would be a copy to wait for. So a slot on a device leaves its
    header unused, and its word lies in an array of the host, which has a word for each granule of the device's memory.

    The memory does not know which component reads or writes. It is thread-safe, except that a payload's bytes belong to
    its holder alone.
    """

    def __init__(self, total_bytes: int, first_generation: int = 1, make_memory: MakeMemory = HostMemory) -> None:
        """Allocates the memory. Raises ValueError for too few bytes, and ConfigError if there is no room for them."""
        if total_bytes < ALIGNMENT_BYTES:
            raise ValueError(f"an arena of {total_bytes} bytes can't hold one unit of {ALIGNMENT_BYTES} bytes")
        self._lock = threading.Lock()
        self.backing = make_memory(total_bytes)
        """Holds the bytes of the slots, without the words of slots on a device."""
        granule_bytes, nbytes = self.backing.granule_bytes, self.backing.place.nbytes
        self._arena = Arena(nbytes, granule_bytes, first_generation)
        if isinstance(self.backing, HostMemory):
            self._word_memory, self._word_spacing_bytes = self.backing, WORD_BYTES
        else:
            num_words = nbytes // granule_bytes
            self._word_memory = HostMemory(num_words * WORD_BYTES + ALIGNMENT_BYTES)
            self._word_spacing_bytes = granule_bytes
        self._words = self._word_memory.array.view(np.uint64)

    @property
    def memory(self) -> HostBytes:
        """Returns all bytes of slots in the host's memory. Raises TypeError if they lie on a device."""
        return host_bytes(self.backing.view(0, self.backing.place.nbytes))

    @property
    def is_on_device(self) -> bool:
        return self._word_memory is not self.backing

    @property
    def address(self) -> int:
        return self.backing.place.address

    @property
    def places(self) -> tuple[MemoryPlace, ...]:
        """Returns the ranges that a transport has to register."""
        return (self.backing.place, self._word_memory.place) if self.is_on_device else (self.backing.place,)

    def view(self, place: MemoryPlace) -> SlotView | None:
        """Returns the bytes of a range of this memory, or None for a range that is not in it."""
        memory: TransferMemory
        for memory in (self.backing, self._word_memory):
            if memory.place.holds(place):
                return memory.view(place.address - memory.place.address, place.nbytes)
        return None

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

    def payload(self, slot: Slot) -> SlotView:
        """Returns the slot's payload, which has `slot.nbytes - HEADER_BYTES` bytes."""
        return self.backing.view(slot.offset + HEADER_BYTES, slot.nbytes - HEADER_BYTES)

    def payload_place(self, slot: Slot) -> MemoryPlace:
        address = self.address + slot.offset + HEADER_BYTES
        return self.backing.place._replace(address=address, nbytes=slot.nbytes - HEADER_BYTES)

    def word_place(self, slot: Slot) -> MemoryPlace:
        """Returns the place of the slot's generation word, which is in the host's memory."""
        words = self._word_memory.place
        return words._replace(address=words.address + WORD_BYTES * self._word_index(slot), nbytes=WORD_BYTES)

    def word(self, slot: Slot) -> int:
        return int(self._words[self._word_index(slot)])

    def set_word(self, slot: Slot, value: int) -> None:
        self._words[self._word_index(slot)] = value

    def _word_index(self, slot: Slot) -> int:
        return slot.offset // self._word_spacing_bytes

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

"""Defines the contract of the feature channel, which moves the bytes of encoded features from an encoder's arena
into a worker's inbox. `channel_local` (one process) and `channel_nixl` (NIXL READ) implement it, and one suite of tests
checks both.

The receiver pulls, so nothing remote writes into memory that an aborted request gave back. The channel does not
announce features: tickets travel on the message plane. Two facts of NIXL shape the contract: releasing a transfer
handle does not stop the transfer, and bytes of a frozen peer may land later. So a destination slot is reusable only
after its transfer has ended (DONE or ERR). Otherwise it is quarantined until the transfer has ended. The death of the
peer's process ends the transfer; the end of the peer's lease does not, because the peer may be frozen and wake up. A
source slot carries a generation, which the source raises before it reuses the slot. The reader reads the generation
again after the payload; a mismatch is LeaseLost. This module knows nothing of what a feature means.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fabric.messages import FeatureTicket


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


class ArenaUsage(NamedTuple):
    used_bytes: int
    total_bytes: int
    num_slots: int
    quarantined_bytes: int
    num_quarantined: int


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

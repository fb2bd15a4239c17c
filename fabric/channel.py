"""The feature channel: bytes of encoded features from an encoder's arena into a worker's inbox. The contract;
`channel_local` (one process) and `channel_nixl` (NIXL READ) keep it, and pass one suite of tests.

The receiver pulls, so nothing remote writes into memory that an aborted request gave back. Announcing is not the
channel's: tickets travel on the message plane. Two facts of NIXL shape it: a released transfer handle does not stop
the transfer, and bytes of a frozen peer may land later. So a destination slot is reusable only after its transfer
ended (DONE or ERR); otherwise it is quarantined until it has, which the death of the peer's process brings about (the
end of its lease does not: it may be frozen and wake up). And a source slot carries a generation, raised before
reuse: the reader reads it again after the payload; a mismatch is LeaseLost.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fabric.messages import FeatureTicket


class SourceSlot(NamedTuple):
    """A slot in the source's arena: `buffer` is writable uint8 `(nbytes,)`."""

    slot_id: int
    generation: int
    nbytes: int
    buffer: npt.NDArray[np.uint8]


class LandedFeature(NamedTuple):
    """A feature in the inbox arena. `buffer` is uint8 `(nbytes,)`, valid until `FeatureSink.free(slot_id)`."""

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
    """The encoder's side: an arena of registered memory. Thread-safe."""

    def allocate(self, nbytes: int, *, is_claimed: bool = False) -> SourceSlot:
        """`is_claimed`: in the range that `claim` was asked for, which ends the claim. Raises ArenaFull (no room now;
        the caller evicts or waits) or UnitTooLarge (never)."""
        ...

    def ticket(self, slot: SourceSlot, shape: tuple[int, int, int], dtype: str, lease_s: float) -> FeatureTicket:
        """What a reader needs. The payload must be complete. The caller counts leases; the channel does not."""
        ...

    def free(self, slot: SourceSlot) -> None:
        """Raises the slot's generation, then makes the memory reusable. Freeing an older generation is a no-op."""
        ...

    def set_idle(self, slot: SourceSlot) -> None:
        """The slot's bytes stay, but may be given up for others: `victims` may name it. Slots that became idle first
        are the first to go. A slot is busy when it is allocated."""
        ...

    def set_busy(self, slot: SourceSlot) -> None:
        """The slot must stay until it is idle again or freed."""
        ...

    def victims(self, nbytes: int) -> list[int] | None:
        """Ids of idle slots: when these are freed, `allocate(nbytes)` finds room. None when no choice of idle slots
        makes room, empty when there is room already. Changes nothing."""
        ...

    def claim(self, nbytes: int) -> list[int] | None:
        """For what neither `allocate` nor `victims` finds room: keeps a range for it, in which nothing else is placed
        from now on. Returns the ids of the slots in use there, which must be freed first; None if there is no such
        range. One claim at a time."""
        ...

    def unclaim(self) -> None:
        """Ends the claim. Harmless without one."""
        ...

    def usage(self) -> ArenaUsage: ...

    @property
    def is_alive(self) -> bool:
        """False once it was closed, or its own thread has died: nothing can be read from it any more."""
        ...

    def close(self) -> None: ...


class FeatureSink(Protocol):
    """The worker's side: the inbox arena and a transfer thread. Thread-safe; never blocks the engine."""

    def pull(self, ticket: FeatureTicket, timeout_s: float) -> Future[LandedFeature]:
        """Reserves inbox room at once (raises ArenaFull or UnitTooLarge) and reads in the transfer thread. The
        future ends with the feature, or LeaseLost, or TransferFailed (the peer is gone, or `timeout_s` passed: then
        the slot is quarantined, not freed). Cancelling the future frees the slot as soon as the transfer ended."""
        ...

    def free(self, slot_id: int) -> None:
        """Makes inbox room. Freeing twice is a no-op."""
        ...

    def peer_dead(self, source: str) -> None:
        """A source has left or its lease ended: its open pulls end with TransferFailed, and its connection is
        forgotten. Its quarantined slots are freed as soon as the transport confirms that nothing lands any more."""
        ...

    def usage(self) -> ArenaUsage: ...

    @property
    def is_alive(self) -> bool:
        """False once it was closed, or its transfer thread has died: every pull fails."""
        ...

    def close(self) -> None: ...

"""Moves the features and messages of simulated members: places without memory, links that take time, and a plane.

`PlacesOnly` is an encoder's arena and `SimInbox` a worker's inbox; both keep the production arena's places. `SimPlane`
hands messages to the simulated network. The module knows nothing of what a feature is for or of who reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from fabric.contracts import FeatureTicket, PlaneMessage, TransferFailed
from fabric.transport import HEADER_BYTES, Arena, ArenaUsage, Handler, LandedFeature, Slot, SourceSlot
from loadtest.simulator.cost_tables import LinkCosts
from loadtest.simulator.event_loop import VirtualLoop

FEATURE_DTYPE = "bfloat16"
_EMPTY = np.empty(0, dtype=np.uint8)


class SimInbox:
    """Implements `FeatureSink`. A pull takes its room at once, or raises ArenaFull if there is none; the receiver of
    production then waits until room is made. All pulls of a worker share its link: their bytes move one pull after the
    other, as fast as the link from the source is. No pull times out."""

    def __init__(self, total_bytes: int, loop: VirtualLoop, link_from: Callable[[str], LinkCosts]) -> None:
        self.feature_bytes = self.max_feature_bytes = 0
        """Counts the bytes of the features that are here or on their way, without headers and padding."""
        self._arena, self._loop, self._link_from = Arena(total_bytes), loop, link_from
        self._link_free_s = 0.0
        self._slot_id_to_bytes: dict[int, int] = {}
        self._pull_to_source: dict[Future[LandedFeature], str] = {}

    def pull(self, ticket: FeatureTicket, timeout_s: float) -> Future[LandedFeature]:
        slot = self._arena.allocate(HEADER_BYTES + ticket.nbytes)
        self._slot_id_to_bytes[slot.slot_id] = ticket.nbytes
        self.feature_bytes += ticket.nbytes
        self.max_feature_bytes = max(self.max_feature_bytes, self.feature_bytes)
        now_s, link = self._loop.now(), self._link_from(ticket.source)
        self._link_free_s = max(now_s, self._link_free_s) + ticket.nbytes / link.bytes_per_s
        pull: Future[LandedFeature] = Future()
        self._pull_to_source[pull] = ticket.source
        self._loop.at(self._link_free_s + link.latency_s, self._land, pull, slot.slot_id, ticket, now_s)
        return pull

    def _land(self, pull: Future[LandedFeature], slot_id: int, ticket: FeatureTicket, begun_s: float) -> None:
        self._pull_to_source.pop(pull, None)
        if pull.done():  # It was cancelled, or its source has left.
            self.free(slot_id)
        else:
            pull.set_result(LandedFeature(slot_id, _EMPTY, ticket, self._loop.now() - begun_s))

    def free(self, slot_id: int) -> None:
        nbytes = self._slot_id_to_bytes.pop(slot_id, None)
        if nbytes is not None:
            self.feature_bytes -= nbytes
            self._arena.free(slot_id)

    def peer_dead(self, source: str) -> None:
        """Ends the open pulls from a source that has left; their room becomes free when they would have ended."""
        for pull in [pull for pull, one in self._pull_to_source.items() if one == source and not pull.done()]:
            pull.set_exception(TransferFailed(f"{source} has left"))

    def usage(self) -> ArenaUsage:
        return self._arena.usage()

    @property
    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        """Does nothing, because there is no memory."""


class PlacesOnly:
    """Implements `FeatureSource` with the production arena's places and without memory."""

    def __init__(self, name: str, total_bytes: int) -> None:
        self._name = name
        self._arena = Arena(total_bytes)
        self._slot_id_to_slot: dict[int, Slot] = {}
        self.unclaim = self._arena.unclaim
        self.victims = self._arena.victims
        self.claim = self._arena.claim

    def allocate(self, nbytes: int, *, is_claimed: bool = False) -> SourceSlot:
        slot = self._arena.allocate(nbytes, is_claimed=is_claimed)
        return SourceSlot(slot.slot_id, slot.generation, nbytes, _EMPTY)

    def ticket(self, slot: SourceSlot, shape: tuple[int, int, int], dtype: str, lease_s: float) -> FeatureTicket:
        return FeatureTicket(self._name, b"", 0, 0, slot.nbytes, slot.generation, shape, dtype, lease_s)

    def free(self, slot: SourceSlot) -> None:
        self._arena.free(slot.slot_id)

    def set_idle(self, slot: SourceSlot) -> None:
        self._arena.set_idle(slot.slot_id)

    def set_busy(self, slot: SourceSlot) -> None:
        self._arena.set_busy(slot.slot_id)

    def usage(self) -> ArenaUsage:
        return self._arena.usage()

    @property
    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        """Does nothing, because there is no memory."""


class SimPlane:
    """Implements `Plane`: `send` takes the address and the message of everything that the member sends by it."""

    def __init__(self, address: str, send: Callable[[str, PlaneMessage], None]) -> None:
        self.address = address
        self._send = send

    def start(self, handler: Handler) -> None:
        """Does nothing: messages reach a simulated member by its methods."""

    def send(self, address: str, message: PlaneMessage) -> bool:
        self._send(address, message)
        return True

    def forget(self, address: str) -> None:
        """Does nothing, because there are no connections."""

    @property
    def num_dropped(self) -> int:
        return 0

    @property
    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        """Does nothing, because there is no socket."""

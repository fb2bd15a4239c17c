"""The routers that listen to this worker: leases by heartbeat, and what is sent to all of them.

Knows nothing of requests: whose lease has expired is reported, what follows is the service's.
"""

from __future__ import annotations

from collections.abc import Iterator

from fabric.clock import Clock
from fabric.ids import MemberId
from fabric.leases import LeaseTable
from fabric.messages import PlaneMessage, RouterHeartbeat
from fabric.plane import Plane

FIRST_HEARTBEAT_S = 30.0
"""A router whose call is here and whose heartbeat is not has so long to send one: it may have died in between."""


class RouterLinks:
    """Lives in the event loop."""

    def __init__(self, plane: Plane, clock: Clock) -> None:
        self._plane = plane
        self._leases: LeaseTable[MemberId] = LeaseTable(clock)
        self._addresses: dict[MemberId, str] = {}

    def heartbeat(self, message: RouterHeartbeat) -> bool:
        """Renews a lease. True if the router is new, or has moved: it knows nothing of us."""
        is_new = self._addresses.get(message.router_id) != message.address
        self._addresses[message.router_id] = message.address
        self._leases.renew(message.router_id, message.lease_s)
        return is_new

    def expect(self, router_id: MemberId) -> None:
        """A call of this router has come. One that we know nothing of (new here, or its lease has run out) is held to
        a lease too, else nobody would ever end what it left behind."""
        if router_id not in self._addresses:
            self._leases.renew(router_id, FIRST_HEARTBEAT_S)

    def take_expired(self) -> list[MemberId]:
        """Routers whose lease has run out; they are forgotten."""
        expired = self._leases.expired()
        for router_id in expired:
            self.forget(router_id)
        return expired

    def forget(self, router_id: MemberId) -> None:
        """The router is gone; nothing is sent to it any more."""
        self._leases.drop(router_id)
        address = self._addresses.pop(router_id, None)
        if address is not None:
            self._plane.forget(address)

    def broadcast(self, message: PlaneMessage) -> None:
        for address in self._addresses.values():
            self._plane.send(address, message)

    def __iter__(self) -> Iterator[MemberId]:
        return iter(self._addresses)

    def __len__(self) -> int:
        return len(self._addresses)

"""Keeps the routers that a member (an encoder or a worker) listens to: their leases, which heartbeats renew, and their
addresses, to which messages for all routers go.

This module knows nothing of requests or of what the messages mean. It returns the routers whose lease has expired, and
the member ends what belongs to them.
"""

from __future__ import annotations

from collections.abc import Iterator

from fabric.clock import Clock
from fabric.ids import MemberId
from fabric.leases import LeaseTable
from fabric.messages import PlaneMessage, RouterHeartbeat
from fabric.plane import Plane

FIRST_HEARTBEAT_S = 30.0
"""Limits how long a router may take to send its first heartbeat after its first call, because it may have died in
between."""


class RouterTable:
    """Holds the lease and the address of each router. It lives in the event loop of a member."""

    def __init__(self, plane: Plane, clock: Clock) -> None:
        self._plane = plane
        self._leases: LeaseTable[MemberId] = LeaseTable(clock)
        self._addresses: dict[MemberId, str] = {}

    def heartbeat(self, message: RouterHeartbeat) -> bool:
        """Renews the lease of a router. Returns True if the router is new or has moved and therefore knows nothing of
        this member."""
        is_new = self._addresses.get(message.router_id) != message.address
        self._addresses[message.router_id] = message.address
        self._leases.renew(message.router_id, message.lease_s)
        return is_new

    def expect(self, router_id: MemberId) -> None:
        """Records that a call of this router has arrived. A router without a known address (it is new here, or its
        lease has expired) gets a lease too; otherwise its calls would never end if it died. A member whose calls have a
        time limit of their own does not need this."""
        if router_id not in self._addresses:
            self._leases.renew(router_id, FIRST_HEARTBEAT_S)

    def take_expired(self) -> list[MemberId]:
        """Forgets the routers whose lease has expired and returns them."""
        expired = self._leases.expired()
        for router_id in expired:
            self.forget(router_id)
        return expired

    def forget(self, router_id: MemberId) -> None:
        """Forgets a router that is gone and sends nothing to it any more."""
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

"""Keeps who belongs to the cluster at the moment: every membership is a lease that heartbeats renew and that ends by
itself.

A `Directory` holds all members, for the whole cluster. A `RouterTable` belongs to one encoder or worker and holds the
routers to which that member listens. A `LeaseTable` keeps any keys with deadlines; the router table stands on it, and
encoders use it for the leases under which workers read features. Because leases end by themselves, a dead peer needs no
call that gives anything back.

This module returns what has expired, and the owner ends what belongs to it. The directory is pure: `deploy` decides
where it runs and which code calls it. The module knows nothing of what members do, of requests, or of what messages
mean.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from fabric.contracts import Clock, Member, MemberId, PlaneMessage, RouterHeartbeat
from fabric.transport.message_plane import Plane

# ------------------------------------------------------------ the members of the cluster


class View(NamedTuple):
    """A `View` holds the members at one moment, by id. `version` grows with every change, so equal versions mean equal
    views."""

    version: int
    members: tuple[Member, ...]


class Directory:
    """Keeps the members of the cluster and their leases. It is not thread-safe. A member that stops its heartbeats
    leaves the directory when its lease ends. A member that comes back after that joins again, which readers see as a
    leave and a join."""

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._version = 0
        self._members: dict[MemberId, Member] = {}
        self._deadlines_s: dict[MemberId, float] = {}

    def heartbeat(self, member: Member) -> View:
        """Adds a member, renews its lease, or updates its record. A heartbeat of an older epoch is ignored."""
        self._sweep()
        known = self._members.get(member.member_id)
        if known is None or known.epoch <= member.epoch:
            self._deadlines_s[member.member_id] = self._clock.now() + self._lease_s
            if known != member:
                self._members[member.member_id] = member
                self._version += 1
        return self.view()

    def leave(self, member_id: MemberId) -> View:
        """Removes a member at once. Unknown members are ignored."""
        self._sweep()
        if self._members.pop(member_id, None) is not None:
            del self._deadlines_s[member_id]
            self._version += 1
        return self.view()

    def view(self) -> View:
        """Returns the members whose lease is running. An expiry counts as one change in the version, before and after
        it is swept."""
        expired = self._expired()
        alive = sorted(set(self._members) - set(expired))
        return View(self._version + len(expired), tuple(self._members[member_id] for member_id in alive))

    def _expired(self) -> list[MemberId]:
        now_s = self._clock.now()
        return [member_id for member_id, deadline_s in self._deadlines_s.items() if deadline_s <= now_s]

    def _sweep(self) -> None:
        for member_id in self._expired():
            del self._members[member_id]
            del self._deadlines_s[member_id]
            self._version += 1


# ------------------------------------------------------------ the routers of one member

FIRST_HEARTBEAT_S = 30.0
"""Limits how long a router may take to send its first heartbeat after its first call, because it may have died in
between."""


class RouterTable:
    """Holds the lease and the address of each router to which a member listens. Heartbeats renew the leases, and
    messages for all routers go to the addresses. The table lives in the event loop of the member."""

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


# ------------------------------------------------------------ leases by key

Key = TypeVar("Key", bound=Hashable)


class LeaseTable(Generic[Key]):
    """Keeps leases by key and says which have expired; it does not know what a key stands for. It is not thread-safe. A
    lease of `lease_s` taken at `t` has expired at `t + lease_s`, and not before."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._key_to_deadline_s: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        """Holds deadlines, the oldest first; an entry is void unless the map still holds the same deadline."""
        self._order = count()

    def renew(self, key: Key, lease_s: float) -> None:
        """Takes or renews a lease: it ends `lease_s` from now, which may be later or earlier than before."""
        deadline_s = self._clock.now() + lease_s
        self._key_to_deadline_s[key] = deadline_s
        heapq.heappush(self._heap, (deadline_s, next(self._order), key))

    def drop(self, key: Key) -> bool:
        """Ends a lease without reporting it as expired. Returns False for an unknown key."""
        return self._key_to_deadline_s.pop(key, None) is not None

    def expired(self) -> list[Key]:
        """Removes and returns the keys whose lease has expired, in order of their deadlines; each key is reported
        once."""
        now_s = self._clock.now()
        gone: list[Key] = []
        while self._heap and self._heap[0][0] <= now_s:
            deadline_s, _, key = heapq.heappop(self._heap)
            if self._key_to_deadline_s.get(key) == deadline_s:
                del self._key_to_deadline_s[key]
                gone.append(key)
        return gone

    def __contains__(self, key: Key) -> bool:
        """Returns whether a lease is running now. It is False from the deadline on, even before `expired` is called."""
        deadline_s = self._key_to_deadline_s.get(key)
        return deadline_s is not None and deadline_s > self._clock.now()

    def __len__(self) -> int:
        """Counts the leases that are not yet dropped or reported, expired or not."""
        return len(self._key_to_deadline_s)

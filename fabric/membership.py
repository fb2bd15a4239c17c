"""Keeps a directory of the cluster's members with leases. It is pure; `deploy` decides where it runs and which
code calls it.

It knows nothing of what members do. A member that stops its heartbeats leaves the directory when its lease ends. A
member that comes back after that joins again, which readers see as a leave and a join.
"""

from __future__ import annotations

from typing import NamedTuple

from fabric.clock import Clock
from fabric.ids import MemberId
from fabric.messages import Member


class View(NamedTuple):
    """A `View` holds the members at one moment, by id. `version` grows with every change, so equal versions mean equal
    views."""

    version: int
    members: tuple[Member, ...]


class Directory:
    """Keeps the members and their leases. It is not thread-safe."""

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

"""Keeps who belongs to the cluster at the moment: every membership is a lease that heartbeats renew and that ends by
itself.

A `Directory` holds all members, for the whole cluster, and answers each heartbeat with what has changed since the
version that the caller knows; a `Membership` puts these changes together in each member. A `RouterTable` belongs to one
encoder or worker and holds the routers to which that member listens, and what each of them still has to learn. A
`LeaseTable` keeps any keys with deadlines; the directory and the router table stand on it, and encoders use it for the
leases under which workers read features. Because leases end by themselves, a dead peer needs no call that gives
anything back.

This module returns what has expired, and the owner ends what belongs to it. The directory is pure: `deploy` decides
where it runs and which code calls it. The module knows nothing of what members do, of requests, or of what messages
mean.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable, Iterator
from itertools import count, islice
from typing import Generic, NamedTuple, TypeVar

import msgspec

from fabric.contracts import (
    AttemptId,
    Clock,
    EncoderReport,
    Member,
    MemberId,
    PlaneMessage,
    RouterHeartbeat,
    StageReport,
    WorkerReport,
)
from fabric.transport.message_plane import Plane

# ------------------------------------------------------------ the members of the cluster

MAX_HEARTBEATS_PER_S = 500.0
"""The directory asks members to call so rarely that all of them together make at most this many calls per second."""
MIN_PERIOD_S = 0.5
LEASE_PERIODS = 3
"""A lease lasts at least this many periods, so that two lost calls end no membership."""
MAX_CHANGES = 4096
"""The directory remembers this many changes. A member that has missed more of them gets the whole view."""


class View(NamedTuple):
    """A `View` holds the members at one moment, by id. `version` grows with every change, so equal versions mean equal
    views."""

    version: int
    members: tuple[Member, ...]


class ViewChange(NamedTuple):
    """A `ViewChange` leads from the view of version `since` to that of `version`. If `since` is None, it is the whole
    view: `members` are all members then."""

    version: int
    since: int | None
    members: tuple[Member, ...] = ()
    """Holds the records that are new or have changed."""
    left: tuple[MemberId, ...] = ()


class Directory:
    """Keeps the members of the cluster and their leases. It is not thread-safe. A member that stops its heartbeats
    leaves the directory when its lease ends. A member that comes back after that joins again, which readers see as a
    leave and a join."""

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self._lease_s = lease_s
        self._version = 0
        self._members: dict[MemberId, Member] = {}
        self._leases: LeaseTable[MemberId] = LeaseTable(clock)
        self._changed: deque[MemberId] = deque(maxlen=MAX_CHANGES)
        """Holds the member that each of the last versions changed, the newest at the right end."""

    @property
    def period_s(self) -> float:
        """Returns how long a member waits between two heartbeats. It grows with the members beyond
        `MAX_HEARTBEATS_PER_S`."""
        return _period_s(len(self._members))

    def heartbeat(self, member: Member, known: int | None = None) -> ViewChange:
        """Adds a member, renews its lease, or updates its record. A heartbeat of an older epoch is ignored. Returns
        what has changed since the version `known`, or the whole view if the caller knows none or has missed more
        changes than the directory remembers."""
        self._sweep()
        present = self._members.get(member.member_id)
        if present is None or present.epoch <= member.epoch:
            self._leases.renew(member.member_id, max(self._lease_s, LEASE_PERIODS * self.period_s))
            if present != member:
                self._members[member.member_id] = member
                self._note_change(member.member_id)
        return self._change_since(known)

    def leave(self, member_id: MemberId) -> None:
        """Removes a member at once. Unknown members are ignored."""
        self._sweep()
        if self._members.pop(member_id, None) is not None:
            self._leases.drop(member_id)
            self._note_change(member_id)

    def view(self) -> View:
        """Returns the members whose lease is running, by id."""
        self._sweep()
        return View(self._version, tuple(self._members[member_id] for member_id in sorted(self._members)))

    def _change_since(self, known: int | None) -> ViewChange:
        num_missed = self._version - known if known is not None else -1
        if not 0 <= num_missed <= len(self._changed):
            return ViewChange(self._version, None, self.view().members)
        newest_first = islice(reversed(self._changed), num_missed)
        changed = sorted(set(newest_first))
        present = tuple(self._members[member_id] for member_id in changed if member_id in self._members)
        left = tuple(member_id for member_id in changed if member_id not in self._members)
        return ViewChange(self._version, known, present, left)

    def _sweep(self) -> None:
        for member_id in self._leases.expired():
            del self._members[member_id]
            self._note_change(member_id)

    def _note_change(self, member_id: MemberId) -> None:
        self._version += 1
        self._changed.append(member_id)


class Membership:
    """Holds one member's view of the other members, from the directory's changes. A directory that has just restarted
    knows only the members that have sent a heartbeat since. So for one lease after a restart, members that the new
    directory has not named yet are kept."""

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._epoch: int | None = None
        self._version: int | None = None
        self._members: dict[MemberId, Member] = {}
        """Holds the view of the present directory."""
        self._kept: dict[MemberId, Member] = {}
        """Holds the members that only the previous directory has named."""
        self._kept_until_s = 0.0

    def known(self) -> tuple[int, int] | None:
        """Returns the epoch of the directory and the version of its view that this member has, or None if it has
        none."""
        return None if self._epoch is None or self._version is None else (self._epoch, self._version)

    def update(self, epoch: int, change: ViewChange) -> tuple[Member, ...] | None:
        """Takes a change of the directory with that epoch. Returns the members if they have changed, or None. A change
        that does not follow the known view (the answer to an earlier question) is ignored."""
        before = self._kept | self._members
        if change.since is not None and (epoch, change.since) != self.known():
            return None
        if self._epoch is not None and epoch != self._epoch:
            self._kept, self._members = dict(before), {}
            self._kept_until_s = self._clock.now() + max(self._lease_s, LEASE_PERIODS * _period_s(len(before)))
        if change.since is None:
            self._members.clear()
        self._epoch, self._version = epoch, change.version
        self._members.update({member.member_id: member for member in change.members})
        for member_id in change.left:
            self._members.pop(member_id, None)
        for member_id in (*self._members, *change.left):
            self._kept.pop(member_id, None)
        if self._clock.now() >= self._kept_until_s:
            self._kept.clear()
        now = self._kept | self._members
        return None if now == before else tuple(now.values())


def _period_s(num_members: int) -> float:
    return max(MIN_PERIOD_S, num_members / MAX_HEARTBEATS_PER_S)


# ------------------------------------------------------------ the routers of one member

FIRST_HEARTBEAT_S = 30.0
"""Limits how long a router may take to send its first heartbeat after its first call, because it may have died in
between."""


BEAT_S = 1.0
"""A member sends a report after this time even if none of its numbers has changed, so that routers know that it
lives."""
MAX_UNCONFIRMED = 4096
"""Limits the dispatches of one router that a member goes on acknowledging; further ones replace the oldest."""


class RouterTable:
    """Holds what a member keeps of each router to which it listens: lease, address, and the dispatches that the router
    does not yet know to be received. Heartbeats renew the leases, and messages for all routers go to the addresses. The
    table lives in the event loop of the member.

    It also decides when a report is due. Each router asks for a spacing of the reports, because only the router knows
    from how many members it receives them; the member keeps to the longest. A dispatch is acknowledged to its own
    router alone, in each report until a heartbeat of that router shows that one of them has arrived: so an
    acknowledgement survives the loss of reports, and none is repeated after that."""

    def __init__(self, plane: Plane, clock: Clock, min_spacing_s: float = 0.0) -> None:
        """Takes `min_spacing_s`, the shortest time between two reports."""
        self._plane = plane
        self._clock = clock
        self._min_spacing_s = min_spacing_s
        self._leases: LeaseTable[MemberId] = LeaseTable(clock)
        self._addresses: dict[MemberId, str] = {}
        self._spacings_s: dict[MemberId, float] = {}
        self._unconfirmed: dict[MemberId, dict[AttemptId, _ReportNumber | None]] = {}
        """Maps each dispatch to the first report that acknowledges it, or to None until there is one."""
        self._has_news = False
        """Says whether a dispatch waits for its first acknowledgement."""
        self._last: WorkerReport | EncoderReport | StageReport | None = None
        self._sent_at_s = -math.inf

    def heartbeat(self, message: RouterHeartbeat) -> bool:
        """Renews the lease of a router, and forgets the dispatches that the router knows to be received. Returns True
        if the router is new or has moved and therefore knows nothing of this member."""
        router_id = message.router_id
        is_new = self._addresses.get(router_id) != message.address
        self._addresses[router_id] = message.address
        self._spacings_s[router_id] = message.report_spacing_s
        self._leases.renew(router_id, message.lease_s)
        taken = _ReportNumber(message.taken_epoch, message.taken_seq)
        if self._last is not None and taken.epoch == self._last.epoch:
            for attempt_id, first in list(self._unconfirmed.get(router_id, {}).items()):
                if first is not None and first <= taken:
                    del self._unconfirmed[router_id][attempt_id]
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
        self._unconfirmed.pop(router_id, None)
        self._spacings_s.pop(router_id, None)
        address = self._addresses.pop(router_id, None)
        if address is not None:
            self._plane.forget(address)

    def broadcast(self, message: PlaneMessage) -> None:
        for address in self._addresses.values():
            self._plane.send(address, message)

    # ------------------------------------------------------------ reports

    def received(self, router_id: MemberId, attempt_id: AttemptId) -> None:
        """Records that a dispatch of the router has arrived and that reports contain its work from now on. If more of
        an attempt arrives later, the member calls this again."""
        unconfirmed = self._unconfirmed.setdefault(router_id, {})
        unconfirmed.pop(attempt_id, None)
        unconfirmed[attempt_id] = None
        self._has_news = True
        if len(unconfirmed) > MAX_UNCONFIRMED:
            del unconfirmed[next(iter(unconfirmed))]

    def report_wait_s(self) -> float:
        """Returns how long the next report must wait for the spacing that the routers asked for."""
        spacing_s = max((self._min_spacing_s, *self._spacings_s.values()))
        return max(0.0, self._sent_at_s + spacing_s - self._clock.now())

    def needs(self, report: WorkerReport | EncoderReport | StageReport) -> bool:
        """Returns whether the routers should get this report: it says something new, or they have heard nothing for
        `BEAT_S`."""
        if not self._addresses:
            return False
        if self._has_news or self._last is None or self._clock.now() - self._sent_at_s >= BEAT_S:
            return True
        return msgspec.structs.replace(report, seq=self._last.seq) != self._last

    def send_report(self, report: WorkerReport | EncoderReport | StageReport) -> None:
        """Sends the report to every router, with the acknowledgements that this router lacks."""
        self._last, self._sent_at_s, self._has_news = report, self._clock.now(), False
        for router_id in self._addresses:
            self.send_report_to(router_id, report)

    def send_report_to(self, router_id: MemberId, report: WorkerReport | EncoderReport | StageReport) -> None:
        """Sends the report to one router, as to one that is new."""
        unconfirmed = self._unconfirmed.get(router_id)
        if unconfirmed:
            number = _ReportNumber(report.epoch, report.seq)
            for attempt_id, first in unconfirmed.items():
                unconfirmed[attempt_id] = first or number
            report = msgspec.structs.replace(report, acknowledged=tuple(unconfirmed))
        self._plane.send(self._addresses[router_id], report)

    def __iter__(self) -> Iterator[MemberId]:
        return iter(self._addresses)

    def __len__(self) -> int:
        return len(self._addresses)


class _ReportNumber(NamedTuple):
    epoch: int
    seq: int


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

"""Keeps the router's feeds from the members: the reports, events and snapshots that encoders and workers send it.

A member sends to the routers from which it has heartbeats. `MemberFeeds` sends these, asks for snapshots of what the
members hold, and confirms reports. It also keeps the feeds of a large cluster from taking the router's time: heartbeats
are spread over their period, members report less often the more of them there are, and few snapshots are on their way
at once, so that a router that has just started serves while it loads them.

The module knows nothing of what the messages contain, or of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from fabric.contracts import (
    EncoderReport,
    Member,
    MemberId,
    RouterHeartbeat,
    SnapshotRequest,
    StageReport,
    WorkerReport,
)
from router.run import RouterContext

MAX_HEARTBEATS_PER_S = 500.0
"""The router sends at most this many heartbeats per second; their period grows with the members beyond that."""
LEASE_PERIODS = 3
"""A lease lasts at least this many of the periods that `MAX_HEARTBEATS_PER_S` permits."""
MAX_REPORTS_PER_S = 1500.0
"""The router asks for so few reports that all members together send it at most this many per second, and as many
messages with events of their caches (docs/adr/0056-plane-at-scale.md)."""
HEARTBEATS_PER_TURN = 32
"""The router lets other tasks run after this many heartbeats."""
MAX_SNAPSHOTS = 8
"""The router awaits snapshots of at most this many members at once."""
SNAPSHOT_TIMEOUT_S = 10.0
"""The router asks another member when a snapshot, or its next page, has not come after this time. The time is long,
because a router that is late with its messages would otherwise ask for more and be later still."""


class MemberFeeds:
    """A `MemberFeeds` belongs to the event loop of one router."""

    def __init__(self, context: RouterContext) -> None:
        self._context = context
        self._marks: dict[MemberId, tuple[int, int]] = {}
        """Holds the epoch and the number of the newest report of each member."""
        self._wanted: dict[MemberId, None] = {}
        """Holds the members whose snapshots are to be asked for, in this order."""
        self._asked_at_s: dict[MemberId, float] = {}
        """Holds the members that were asked and have not answered."""

    @property
    def period_s(self) -> float:
        """Returns the time between two heartbeats to one member."""
        return max(self._context.config.heartbeat_s, self._min_period_s)

    @property
    def _min_period_s(self) -> float:
        return len(self._context.members) / MAX_HEARTBEATS_PER_S

    @property
    def num_snapshots_missing(self) -> int:
        """Returns how many members' snapshots are still to come."""
        return len(self._wanted) + len(self._asked_at_s)

    # ------------------------------------------------------------ members

    def joined(self, members: Iterable[Member]) -> None:
        """Subscribes to new members. An encoder answers the first heartbeat with its snapshot, which is small; a
        worker's snapshot is asked for."""
        for member in members:
            self._send_heartbeat(member.member_id)
            if member.kind == "worker":
                self._wanted[member.member_id] = None
        self._ask()

    def left(self, member_id: MemberId) -> None:
        """Forgets a member."""
        self._marks.pop(member_id, None)
        self._wanted.pop(member_id, None)
        self._asked_at_s.pop(member_id, None)
        self._ask()

    async def run(self) -> None:
        """Sends heartbeats, and asks again for snapshots that do not come, until it is cancelled."""
        while True:
            member_ids = list(self._context.members)
            period_s = self.period_s
            for start in range(0, max(1, len(member_ids)), HEARTBEATS_PER_TURN):
                turn = member_ids[start : start + HEARTBEATS_PER_TURN]
                for member_id in turn:
                    self._send_heartbeat(member_id)
                self._ask()
                await asyncio.sleep(period_s * max(1, len(turn)) / max(1, len(member_ids)))

    def _send_heartbeat(self, member_id: MemberId) -> None:
        context = self._context
        lease_s = max(context.config.lease_s, LEASE_PERIODS * self._min_period_s)
        spacing_s = len(context.members) / MAX_REPORTS_PER_S
        beat = RouterHeartbeat(
            context.member_id, context.plane.address, lease_s, spacing_s, *self._marks.get(member_id, (0, 0))
        )
        context.send(member_id, beat)

    # ------------------------------------------------------------ what arrives

    def took_report(self, report: WorkerReport | EncoderReport | StageReport) -> None:
        """Records a report, so that the next heartbeat confirms it."""
        if isinstance(report, StageReport):
            member_id = report.member_id
        else:
            member_id = report.worker_id if isinstance(report, WorkerReport) else report.encoder_id
        mark, newest = (report.epoch, report.seq), self._marks.get(member_id)
        if newest is None or mark > newest:
            self._marks[member_id] = mark

    def took_page(self, member_id: MemberId) -> None:
        """Records that a part of a member's snapshot has come and that others follow, so that the router awaits them
        for as long as the first one."""
        if member_id in self._asked_at_s:
            self._asked_at_s[member_id] = self._context.clock.now()

    def took_snapshot(self, member_id: MemberId) -> None:
        """Records that the last part of a member's snapshot has come."""
        self._wanted.pop(member_id, None)
        if self._asked_at_s.pop(member_id, None) is not None:
            self._ask()

    def want_snapshot(self, member_id: MemberId) -> None:
        """Asks the member for its snapshot once its turn comes. It does nothing if the snapshot is on its way."""
        if member_id not in self._asked_at_s:
            self._wanted[member_id] = None
        self._ask()

    def _ask(self) -> None:
        now_s = self._context.clock.now()
        for member_id in [each for each, at_s in self._asked_at_s.items() if now_s - at_s >= SNAPSHOT_TIMEOUT_S]:
            del self._asked_at_s[member_id]
            self._wanted[member_id] = None
        while self._wanted and len(self._asked_at_s) < MAX_SNAPSHOTS:
            member_id = next(iter(self._wanted))
            del self._wanted[member_id]
            self._asked_at_s[member_id] = now_s
            self._context.send(member_id, SnapshotRequest(self._context.member_id, self._context.plane.address))

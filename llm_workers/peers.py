"""Who else is in the cluster, as a worker sees it. Who has left is confirmed dead: what waits for it is given up.

Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from fabric.channel import FeatureSink
from fabric.ids import MemberId
from fabric.messages import Member
from fabric.plane import Plane
from llm_workers.receiver import Receiver


class Peers:
    """Lives in the event loop."""

    def __init__(self, plane: Plane, sink: FeatureSink, receiver: Receiver) -> None:
        self._plane, self._sink, self._receiver = plane, sink, receiver
        self._members: dict[MemberId, Member] = {}

    def get(self, member_id: MemberId) -> Member | None:
        return self._members.get(member_id)

    def update(self, members: Sequence[Member]) -> list[MemberId]:
        """Everybody that is there now. Quarantined slots and announcements of those that left are given up, their
        connections closed; returns the routers among them."""
        now = {member.member_id: member for member in members}
        left = [self._members[member_id] for member_id in self._members.keys() - now.keys()]
        for gone in left:
            if gone.transfer_agent:
                self._sink.peer_dead(gone.transfer_agent)
                self._receiver.source_gone(gone.transfer_agent)
            self._plane.forget(gone.address)
        self._members = now
        return [gone.member_id for gone in left if gone.kind == "router"]

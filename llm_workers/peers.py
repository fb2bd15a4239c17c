"""Tracks the other members of the cluster for a worker. A member that has left counts as confirmed dead, and the worker
gives up everything that waits for it.

This module knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from fabric.channel import FeatureSink
from fabric.ids import MemberId
from fabric.messages import Member
from fabric.plane import Plane
from llm_workers.receiver import Receiver


class Peers:
    """Holds the current members. It lives in the event loop."""

    def __init__(self, plane: Plane, sink: FeatureSink, receiver: Receiver) -> None:
        self._plane, self._sink, self._receiver = plane, sink, receiver
        self._members: dict[MemberId, Member] = {}

    def get(self, member_id: MemberId) -> Member | None:
        return self._members.get(member_id)

    def update(self, members: Sequence[Member]) -> list[MemberId]:
        """Takes the list of all current members. For each member that has left, it gives up quarantined slots and
        announcements and closes the connection. Returns the routers among the members that left."""
        now = {member.member_id: member for member in members}
        left = [self._members[member_id] for member_id in self._members.keys() - now.keys()]
        for gone in left:
            if gone.transfer_agent:
                self._sink.peer_dead(gone.transfer_agent)
                self._receiver.source_gone(gone.transfer_agent)
            self._plane.forget(gone.address)
        self._members = now
        return [gone.member_id for gone in left if gone.kind == "router"]

"""Holds what all requests of one router share. The service creates them once; the members in them change. The
module knows nothing of single requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fabric.clock import Clock
from fabric.ids import MemberId
from fabric.messages import Member, PlaneMessage
from fabric.plane import Plane
from router.config import RouterConfig
from router.metrics import RouterMetrics
from router.planning.cluster import ClusterState
from router.pools import Pools
from router.tasks import Tasks


@dataclass(frozen=True, slots=True)
class RouterContext:
    member_id: MemberId
    config: RouterConfig
    feature_row_bytes: int
    """This is the number of bytes of one feature row on one level: `hidden_size * itemsize` of the model."""
    cluster: ClusterState
    plane: Plane
    pools: Pools
    clock: Clock
    metrics: RouterMetrics
    tasks: Tasks = field(default_factory=Tasks)
    members: dict[MemberId, Member] = field(default_factory=dict)
    """Holds the workers and encoders that are there."""

    def send(self, member_id: MemberId, message: PlaneMessage) -> bool:
        """Sends a message to a member by its id; returns False if the member has left."""
        member = self.members.get(member_id)
        return member is not None and self.plane.send(member.address, message)

    def exclude(self, member_id: MemberId) -> None:
        """Keeps plans from using the member for `exclusion_s` seconds."""
        self.cluster.exclude(member_id, self.clock.now() + self.config.exclusion_s)

    def of_kind(self, kind: str) -> list[Member]:
        return [member for member in self.members.values() if member.kind == kind]

    def set_members(self, members: Iterable[Member]) -> None:
        """Replaces the membership by the workers and encoders among `members`."""
        self.members.clear()
        self.members.update({each.member_id: each for each in members if each.kind in ("worker", "encoder")})

"""Runs the directory of members as a named Ray actor, and the heartbeat that each member sends to it.

Every heartbeat carries the whole member record, so a restarted actor knows all members again after one period. The
module knows nothing of what members do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import ray
from ray.exceptions import RayError

from fabric.contracts import Clock, ConfigError, Member, MemberId, SystemClock
from fabric.transport import Directory, PlaneKeys, View

logger = logging.getLogger("weft.directory")

NAMESPACE = "weft"
"""This namespace of Ray holds the named actors of every cluster."""
LEASE_S = 5.0
PERIOD_S = 0.5
CLAIM_S = 5.0


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)
class DirectoryActor:
    """Runs a `fabric.transport.membership.Directory` as an actor. Its answers carry the actor's epoch, because it
    forgets all members when it restarts."""

    def __init__(self, lease_s: float, plane_keys: PlaneKeys) -> None:
        self._plane_keys = plane_keys
        self._directory = Directory(SystemClock(), lease_s)
        self._epoch = time.time_ns()

    def heartbeat(self, member: Member) -> tuple[int, View]:
        return self._epoch, self._directory.heartbeat(member)

    def plane_keys(self) -> PlaneKeys:
        """Returns the keys of the cluster's message plane. They stay the same after a restart, because Ray gives the
        constructor its first arguments again."""
        return self._plane_keys

    def leave(self, member_id: MemberId) -> None:
        self._directory.leave(member_id)

    def members(self) -> tuple[Member, ...]:
        return self._directory.view().members


def claim_name(cluster: str, patience_s: float = CLAIM_S) -> ray.actor.ActorHandle:
    """Creates the directory of a cluster with that name, and the keys of its message plane. The directory lives as long
    as this process and the returned handle, so the name is free again when the process has ended for any reason. Raises
    ConfigError if a cluster with that name stays on this Ray for `patience_s`; it waits that long because Ray needs a
    moment to notice that a process has died."""
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            return DirectoryActor.options(  # type: ignore[attr-defined]  # added by ray.remote
                name=f"{cluster}-directory", namespace=NAMESPACE
            ).remote(LEASE_S, PlaneKeys.make())
        except ValueError as error:  # The name is taken.
            if time.monotonic() > deadline_s:
                message = f"a cluster named {cluster!r} runs on this Ray already; set ray.cluster_name to another name"
                raise ConfigError(message) from error
        time.sleep(PERIOD_S)


def directory_actor(cluster: str) -> ray.actor.ActorHandle:
    """Returns the directory of the cluster with that name. Raises ValueError if there is none."""
    return ray.get_actor(f"{cluster}-directory", namespace=NAMESPACE)


async def plane_keys(cluster: str) -> PlaneKeys:
    """Returns the keys of the cluster's message plane, which it reads from the directory. Ray's own token protects this
    call."""
    keys: PlaneKeys = await directory_actor(cluster).plane_keys.remote()
    return keys


class Membership:
    """Holds one member's view of the other members, from the directory's views. A directory that has just restarted
    knows only the members that have sent a heartbeat since. So for one lease after a restart, members that are missing
    from the view are kept."""

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._epoch: int | None = None
        self._trusted_from_s = 0.0
        self._members: tuple[Member, ...] = ()

    def update(self, epoch: int, view: View) -> tuple[Member, ...] | None:
        """Takes a view. Returns the members if they have changed, or None."""
        now_s = self._clock.now()
        if self._epoch is not None and epoch != self._epoch:
            self._trusted_from_s = now_s + self._lease_s
        self._epoch = epoch
        members = view.members
        if now_s < self._trusted_from_s:
            present = {member.member_id for member in members}
            members += tuple(member for member in self._members if member.member_id not in present)
        if set(members) == set(self._members):
            return None
        self._members = members
        return members


class Heartbeat:
    """Keeps one member in its cluster's directory and passes every change of the members to `on_change`."""

    def __init__(self, cluster: str, member: Member, on_change: Callable[[Sequence[Member]], None]) -> None:
        self._cluster = cluster
        self._member = member
        self._on_change = on_change
        self._membership = Membership(SystemClock(), LEASE_S)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._actor = directory_actor(self._cluster)
        await self._beat()
        self._task = asyncio.create_task(self._run(), name="weft-heartbeat")

    async def stop(self) -> None:
        """Leaves the directory at once, so that routers stop planning with this member."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self._actor.leave.remote(self._member.member_id)
        except RayError as error:
            logger.warning(
                "the member could not leave the directory (%s); its lease there ends by itself", type(error).__name__
            )

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await asyncio.wait_for(self._beat(), timeout=LEASE_S)
            except (RayError, TimeoutError) as error:
                logger.warning(
                    "the directory did not answer (%s); the member keeps its last view of the cluster",
                    type(error).__name__,
                )

    async def _beat(self) -> None:
        epoch, view = await self._actor.heartbeat.remote(self._member)
        members = self._membership.update(epoch, view)
        if members is not None:
            self._on_change(members)

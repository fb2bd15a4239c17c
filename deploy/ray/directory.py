"""Runs the directory of members as a named Ray actor, and the heartbeat that each member sends to it.

The directory belongs to the process of `weft serve`, which creates it (`claim_name`). An application that was submitted
to Serve itself has no such process. Its replicas create the directory (`keep_directory`), and it ends by itself once
no member and no replica of the application is left.

Every heartbeat carries the whole member record, so a restarted actor knows all members again after one period. It also
carries the version of the view that the member has, and the answer contains what has changed since. The module knows
nothing of what members do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.ray.removal import replica_names
from deploy.scaling import WaitingBoard
from deploy.start_phases import LoadedBytes, StartBoard, TellPhase, ToldPhase
from fabric.contracts import (
    ConfigError,
    Member,
    MemberId,
    ScalingReport,
    SystemClock,
    Unavailable,
    WaitingWork,
)
from fabric.transport import Directory, Membership, PlaneKeys, ViewChange

logger = logging.getLogger("weft.directory")

NAMESPACE = "weft"
"""This namespace of Ray holds the named actors of every cluster."""
LEASE_S = 5.0
NODE_SHARE = 0.001
"""A directory takes this share of the resource by which Ray names a node, so that a thousand fit."""
CLAIM_S = 5.0
RETRY_S = 0.5
LOOK_S = 1.0
NUM_LOOKS = 2
SCALING_POLL_S = 1.0
"""A router asks for the decisions about the sizes of pools this often, if a pool is scaled."""


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)
class DirectoryActor:
    """Runs a `fabric.transport.membership.Directory` as an actor. Its answers carry the actor's epoch, because it
    forgets all members when it restarts."""

    def __init__(self, lease_s: float, plane_keys: PlaneKeys, application: str | None = None) -> None:
        """`application` names the Serve application with which the directory ends; None means that the process that
        created it owns it."""
        self._plane_keys = plane_keys
        self._directory = Directory(SystemClock(), lease_s)
        self._epoch = time.time_ns()
        self._pool_to_scaling: dict[str, ScalingReport] = {}
        self._waiting = WaitingBoard()
        self._starting = StartBoard()
        self._application = application
        self._lock = threading.Lock()
        self._is_ending = False
        if application is not None:
            watch = partial(self._end_with, application, ray.get_runtime_context().current_actor)
            threading.Thread(target=watch, name="weft-directory-end", daemon=True).start()

    def _end_with(self, application: str, own: ray.actor.ActorHandle) -> None:
        """Ends this actor when it was found `NUM_LOOKS` times in a row that no member and no replica is left."""
        num_missing = 0
        while num_missing < NUM_LOOKS:
            time.sleep(LOOK_S)
            with self._lock:
                is_idle = not self._directory.view().members
            num_missing = num_missing + 1 if is_idle and not _may_run(application) else 0
            with self._lock:
                if num_missing == NUM_LOOKS and self._directory.view().members:
                    num_missing = 0
                self._is_ending = num_missing == NUM_LOOKS
        ray.kill(own, no_restart=True)

    def heartbeat(self, member: Member, known: tuple[int, int] | None) -> tuple[int, float, ViewChange]:
        """Takes a member's record, and the epoch and version of the view that it has. Returns the actor's epoch, the
        seconds until the member's next heartbeat, and what has changed. Raises Unavailable if the directory ends."""
        with self._lock:
            return self._beat(member, known)

    def _beat(self, member: Member, known: tuple[int, int] | None) -> tuple[int, float, ViewChange]:
        if self._is_ending:
            raise Unavailable("this directory ends, because its application was deleted")
        version = known[1] if known is not None and known[0] == self._epoch else None
        change = self._directory.heartbeat(member, version)
        return self._epoch, self._directory.period_s, change

    def plane_keys(self) -> PlaneKeys:
        """Returns the keys of the cluster's message plane. They stay the same after a restart, because Ray gives the
        constructor its first arguments again."""
        return self._plane_keys

    def application(self) -> str | None:
        """Returns the Serve application with which the directory ends, or None if a server owns it."""
        return self._application

    def leave(self, member_id: MemberId) -> None:
        with self._lock:
            self._directory.leave(member_id)

    def note_start(self, kind: str, name: str, phase: str, loaded: tuple[int, int]) -> None:
        """Takes the phase in which a member is while it starts, and how much of its weights is loaded."""
        self._starting.tell(kind, name, phase, LoadedBytes(*loaded))

    def starting(self) -> tuple[ToldPhase, ...]:
        """Returns the latest phase of each member that has told one."""
        return self._starting.told()

    def take_scaling(self, report: ScalingReport) -> None:
        """Takes the newest decision about the size of a pool."""
        self._pool_to_scaling[report.pool] = report

    def scaling(self, router_id: MemberId, waiting: Sequence[WaitingWork]) -> tuple[ScalingReport, ...]:
        """Takes what waits at a router, and returns the newest decision about each pool that is scaled."""
        self._waiting.tell(router_id, waiting, time.monotonic())
        return tuple(self._pool_to_scaling.values())

    def waiting(self) -> tuple[WaitingWork, ...]:
        """Returns what waits at all routers, as one sum for what the same pools of workers can take."""
        return self._waiting.total(time.monotonic())

    def pid(self) -> int:
        """Returns the id of the actor's process, for people and benchmarks."""
        return os.getpid()

    def members(self) -> tuple[Member, ...]:
        with self._lock:
            return self._directory.view().members


def _may_run(application: str) -> bool:
    """Returns whether a replica of the application runs or starts, or Ray can't be asked now. Serve itself is not
    asked: a directory without members has nothing to lose, also if the application is still there."""
    try:
        return bool(replica_names(application))
    except (RayError, TimeoutError) as error:
        logger.warning("Ray did not answer whether replicas of %r run (%s)", application, type(error).__name__)
        return True


def claim_name(cluster: str, patience_s: float = CLAIM_S) -> ray.actor.ActorHandle:
    """Creates the directory of a cluster with that name, and the keys of its message plane. The directory lives as long
    as this process and the returned handle, so the name is free again when the process has ended for any reason. Raises
    ConfigError if a cluster with that name stays on this Ray for `patience_s`; it waits that long because Ray needs a
    moment to notice that a process has died."""
    deadline_s, here = time.monotonic() + patience_s, _here()
    while True:
        try:
            return DirectoryActor.options(  # type: ignore[attr-defined]  # added by ray.remote
                name=f"{cluster}-directory", namespace=NAMESPACE, **here
            ).remote(LEASE_S, PlaneKeys.make())
        except ValueError as error:  # The name is taken.
            if time.monotonic() > deadline_s:
                message = f"a cluster named {cluster!r} runs on this Ray already; set ray.cluster_name to another name"
                raise ConfigError(message) from error
        time.sleep(RETRY_S)


def keep_directory(cluster: str, application: str) -> ray.actor.ActorHandle:
    """Returns the directory of a cluster without a server, and creates it with new keys if there is none. Ray creates
    one of a name only, so replicas may call this at the same time."""
    return DirectoryActor.options(  # type: ignore[attr-defined]  # added by ray.remote
        name=f"{cluster}-directory", namespace=NAMESPACE, lifetime="detached", get_if_exists=True
    ).remote(LEASE_S, PlaneKeys.make(), application)


def check_unclaimed(cluster: str) -> None:
    """Raises ConfigError if a server of `weft serve` owns a cluster with that name on this Ray."""
    try:
        owner = ray.get(directory_actor(cluster).application.remote(), timeout=CLAIM_S)
    except (ValueError, RayError):  # There is none, or it is about to end.
        return
    if owner is None:
        message = f"a server runs a cluster named {cluster!r} on this Ray; set ray.cluster_name to another name"
        raise ConfigError(message)


def _here() -> dict[str, Any]:
    """Returns the options that put the directory on this process's node. It ends with this process anyway, so no other
    node's end can take it away.

    The strategy alone is not enough: Ray gives an actor that needs no resources to any node for placing, and a node
    that has just started may not know this one yet and keeps the actor. An actor that needs a resource is placed by
    the node of its owner, so the directory takes a little of the resource that Ray gives to this node alone."""
    own = ray.get_runtime_context().get_node_id()
    (node,) = (each for each in ray.nodes() if each["NodeID"] == own)
    return {
        "resources": {f"node:{node['NodeManagerAddress']}": NODE_SHARE},
        "scheduling_strategy": NodeAffinitySchedulingStrategy(own, soft=True),
    }


def directory_actor(cluster: str) -> ray.actor.ActorHandle:
    """Returns the directory of the cluster with that name. Raises ValueError if there is none."""
    return ray.get_actor(f"{cluster}-directory", namespace=NAMESPACE)


def phase_teller(cluster: str) -> TellPhase:
    """Returns what tells the directory of a cluster the phases of a member that starts. It does not wait for an
    answer."""
    actor = directory_actor(cluster)

    def tell(kind: str, name: str, phase: str, loaded: LoadedBytes = LoadedBytes(), /) -> None:  # noqa: B008
        actor.note_start.remote(kind, name, phase, tuple(loaded))

    return tell


async def plane_keys(cluster: str) -> PlaneKeys:
    """Returns the keys of the cluster's message plane, which it reads from the directory. Ray's own token protects this
    call."""
    keys: PlaneKeys = await directory_actor(cluster).plane_keys.remote()
    return keys


async def watch_scaling(
    cluster: str,
    router_id: MemberId,
    waiting: Callable[[], Sequence[WaitingWork]],
    take: Callable[[Sequence[ScalingReport]], None],
) -> None:
    """Tells the directory what `waiting` says of this router, and passes the newest decisions about the sizes of pools
    to `take`, again and again until it is cancelled."""
    actor = directory_actor(cluster)
    while True:
        try:
            take(await asyncio.wait_for(actor.scaling.remote(router_id, waiting()), timeout=LEASE_S))
        except (RayError, TimeoutError) as error:
            logger.warning("the directory did not answer (%s)", type(error).__name__)
        await asyncio.sleep(SCALING_POLL_S)


class Heartbeat:
    """Keeps one member in its cluster's directory and passes every change of the members to `on_change`."""

    def __init__(self, cluster: str, member: Member, on_change: Callable[[Sequence[Member]], None]) -> None:
        self._cluster = cluster
        self._is_directory_dead = False
        self._member = member
        self._on_change = on_change
        self._membership = Membership(SystemClock(), LEASE_S)
        self._period_s = RETRY_S
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._actor = directory_actor(self._cluster)
        await self._beat()
        self._task = asyncio.create_task(self._run(), name="weft-heartbeat")

    def note_config_flaw(self, flaw: str) -> None:
        """Puts into the member's record why it refused the last change of its config; an empty text says that it took
        the change. The next heartbeat carries the record."""
        self._member = msgspec.structs.replace(self._member, config_flaw=flaw)

    def check(self) -> None:
        """Raises Unavailable if the directory has ended for good. Another one has other keys, so this member can't go
        on under it."""
        if self._is_directory_dead:
            raise Unavailable("the directory of the cluster was removed, so this member must start again")

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
            await asyncio.sleep(self._period_s)
            try:
                await asyncio.wait_for(self._beat(), timeout=LEASE_S)
            except (RayError, TimeoutError) as error:
                self._is_directory_dead = isinstance(error, ActorDiedError)
                logger.warning(
                    "the directory did not answer (%s); the member keeps its last view of the cluster",
                    type(error).__name__,
                )

    async def _beat(self) -> None:
        known = self._membership.known()
        epoch, self._period_s, change = await self._actor.heartbeat.remote(self._member, known)
        members = self._membership.update(epoch, change)
        if members is not None:
            self._on_change(members)

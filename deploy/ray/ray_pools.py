"""Calls a named replica through Serve handles: it implements the router's `WorkerPool` and `EncoderPool` on Ray.

Weft's planner has already chosen the replica when a call is made. `call_pinned` names it as the `session_id` of the
handle, and `PinnedRequestRouter`, which replaces Serve's own choice of a replica, routes the call there. Serve remains
responsible for placing, health checks and draining. Serve counts the open call, so draining waits for it. Cancelling
the awaiting task cancels the call, which aborts the request.

The module knows nothing of what is called or of why the planner chose a replica.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deploy.ray import replica_news
from fabric.contracts import (
    EncodeRequest,
    EncodeResult,
    EncoderLost,
    GenerateRequest,
    GenerateResult,
    Member,
    MemberId,
    NoCapacity,
    TargetGone,
    Unavailable,
    WeftError,
    WorkerLost,
)
from router.prompt import MediumFile

INLINE_BYTES = 64 * 1024
"""Calls carry media up to this size. Larger media are passed by reference through Ray's object store, which keeps one
copy for all processes of a host. A file is put there once, however many calls carry it."""


class RayWorkerPool:
    """Implements `WorkerPool` with the handle of each pool's deployment. A worker's record says to which pool it
    belongs, so a call goes to a deployment that knows the worker."""

    def __init__(self, pool_to_handle: Mapping[str, DeploymentHandle]) -> None:
        self._pool_to_generate = {pool: handle.generate for pool, handle in pool_to_handle.items()}
        self._worker_to_pool: dict[MemberId, str] = {}

    def update_members(self, members: Sequence[Member]) -> None:
        """Takes all members of the cluster."""
        self._worker_to_pool = {each.member_id: each.pool for each in members if each.kind == "worker"}

    async def generate(self, worker_id: MemberId, request: GenerateRequest) -> GenerateResult:
        pool = self._worker_to_pool.get(worker_id)
        if pool is None:
            raise TargetGone(f"the worker {worker_id} has left the cluster")
        if pool not in self._pool_to_generate:
            raise WorkerLost(f"the worker {worker_id} belongs to the pool {pool!r}, which this cluster does not have")
        result: GenerateResult = await call_pinned(self._pool_to_generate[pool], worker_id, WorkerLost, request)
        return result


class RayEncoderPool:
    """Implements `EncoderPool` with the encoder deployment's handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._encode = handle.encode

    async def encode(self, encoder_id: MemberId, request: EncodeRequest, media: Sequence[MediumFile]) -> EncodeResult:
        # The media are top-level arguments, so that Ray resolves their references before the call.
        carried = [file.sent(ray.put) if len(file.data) > INLINE_BYTES else file.data for file in media]
        result: EncodeResult = await call_pinned(self._encode, encoder_id, EncoderLost, request, *carried)
        if not any(item.error for item in result.items):
            for file in media:
                file.arrived()
        return result


class NoEncoders:
    """Implements `EncoderPool` for a cluster without encoders. The planner never calls it, but a stale plan would."""

    async def encode(self, encoder_id: MemberId, request: EncodeRequest, media: Sequence[MediumFile]) -> EncodeResult:
        raise NoCapacity("this cluster has no encoders")


async def call_pinned(handle: DeploymentHandle, member_id: MemberId, lost: type[Unavailable], *args: Any) -> Any:
    """Calls the replica `member_id` once and returns its result. Raises TargetGone, `lost`, or the WeftError that the
    replica raised.

    The call starts in an empty context: two concurrent calls to one deployment from one HTTP request would share
    Serve's internal request id, and one of them would hang."""
    pinned = handle.options(session_id=str(member_id))
    response = contextvars.Context().run(pinned.remote, *args)
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, WeftError):
            raise type(cause)(cause.message, param=cause.param, retry_after_s=cause.retry_after_s) from error
        raise lost(f"the call to {member_id} failed with an exception ({type(cause).__name__})") from error
    except (RayActorError, TaskCancelledError) as error:
        raise lost(f"{member_id} has died, or the call to it was cancelled") from error
    except (RayError, RayServeException) as error:
        raise lost(f"{member_id} can't be reached ({type(error).__name__})") from error


# ------------------------------------------------------------ the choice of a replica


class PinnedRequestRouter(RequestRouter):  # type: ignore[misc]  # mypy does not follow Ray
    """Routes each request to the replica whose unique id is the handle's `session_id`, or to any replica if the handle
    has no `session_id`.

    Ray 2.60 has three traps, and each was seen to hang the router. First, an empty list of candidates makes it wait for
    ever, so a call to a replica that has gone fails the future of its request and returns the candidates. Second,
    `should_backoff` must be set, or a full replica makes the loop spin. Third, while a deployment has no replica at
    all, Ray does not ask for a choice until the next one has started, so calls to the last replica fail before that.

    A replica is in Weft's directory as soon as it has started, a little before Serve reports it to its callers. So a
    call to a replica that was never seen waits for a few seconds. A call to one that was seen earlier and is missing
    now fails at once.
    """

    def initialize_state(self, unknown_grace_s: float = 5.0) -> None:
        """Initialises the state of this router. Serve calls it with the `request_router_kwargs`."""
        self._unknown_grace_s = unknown_grace_s
        self._history = replica_news.ReplicaHistory()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        running = [replica.replica_id.unique_id for replica in replicas]
        self._history.update(running)
        super().update_replicas(replicas)
        replica_news.update(self._deployment_id.name, running)
        self._fail_waiting_calls()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._fail_waiting_calls()

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        if not self.curr_replicas and self._history.has_seen(pending_request.metadata.session_id):
            raise _target_gone(pending_request)
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)

    def _fail_waiting_calls(self) -> None:
        """Fails the calls to replicas that have gone, if no replica is left that could make Ray ask for a choice."""
        for pending in () if self.curr_replicas else tuple(self._pending_requests_to_fulfill):
            if self._history.has_seen(pending.metadata.session_id) and not pending.future.done():
                pending.future.set_exception(_target_gone(pending))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        target = pending_request.metadata.session_id
        if not target:
            return [candidate_replicas]
        pinned = [replica for replica in candidate_replicas if replica.replica_id.unique_id == target]
        if pinned:
            return [pinned]
        if not self._history.has_seen(target) and time.time() - pending_request.created_at < self._unknown_grace_s:
            return []  # Serve backs off and asks again.
        if not pending_request.future.done():
            pending_request.future.set_exception(_target_gone(pending_request))
        return [candidate_replicas]


def _target_gone(pending_request: PendingRequest) -> TargetGone:
    return TargetGone(f"the replica {pending_request.metadata.session_id} has left the cluster")

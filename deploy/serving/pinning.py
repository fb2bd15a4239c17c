"""Serve's choice of replica, replaced: a call goes to the replica that its `session_id` names.

Weft's planner has chosen already. What is left to Serve is placing, health checks and draining. Traps of Ray 2.60,
each seen to hang the router: an empty candidate list waits for ever, so a pin whose replica has gone fails its
request's future and returns the candidates; `should_backoff` must be set, or a full replica makes the loop spin.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from fabric.errors import TargetGone


class PinnedRequestRouter(RequestRouter):
    """Routes each request to the replica whose unique id is the handle's `session_id`; without one, to any."""

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
        if not pending_request.future.done():
            pending_request.future.set_exception(TargetGone(f"replica {target} is gone"))
        return [candidate_replicas]

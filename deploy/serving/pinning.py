"""Serve's choice of replica, replaced: a call goes to the replica that its `session_id` names.

Weft's planner has chosen already. What is left to Serve is placing, health checks and draining. Traps of Ray 2.60,
each seen to hang the router: an empty candidate list waits for ever, so a pin whose replica has gone fails its
request's future and returns the candidates; `should_backoff` must be set, or a full replica makes the loop spin.

A replica is in Weft's directory as soon as it has started, a little before Serve tells its callers. So a pin that was
never seen is given a moment; one that was seen and is not there any more is gone at once.
"""

from __future__ import annotations

import time

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from fabric.errors import TargetGone


class PinnedRequestRouter(RequestRouter):
    """Routes each request to the replica whose unique id is the handle's `session_id`; without one, to any."""

    def initialize_state(self, unknown_grace_s: float = 5.0) -> None:
        """Called by Serve with the `request_router_kwargs`."""
        self._unknown_grace_s = unknown_grace_s
        self._seen: set[str] = set()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._seen.update(replica.replica_id.unique_id for replica in replicas)
        super().update_replicas(replicas)

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
        if target not in self._seen and time.time() - pending_request.created_at < self._unknown_grace_s:
            return []  # Serve backs off and asks again.
        if not pending_request.future.done():
            pending_request.future.set_exception(TargetGone(f"replica {target} is gone"))
        return [candidate_replicas]

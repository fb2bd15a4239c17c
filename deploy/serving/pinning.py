"""Replaces Serve's choice of a replica: a call goes to the replica that its `session_id` names.

Weft's planner has already chosen the replica. Serve remains responsible for placing, health checks and draining. Ray
2.60 has two traps, and each was seen to hang the router. First, an empty list of candidates makes it wait for ever, so
a call to a replica that has gone fails the future of its request and returns the candidates. Second, `should_backoff`
must be set, or a full replica makes the loop spin.

A replica is in Weft's directory as soon as it has started, a little before Serve reports it to its callers. So a call
to a replica that was never seen waits for a few seconds. A call to one that was seen earlier and is missing now fails
at once.
"""

from __future__ import annotations

import time

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from fabric.errors import TargetGone


class PinnedRequestRouter(RequestRouter):  # type: ignore[misc]  # mypy does not follow Ray
    """Routes each request to the replica whose unique id is the handle's `session_id`, or to any replica if the handle
    has no `session_id`."""

    def initialize_state(self, unknown_grace_s: float = 5.0) -> None:
        """Initialises the state of this router. Serve calls it with the `request_router_kwargs`."""
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

"""Defines what travels between the routers and the policy that scales a pool: the work that waits at a router, and the
report of a decision with the metrics that routers make of it.

The policy runs in a process that answers no scrape and sees no router, so its decisions travel to the routers, and what
no member knows of yet travels to the policy. The module knows nothing of how a decision is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from fabric.contracts.calls import Wire
from fabric.contracts.reported_metrics import gauge


class WaitingWork(Wire, frozen=True):
    """A `WaitingWork` is what requests that wait at routers will be to the pools, while no member knows of them. The
    same pools of workers can take all of these requests."""

    worker_s: float = 0.0
    """Predicts the time that their prompts add to the steps of one worker."""
    kv_share: float = 0.0
    """Says how many workers' KV blocks their prompts fill."""
    encoder_s: float = 0.0
    """Predicts the time that their media add to the forward passes of one encoder."""
    barred_pools: tuple[str, ...] = ()
    """Names the pools of workers that can't take them (`Member.pool`), in the order of the alphabet."""

    def plus(self, other: WaitingWork) -> WaitingWork:
        """Returns the sum of both, which the same pools can take."""
        assert self.barred_pools == other.barred_pools
        return WaitingWork(
            self.worker_s + other.worker_s,
            self.kv_share + other.kv_share,
            self.encoder_s + other.encoder_s,
            self.barred_pools,
        )


def sum_waiting(works: Iterable[WaitingWork]) -> tuple[WaitingWork, ...]:
    """Returns the sums of works that the same pools can take."""
    barred_to_sum: dict[tuple[str, ...], WaitingWork] = {}
    for work in works:
        known = barred_to_sum.get(work.barred_pools)
        barred_to_sum[work.barred_pools] = work if known is None else known.plus(work)
    return tuple(barred_to_sum.values())


class ScalingReport(Wire, frozen=True):
    """A `ScalingReport` holds the newest decision about a pool, and what it was made from."""

    pool: str
    """Names the pool: `encoder`, `worker`, or `worker-NAME` for a further pool of workers."""
    reason: str
    """Names what decided, for example `queue` or `silence`."""
    told: str
    """Explains the decision, for a log."""
    reason_to_count: dict[str, int]
    """Counts the decisions so far, by reason."""
    num_desired: Annotated[int, gauge("weft_autoscaling_desired_replicas", "Replicas that the pool should have.")] = 0
    num_running: Annotated[int, gauge("weft_autoscaling_running_replicas", "Replicas of the pool that run.")] = 0
    num_starting: Annotated[
        int,
        gauge("weft_autoscaling_starting_replicas", "Replicas of the pool that were asked for and do not run yet."),
    ] = 0
    num_silent: Annotated[
        int,
        gauge(
            "weft_autoscaling_silent_replicas",
            "Running replicas whose load is not known; while there is one, the pool does not shrink.",
        ),
    ] = 0
    queue_s: Annotated[
        float,
        gauge("weft_autoscaling_queue_seconds", "Predicted time of the queued work, summed over the replicas."),
    ] = 0.0
    work_rate: Annotated[
        float,
        gauge(
            "weft_autoscaling_work_replicas",
            "Work that arrives, as the number of replicas that it would keep busy all the time.",
        ),
    ] = 0.0
    memory_use: Annotated[
        float,
        gauge("weft_autoscaling_memory_replicas", "KV blocks in use, as the number of replicas that they would fill."),
    ] = 0.0
    for_work: Annotated[
        float, gauge("weft_autoscaling_needed_for_work_replicas", "Replicas that the arriving work asks for.")
    ] = 0.0
    for_queue: Annotated[
        float,
        gauge(
            "weft_autoscaling_needed_for_queue_replicas",
            "Replicas that the queue asks for; 0 while it is within its limit.",
        ),
    ] = 0.0
    for_memory: Annotated[
        float, gauge("weft_autoscaling_needed_for_memory_replicas", "Replicas that the KV blocks in use ask for.")
    ] = 0.0
    num_enough: Annotated[
        int, gauge("weft_autoscaling_enough_replicas", "Replicas that would be enough now, with something to spare.")
    ] = 0
    startup_s: Annotated[
        float,
        gauge("weft_autoscaling_startup_seconds", "Recent average of the time from a decision until a replica runs."),
    ] = 0.0
    waiting_s: Annotated[
        float,
        gauge(
            "weft_autoscaling_waiting_seconds",
            "Predicted work of the requests that wait at the routers for room or for their turn; for workers it is in "
            "`weft_autoscaling_queue_seconds` too.",
        ),
    ] = 0.0
    waiting_memory: Annotated[
        float,
        gauge(
            "weft_autoscaling_waiting_memory_replicas",
            "KV blocks that the requests at the routers wait for, as the number of replicas that they would fill.",
        ),
    ] = 0.0

"""Turns the reports of a member into its `ReplicaLoad`: what a decision about the size of its pool needs to know.

The unit of all work is the second of one replica. A replica's queue is the predicted time until the work that it has
now is done. The work that has arrived at it is a sum since its start: what was done, and what is left. So it shows the
true demand also while the replica can't keep up, and a pool that adds up the sums of its members is not deceived when
requests go to other members than before.

A device that is always busy is not yet short of time. Encoders and workers compute in steps, each of which takes a
fixed time and something for what is in it, and a busier one has more in each step. So the work is what the contents
add, and the capacity is what the fixed part leaves of the longest step that the operator's targets allow. Otherwise a
worker that decodes one sequence would count as full, and a pool of encoders would seem to get more work the more
encoders share it, because their batches become smaller.

What waits at the routers is the load of one more replica, which does nothing (`waiting_load`).

A shortage in one pool does not show as a queue or as used memory in the other: an encoder whose arena is full of
features that workers have not read counts no queue, and KV blocks of sequences that wait for features do not count.

The module knows nothing of pools, of decisions, or of how a load travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fabric.contracts import EncoderReport, WaitingWork, WorkerReport

FULL_ARENA = 0.9
"""An arena counts as full of unread features from this share on."""
IDLE_DEVICE = 0.5
"""A device that is busy for less than this share of the time, with a queue and a full arena, waits for the workers."""
LEAST_CAPACITY = 0.2
"""A replica counts as able to work for at least this share of its time, however long its empty steps take."""


class ReplicaLoad(NamedTuple):
    """A `ReplicaLoad` is the load of one replica at one moment."""

    queue_s: float = 0.0
    """Holds the predicted seconds until the queued work is done; new work begins after that."""
    arrived_s: float = 0.0
    """Sums the work that has arrived since the replica's start, in seconds of its capacity."""
    arrived_beside_s: float = 0.0
    """Sums the same for the stage that works beside: the decoding of an encoder. The busier stage counts."""
    memory_use: float = 0.0
    """Holds the share of the KV blocks that sequences use which don't wait for features; 0 for encoders."""
    num_open: float = 0.0
    """Counts the requests or items that are open. It is only shown; work is measured in seconds."""


class PoolShares(NamedTuple):
    """A `PoolShares` says which share of the work that waits at the routers a pool of workers counts as its own: its
    part of all workers that those scaled pools may have which can take the work. Each pool with all of it would grow
    for the same work, and a pool that can't take it would grow in vain."""

    pool: str
    pool_to_most: Mapping[str, int]
    """Holds the largest size of each pool that is scaled."""

    def of(self, work: WaitingWork) -> float:
        """Returns the share of the pool, which is scaled, in some work."""
        able = {pool: most for pool, most in self.pool_to_most.items() if pool not in work.barred_pools}
        return able[self.pool] / sum(able.values()) if self.pool in able else 0.0


def waiting_load(kind: str, works: Iterable[WaitingWork], shares: PoolShares | None = None) -> ReplicaLoad:
    """Returns what the requests that wait at the routers are to a pool of encoders or workers, as the load of a
    replica. Their prompts wait for the workers, in the `shares` of several pools. Their media have arrived, but wait
    for no encoder: an encoder could begin at once."""
    if kind == "encoder":
        return ReplicaLoad(arrived_s=sum(work.encoder_s for work in works))
    parts = [(work, 1.0 if shares is None else shares.of(work)) for work in works]
    worker_s = sum(work.worker_s * share for work, share in parts)
    return ReplicaLoad(worker_s, worker_s, memory_use=sum(work.kv_share * share for work, share in parts))


class ArrivedWork:
    """An `ArrivedWork` sums the work that has arrived at one stage: what was done, and what is left."""

    def __init__(self) -> None:
        self._seen_s = 0.0
        self._done_s = 0.0

    def arrived_s(self, done_s: float, left_s: float, capacity: float) -> float:
        """Returns the sum, in seconds of the stage's capacity, when `done_s` was done since its start. The capacity is
        estimated again and again, and each estimate holds for what was done since the one before."""
        self._done_s += max(done_s - self._seen_s, 0.0) / capacity
        self._seen_s = done_s
        return self._done_s + left_s / capacity


class EncoderMeter:
    """An `EncoderMeter` measures the load of one encoder. Its stages, decoding and the device, work at the same time. A
    forward pass may take as long as work may wait, `queue_limit_s`."""

    def __init__(self, queue_limit_s: float) -> None:
        self._device, self._decoding = ArrivedWork(), ArrivedWork()
        self._queue_limit_s = queue_limit_s
        self._forward_s = 0.0
        self._num_batches = 0
        self._contents_s = 0.0
        """Sums what the contents of forward passes have added to them."""

    def load(self, report: EncoderReport) -> ReplicaLoad:
        """Returns the load by the newest report."""
        num_processes = max(report.num_decode_processes, 1)
        decode_queue_s = report.decode_queue_s / num_processes
        decoded_s = (report.items.decode_s + report.items.preprocess_s) / num_processes
        arena, device, overhead_s = report.arena, report.device, report.batch_overhead_s
        is_full = 0 < FULL_ARENA * arena.total_bytes <= arena.used_bytes
        is_blocked = is_full and report.busy_fraction < IDLE_DEVICE
        device_queue_s = 0.0 if is_blocked else report.queued_s + report.forward_left_s
        passed_s, num_passes = device.forward_s - self._forward_s, device.num_batches - self._num_batches
        self._contents_s += max(passed_s - overhead_s * num_passes, 0.0)
        self._forward_s, self._num_batches = device.forward_s, device.num_batches
        capacity = max(1.0 - overhead_s / self._queue_limit_s, LEAST_CAPACITY)
        left_s = report.queued_cost * report.encode_s_per_cost
        return ReplicaLoad(
            queue_s=max(device_queue_s, decode_queue_s),
            arrived_s=self._device.arrived_s(self._contents_s, left_s, capacity),
            arrived_beside_s=self._decoding.arrived_s(decoded_s, decode_queue_s, 1.0),
            num_open=float(report.num_items_pending),
        )


class WorkerMeter:
    """A `WorkerMeter` measures the load of one worker. A step may take as long as the time between tokens that the
    operator wants, `slo_tpot_s`. Prompt tokens behind a missing feature have arrived, although they can't be computed
    yet: so the workers grow together with the encoders that are short, and not after them."""

    def __init__(self, slo_tpot_s: float) -> None:
        self._work = ArrivedWork()
        self._slo_tpot_s = slo_tpot_s

    def load(self, report: WorkerReport) -> ReplicaLoad:
        """Returns the load by the newest report."""
        engine = report.engine
        capacity = max(1.0 - report.step_overhead_s / self._slo_tpot_s, LEAST_CAPACITY)
        num_steps = -(-engine.queued_tokens // report.max_step_tokens) if report.max_step_tokens else 1
        step_s = report.step_overhead_s + engine.num_decoding * report.decode_s_per_sequence
        queue_s = engine.queued_weighted_tokens * report.prefill_s_per_token + num_steps * step_s
        left_s = (engine.queued_weighted_tokens + engine.behind_weighted_tokens) * report.prefill_s_per_token
        num_present = engine.num_running
        share_able = 1.0 - min(engine.num_at_doorstep / num_present, 1.0) if num_present else 1.0
        used = engine.kv_blocks_used / engine.kv_blocks_total if engine.kv_blocks_total else 0.0
        return ReplicaLoad(
            queue_s=queue_s if engine.queued_tokens else 0.0,
            arrived_s=self._work.arrived_s(report.work_s, left_s, capacity),
            memory_use=used * share_able,
            num_open=float(engine.num_running + engine.num_waiting),
        )

"""Turns the reports of a member into its `ReplicaLoad`: what a decision about the size of its pool needs to know.

The unit of all work is the second of one replica. A replica's queue is the predicted time until the work that it has
now is done. Its rate of work is how much work has arrived per second, so a rate of 0.5 keeps the replica busy for half
of the time, and a rate of 3 needs three of its kind. The rate is measured as what was done plus what the queue has
grown by, so it shows the true demand also while the replica can't keep up.

A pool is never made larger for the shortage of the other pool: an encoder whose arena is full of features that workers
have not read counts no queue, and KV blocks of sequences that wait for features do not count as used.

The module knows nothing of pools, of decisions, or of how a load travels.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from fabric.contracts import EncoderReport, WorkerReport

FULL_ARENA = 0.9
"""An arena counts as full of unread features from this share on."""
IDLE_DEVICE = 0.5
"""A device that is busy for less than this share of the time, with a queue and a full arena, waits for the workers."""
LEAST_CAPACITY = 0.2
"""A worker counts as able to work for at least this share of its time, however long its empty steps take."""


class ReplicaLoad(NamedTuple):
    """A `ReplicaLoad` is the load of one replica at one moment."""

    queue_s: float = 0.0
    """Holds the predicted seconds until the queued work is done; new work begins after that."""
    work_rate: float = 0.0
    """Holds the work that arrives, in seconds of this replica per second."""
    memory_use: float = 0.0
    """Holds the share of the KV blocks that sequences use which don't wait for features; 0 for encoders."""
    num_open: float = 0.0
    """Counts the requests or items that are open. It is only shown; work is measured in seconds."""


class WorkRate:
    """A `WorkRate` measures how fast work arrives at one stage of a replica, over the last `window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, float]] = deque()

    def observe(self, now_s: float, done_s: float, queued_s: float) -> float:
        """Takes the work that the stage has done since its start and the work that it has now, and returns the rate. It
        is 0 until two moments were observed."""
        while len(self._samples) > 1 and self._samples[1][0] <= now_s - self._window_s:
            self._samples.popleft()
        self._samples.append((now_s, done_s + queued_s))
        first_s, first = self._samples[0]
        if now_s <= first_s:
            return 0.0
        # The queue shrinks without work being done when requests are aborted.
        return max(done_s + queued_s - first, 0.0) / (now_s - first_s)


class EncoderMeter:
    """An `EncoderMeter` measures the load of one encoder. Its stages, decoding and the device, work at the same time,
    so the slower one counts."""

    def __init__(self, window_s: float) -> None:
        self._device, self._decoding = WorkRate(window_s), WorkRate(window_s)

    def load(self, report: EncoderReport, now_s: float) -> ReplicaLoad:
        """Returns the load by a report that was made at `now_s`."""
        num_processes = max(report.num_decode_processes, 1)
        decode_queue_s = report.decode_queue_s / num_processes
        decoded_s = (report.items.decode_s + report.items.preprocess_s) / num_processes
        arena = report.arena
        is_blocked = arena.used_bytes >= FULL_ARENA * arena.total_bytes and report.busy_fraction < IDLE_DEVICE
        device_queue_s = 0.0 if is_blocked and arena.total_bytes else report.queued_s + report.forward_left_s
        device_rate = self._device.observe(now_s, report.device.forward_s, device_queue_s)
        decode_rate = self._decoding.observe(now_s, decoded_s, decode_queue_s)
        return ReplicaLoad(
            queue_s=max(device_queue_s, decode_queue_s),
            work_rate=max(device_rate, decode_rate),
            num_open=float(report.num_items_pending),
        )


class WorkerMeter:
    """A `WorkerMeter` measures the load of one worker.

    A worker that decodes one sequence is busy all the time, so the time of its steps says little. Its work is what its
    tokens add to steps. At the time between tokens that the operator wants, `slo_tpot_s`, the fixed part of each step
    takes a share of the time, and the rest is the worker's capacity for work."""

    def __init__(self, window_s: float, slo_tpot_s: float) -> None:
        self._work = WorkRate(window_s)
        self._slo_tpot_s = slo_tpot_s

    def load(self, report: WorkerReport, now_s: float) -> ReplicaLoad:
        """Returns the load by a report that was made at `now_s`."""
        engine = report.engine
        capacity = max(1.0 - report.step_overhead_s / self._slo_tpot_s, LEAST_CAPACITY)
        queued_work_s = engine.queued_weighted_tokens * report.prefill_s_per_token
        num_steps = -(-engine.queued_tokens // report.max_step_tokens) if report.max_step_tokens else 1
        step_s = report.step_overhead_s + engine.num_decoding * report.decode_s_per_sequence
        queue_s = queued_work_s + num_steps * step_s if engine.queued_tokens else 0.0
        num_present = engine.num_running
        share_able = 1.0 - min(engine.num_at_doorstep / num_present, 1.0) if num_present else 1.0
        used = engine.kv_blocks_used / engine.kv_blocks_total if engine.kv_blocks_total else 0.0
        return ReplicaLoad(
            queue_s=queue_s,
            work_rate=self._work.observe(now_s, report.work_s, queued_work_s) / capacity,
            memory_use=used * share_able,
            num_open=float(engine.num_running + engine.num_waiting),
        )

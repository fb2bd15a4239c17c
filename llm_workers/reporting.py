"""The worker's gauges for the routers. Knows nothing of who receives them."""

from __future__ import annotations

from collections.abc import Iterable

from fabric.channel import FeatureSink
from fabric.ids import AttemptId, MemberId
from fabric.messages import WorkerReport
from llm_workers.engine import Update
from llm_workers.scheduling.events import SchedulerStats
from llm_workers.step_costs import StepCosts


class Reporter:
    """Keeps the engine's last numbers."""

    def __init__(self, member_id: MemberId, stats: SchedulerStats, sink: FeatureSink) -> None:
        self._member_id, self._stats, self._sink = member_id, stats, sink
        self._admitted: dict[AttemptId, None] = {}
        self._seq = 0
        self.epoch = 0
        """From this worker's member record, once it is known."""
        self.costs = StepCosts()

    def take(self, update: Update) -> None:
        """A turn of the engine."""
        if update.stats is not None:
            self._stats = update.stats
        for admitted in update.admitted:
            self._admitted[admitted.attempt] = None
        if update.num_step_tokens:
            self.costs.observe(update.num_step_tokens, update.step_s)

    def report(self, open_attempts: Iterable[AttemptId]) -> WorkerReport:
        """Acknowledges attempts that are open and in the numbers, and once those that came and went since."""
        acknowledged = tuple(self._admitted)
        still_open = set(open_attempts)
        self._admitted = {attempt: None for attempt in acknowledged if attempt in still_open}
        self._seq += 1
        usage = self._sink.usage()
        return WorkerReport(
            worker_id=self._member_id,
            epoch=self.epoch,
            seq=self._seq,
            acknowledged=acknowledged,
            inbox_bytes_used=usage.used_bytes,
            inbox_bytes_total=usage.total_bytes,
            num_quarantined=usage.num_quarantined,
            prefill_s_per_token=self.costs.s_per_token,
            step_overhead_s=self.costs.overhead_s,
            **self._stats._asdict(),
        )

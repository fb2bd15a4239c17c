"""Builds the worker's reports for the routers. This module knows nothing of the receivers of the
reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fabric.contracts import AttemptId, EngineStats, FeatureStats, MemberId, WorkerReport
from llm_workers.engine_interface import Update
from llm_workers.scheduling import StepCosts
from llm_workers.worker_config import WorkerConfig

_NEW_SHARE = 0.1
"""Sets the weight of a sequence that has just ended in the moving average of the seconds from a sequence's first step
to its end."""


class WorkerReporter:
    """Holds the latest numbers of the engine and builds reports from them."""

    def __init__(
        self,
        member_id: MemberId,
        config: WorkerConfig,
        engine_stats: EngineStats,
        feature_stats: Callable[[], FeatureStats],
    ) -> None:
        """Begins with `engine_stats`, which the engine's updates replace, and reads `feature_stats` for each report."""
        self._member_id, self._config = member_id, config
        self._engine_stats, self._feature_stats = engine_stats, feature_stats
        self._admitted: dict[AttemptId, None] = {}
        self._seq = 0
        self.epoch = 0
        """Holds the epoch of this worker's member record, once the record is known."""
        self.costs = StepCosts()
        self.is_lost = False
        """Says whether the worker is lost and accepts no more requests."""
        self._residence_s = 0.0

    def take(self, update: Update) -> None:
        """Takes the update of one turn of the engine."""
        if update.stats is not None:
            self._engine_stats = update.stats
        for admitted in update.admitted:
            self._admitted[admitted.attempt] = None
        if update.step_work is not None:
            self.costs.observe(update.step_work, update.step_s, update.at_s)
        for finished in update.events.finished if update.events is not None else ():
            in_steps_s = finished.times.total_s - finished.times.queue_s
            self._residence_s += (in_steps_s - self._residence_s) * (_NEW_SHARE if self._residence_s else 1.0)

    def forget_ended(self, open_attempts: Iterable[AttemptId]) -> None:
        """Forgets the admitted attempts that have ended. It is called after a report has gone to all known routers, so
        these attempts need no further acknowledgement."""
        still_open = set(open_attempts)
        self._admitted = {attempt: None for attempt in self._admitted if attempt in still_open}

    def report(self) -> WorkerReport:
        """Returns the next report. It acknowledges the attempts that were admitted and not forgotten since."""
        self._seq += 1
        return WorkerReport(
            worker_id=self._member_id,
            epoch=self.epoch,
            seq=self._seq,
            acknowledged=tuple(self._admitted),
            engine=self._engine_stats,
            features=self._feature_stats(),
            prefill_s_per_token=self.costs.s_per_token,
            step_overhead_s=self.costs.overhead_s,
            decode_s_per_sequence=self.costs.s_per_decode,
            residence_s=self._residence_s,
            max_step_tokens=self._config.max_step_tokens,
            max_sequences=self._config.max_sequences,
            is_lost=self.is_lost,
        )

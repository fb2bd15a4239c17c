"""Builds the worker's reports for the routers. This module knows nothing of the receivers of the
reports.
"""

from __future__ import annotations

from collections.abc import Callable

from fabric.contracts import (
    AttemptId,
    EngineStats,
    FeatureStats,
    KvEvent,
    KvEvents,
    MemberId,
    PullWindow,
    WorkerReport,
)
from llm_workers.engine_interface import Update
from llm_workers.scheduling import StepCosts, StepWork
from llm_workers.worker_config import WorkerConfig

_NEW_SHARE = 0.1
"""Sets the weight of a sequence that has just ended in the moving averages of the seconds from a sequence's first step
to its end, and of those for which it waits for features."""


class WorkerReporter:
    """Holds the latest numbers of the engine and builds reports from them."""

    def __init__(
        self,
        member_id: MemberId,
        config: WorkerConfig,
        engine_stats: EngineStats,
        feature_stats: Callable[[], FeatureStats],
        pull_windows: Callable[[], tuple[PullWindow, ...]] = tuple,
    ) -> None:
        """Begins with `engine_stats`, which the engine's updates replace, and reads `feature_stats` and `pull_windows`
        for each report."""
        self._member_id, self._config = member_id, config
        self._engine_stats, self._feature_stats = engine_stats, feature_stats
        self._engine_at_s = 0.0
        self._pull_windows = pull_windows
        self._seq = 0
        self._kv_first_seq = 0
        self._kv_events: list[KvEvent] = []
        self.epoch = 0
        """Holds the epoch of this worker's member record, once the record is known."""
        self.costs = StepCosts()
        self.is_lost = False
        """Says whether the worker is lost and accepts no more requests."""
        self._residence_s = self._held_s = 0.0
        self._doorstep_wait_s = 0.0
        """Sums the waits of all sequences that have ended."""
        self._lacking: set[AttemptId] = set()
        """Holds the open attempts that lacked features when they were admitted."""
        self._work_s = 0.0
        """Sums what the work of the steps costs, without the fixed part of steps."""
        self._running: tuple[StepWork, float] | None = None
        """Holds the work of the running step, if it computes prompt tokens, and when it began."""

    def take(self, update: Update) -> None:
        """Takes the update of one turn of the engine."""
        if update.stats is not None:
            self._engine_stats, self._engine_at_s = update.stats, update.at_s
        if update.kv_events:
            if not self._kv_events:
                self._kv_first_seq = update.kv_first_seq
            self._kv_events += update.kv_events
        self._running = None if update.begun_work is None else (update.begun_work, update.at_s)
        if update.step_work is not None:
            self.observe_step(update.step_work, update.step_s, update.at_s)
        self._lacking.update(each.attempt for each in update.admitted if each.admission.missing_units)
        for finished in update.events.finished if update.events is not None else ():
            in_steps_s = finished.times.total_s - finished.times.queue_s
            self._doorstep_wait_s += finished.times.held_s
            self._residence_s += (in_steps_s - self._residence_s) * (_NEW_SHARE if self._residence_s else 1.0)
            if finished.sequence_id.attempt_id in self._lacking:
                self._lacking.discard(finished.sequence_id.attempt_id)
                self._held_s += _NEW_SHARE * (finished.times.held_s - self._held_s)
        self._lacking.difference_update(each.sequence_id.attempt_id for each in update.aborted)
        self._lacking.difference_update(each.attempt for each in update.failed)

    def observe_step(self, work: StepWork, taken_s: float, ended_s: float) -> None:
        """Learns from a step what steps cost, and counts its work."""
        self.costs.observe(work, taken_s, ended_s)
        self._work_s += work.weighted_tokens * self.costs.s_per_token + work.num_decodes * self.costs.s_per_decode

    def take_kv_events(self) -> KvEvents | None:
        """Returns the events of the prefix cache since the last call, or None if there are none."""
        if not self._kv_events:
            return None
        events, self._kv_events = tuple(self._kv_events), []
        return KvEvents(self._member_id, self.epoch, self._kv_first_seq, events)

    def report(self, now_s: float) -> WorkerReport:
        """Returns the next report. `RouterTable` adds the acknowledgements for its receiver."""
        self._seq += 1
        work, begun_at_s = self._running or (StepWork(0, 0.0), now_s)
        return WorkerReport(
            worker_id=self._member_id,
            epoch=self.epoch,
            seq=self._seq,
            acknowledged=(),
            engine=self._engine_stats,
            features=self._feature_stats(),
            prefill_s_per_token=self.costs.s_per_token,
            step_overhead_s=self.costs.overhead_s,
            decode_s_per_sequence=self.costs.s_per_decode,
            residence_s=self._residence_s,
            held_s=self._held_s,
            max_step_tokens=self._config.max_step_tokens,
            max_sequences=self._config.max_sequences,
            is_lost=self.is_lost,
            pulls=self._pull_windows(),
            step_weighted_tokens=work.weighted_tokens,
            step_left_s=max(begun_at_s + self.costs.seconds(work) - now_s, 0.0) if self._running else 0.0,
            at_s=now_s,
            engine_age_s=max(now_s - self._engine_at_s, 0.0) if self._engine_at_s else 0.0,
            work_s=self._work_s,
            doorstep_wait_s=self._doorstep_wait_s,
        )

"""Schedules stages that turn units into outputs without feeding them back (code2wav): `GenerationStageScheduler`.

With a `Pacing`, the requests whose listeners will have heard everything first go first. Where the stage shares its
processor with the stage before it, it is also *just in time*: each chunk that it computes early delays the frames of
every listener, so it leaves the processor to the stage before it as long as no listener needs it, and computes the rest
of a request once its last chunk is here. The module knows nothing of tensors, of threads, or of what a chunk contains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fabric.contracts import Clock, ConfigError, StageKey
from llm_workers.stages.stage_model import StageSpan
from llm_workers.stages.stage_scheduler import ChunkSource, StageScheduler, StageSequence, StageStep

_NO_BLOCKS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Pacing:
    """Says how long the outputs of a stage play, and when they are needed."""

    unit_s: float
    """Is how long the output of one unit plays, in seconds."""
    clock: Clock
    is_just_in_time: bool = False
    """Says that a request waits while its listener has enough to hear and more chunks are to come."""
    fills_steps: bool = True
    """Says that a step takes hardly longer with more requests in it, so that others fill the steps of urgent ones."""
    patience_s: float = 1.0
    """A request is urgent once its listener has no more than this to hear."""


class GenerationStageScheduler(StageScheduler):
    """Schedules a stage without feedback. A unit is a codec frame.

    A step computes the ready units of up to `max_num_seqs` requests, and at most `max_step_units` units. Only the first
    of them is split, because a small rest would cost nearly as much as a whole chunk. Without a `Pacing`, the oldest
    requests go first. With one, the urgent ones do, in the order in which their listeners will have heard everything,
    and a request before its first output counts as if its listener had waited since its first chunk. The others follow
    by age, in the same step or in steps without urgent ones (`fills_steps`), and just in time only once their last
    chunk is here. A request holds a state in the model from its first step to its end; at most `max_states` do, and
    others wait."""

    def __init__(
        self,
        source: ChunkSource,
        num_units_ready: Callable[[StageKey], int],
        max_num_seqs: int,
        max_states: int,
        max_step_units: int,
        pacing: Pacing | None = None,
    ) -> None:
        super().__init__(source, num_units_ready, max_num_seqs)
        for name, value in (("max_states", max_states), ("max_step_units", max_step_units)):
            if value < 1:
                raise ConfigError(f"stage: {name} must be at least 1, not {value}")
        self._max_states, self._max_step_units, self._pacing = max_states, max_step_units, pacing
        self._num_states = 0

    @property
    def pool_used(self) -> int:
        return self._num_states

    @property
    def pool_size(self) -> int:
        return self._max_states

    def next_step_s(self) -> float | None:
        """Returns when the first of the requests that wait for their time becomes urgent."""
        if self._pacing is None:
            return None
        due_s = [
            each.due_s
            for each in self._schedulable()
            if each.has_begun and each.due_s is not None and self._num_ready(each) > 0
        ]
        return min(due_s) - self._pacing.patience_s if due_s else None

    def _choose(self, candidates: Sequence[StageSequence]) -> StageStep:
        spans: list[StageSpan] = []
        left = self._max_step_units
        for found in self._by_need([each for each in candidates if self._num_ready(each) > 0]):
            count = min(self._num_ready(found), left)
            if len(spans) == self.max_num_seqs:
                break
            if spans and count < self._num_ready(found):
                continue
            if not found.has_begun:
                if self._num_states == self._max_states:
                    continue
                found.has_begun = True
                self._num_states += 1
            spans.append(StageSpan(found.key, found.num_computed, count, _NO_BLOCKS))
            left -= count
        return StageStep(tuple(spans))

    def _by_need(self, ready: Sequence[StageSequence]) -> Iterable[StageSequence]:
        """Returns the requests that the next step may compute, those that need it most first."""
        pacing = self._pacing
        if pacing is None:
            return ready
        now_s = pacing.clock.now()
        urgent: list[tuple[float, StageSequence]] = []
        others: list[StageSequence] = []
        for found in ready:
            if found.due_s is None:
                found.due_s = now_s
            if found.due_s <= now_s + pacing.patience_s:
                urgent.append((found.due_s, found))
            elif found.has_last_chunk or not pacing.is_just_in_time:
                others.append(found)
        # A request that can't get a state must not keep those that have one out of the step.
        can_begin = self._num_states < self._max_states
        first = [found for _, found in sorted(urgent, key=_due_and_age) if found.has_begun or can_begin]
        return (*first, *others) if pacing.fills_steps else first or others

    def _asks_early(self, found: StageSequence) -> bool:
        return self._pacing is not None and self._pacing.is_just_in_time and found.has_begun

    def _computed(self, found: StageSequence, num_units: int) -> None:
        if self._pacing is not None:
            now_s = self._pacing.clock.now()
            found.due_s = max(now_s, now_s if found.due_s is None else found.due_s) + num_units * self._pacing.unit_s

    def _free(self, found: StageSequence) -> None:
        self._num_states -= found.has_begun
        found.has_begun = False

    def check_invariants(self) -> None:
        super().check_invariants()
        assert self._num_states == sum(each.has_begun for each in self._sequences.values())


def _due_and_age(each: tuple[float, StageSequence]) -> tuple[float, tuple[float, str]]:
    return each[0], each[1].age

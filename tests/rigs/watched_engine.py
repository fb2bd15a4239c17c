"""Runs an engine thread with the real scheduler, and an executor that draws from a table."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import numpy as np

from fabric.contracts import (
    GenerateRequest,
    MediaItem,
    MemberId,
    MmHash,
    PlaceholderRange,
    RequestId,
    SamplingParams,
    StopConditions,
    SystemClock,
    UnitKey,
    WeftError,
)
from llm_workers.engine import PROBE_ID, Engine
from llm_workers.engine_interface import Update
from llm_workers.scheduling import FeatureReference, PromptRows, ReleasedFeature, Scheduler, StepPlan, StepResult
from llm_workers.worker_config import WorkerConfig
from modalities.family import Positions

UNIT = UnitKey(MmHash("ab"), 0)


def request(name: str, num_tokens: int = 3, with_unit: bool = False, attempt: int = 0) -> GenerateRequest:
    media = (MediaItem(0, "image", UNIT.mm_hash, (1, 4, 4), (4,), 16, "p"),) if with_unit else ()
    runs = (PlaceholderRange(6, 4, 0, 0, 0),) if with_unit else ()
    return GenerateRequest(
        request_id=RequestId(name),
        attempt=attempt,
        router_id=MemberId("router"),
        router_address="local://router",
        token_ids=tuple(range(20)),
        placeholders=runs,
        media=media,
        sampling=SamplingParams(temperature=0.0),
        stop=StopConditions(max_tokens=num_tokens),
        age=(0.0, name),
    )


POSITIONS = Positions(np.arange(20)[None], 0)


class OutOfMemoryError(RuntimeError):
    """An `OutOfMemoryError` has the same name as torch's own error."""


class Executor:
    """Draws 100 + draw index. Requests whose ids are in `broken` raise, those in `infinite` give a negative token, and
    `fails` may raise for any plan."""

    def __init__(self) -> None:
        self.broken, self.infinite = set(), set()
        self.not_finite = {}
        """Maps request ids to the position that spoils their chunks."""
        self.fails: Callable[[StepPlan], None] = lambda plan: None
        self.plans = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.fails(plan)
        if any(chunk.sequence_id.request_id in self.broken for chunk in plan.chunks):
            raise RuntimeError("poisoned")
        return StepResult(
            {
                chunk.sequence_id: (-1 if chunk.sequence_id.request_id in self.infinite else 100 + chunk.draw_index,)
                for chunk in plan.chunks
                if chunk.sampling is not None
            },
            not_finite={
                chunk.sequence_id
                for chunk in plan.chunks
                if chunk.end > self.not_finite.get(chunk.sequence_id.request_id, 1000)
            },
            readings={
                chunk.sequence_id: PromptRows(np.array([3.0, 4.0], np.float32), None)
                for chunk in plan.chunks
                if chunk.reading is not None
            },
        )

    @property
    def num_probes(self) -> int:
        return sum(plan.chunks[0].sequence_id == PROBE_ID for plan in self.plans)


def raising(error: Exception) -> Callable[[StepPlan], None]:
    def fails(plan: StepPlan) -> None:
        raise error

    return fails


class Watched:
    """A `Watched` runs an engine and collects its updates until something is true."""

    def __init__(self, **config: Any) -> None:
        self.executor, self._updates = Executor(), queue.SimpleQueue()
        clock = SystemClock()
        scheduler = Scheduler(WorkerConfig(block_size=4, num_blocks=64, **config), 1000, clock)
        self.engine = Engine(scheduler, self.executor, clock, self._updates.put)
        self.seen = []

    def until(self, is_true: Callable[[], object]) -> Update:
        while not is_true():
            self.seen.append(self._updates.get(timeout=10.0))
        return self.seen[-1]

    def tokens(self, name: str) -> list[int]:
        frames = [t for u in self.seen if u.events for t in u.events.tokens if t.sequence_id.request_id == name]
        return [token for frame in frames for token in frame.token_ids]

    def finished(self) -> dict[RequestId, str]:
        return {f.sequence_id.request_id: f.finish_reason for u in self.seen if u.events for f in u.events.finished}

    def failed(self) -> dict[RequestId, WeftError]:
        return {f.attempt.request_id: f.error for u in self.seen for f in u.failed}

    def deaths(self) -> list[WeftError]:
        return [u.death for u in self.seen if u.death]

    def released(self) -> list[ReleasedFeature]:
        return [released for u in self.seen for released in u.released]

    def given_back(self) -> list[FeatureReference]:
        return [reference for released in self.released() for reference in released.references]

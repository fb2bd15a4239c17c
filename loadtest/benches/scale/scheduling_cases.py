"""Measures what a step, an arrival, an abort and a commit cost while many requests wait."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import inf

import numpy as np

from fabric.contracts import (
    AttemptId,
    GenerateRequest,
    ManualClock,
    MemberId,
    RequestId,
    SamplingParams,
    StopConditions,
)
from llm_workers.scheduling import Arrival, Scheduler, StepPlan, StepResult
from llm_workers.worker_config import WorkerConfig
from loadtest.benches.scale.scale_case import ScaleCase
from modalities.family import Positions

NUM_RUNNING = 16
PREFIX_TOKENS = 4096
TAIL_TOKENS = 200
BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
NUM_EVENTS = 32


class _Crowd:
    """A `_Crowd` is a set of requests that decode, in a pool that has no room for another request, and many requests
    that wait behind them. All prompts begin with the same tokens. With `num_spare_blocks`, the decoding requests may
    use these blocks, and places in a step are scarce instead of blocks."""

    def __init__(
        self, num_waiting: int, prefix_tokens: int = PREFIX_TOKENS, is_salted: bool = False, num_spare_blocks: int = 0
    ) -> None:
        self._prefix = list(range(prefix_tokens))
        self._is_salted = is_salted
        self._names = itertools.count()
        tail_blocks = 2 + TAIL_TOKENS // BLOCK_SIZE
        config = WorkerConfig(
            block_size=BLOCK_SIZE,
            num_blocks=prefix_tokens // BLOCK_SIZE + NUM_RUNNING * tail_blocks + NUM_RUNNING + num_spare_blocks,
            max_step_tokens=2 * (prefix_tokens + TAIL_TOKENS),
            max_sequences=NUM_RUNNING if num_spare_blocks else 2 * NUM_RUNNING,
        )
        self.scheduler = Scheduler(config, MAX_MODEL_LEN, ManualClock(), inf)
        for _ in range(NUM_RUNNING):
            self.scheduler.add(self.prepare("", 10_000))
            self.commit(self.plan())
        for _ in range(num_waiting):
            self.scheduler.add(self.prepare(self._next_salt(), 16))
        assert self.scheduler.stats().num_running == NUM_RUNNING

    def prepare(self, salt: str, max_tokens: int) -> Arrival:
        number = next(self._names)
        tail = range(10_000 + TAIL_TOKENS * number, 10_000 + TAIL_TOKENS * (number + 1))
        request = GenerateRequest(
            request_id=RequestId(f"request-{number}"),
            attempt=0,
            router_id=MemberId("router"),
            router_address="local://router",
            token_ids=(*self._prefix, *tail),
            placeholders=(),
            media=(),
            sampling=SamplingParams(),
            stop=StopConditions(max_tokens=max_tokens),
            age=(float(number), f"request-{number}"),
            cache_salt=salt,
        )
        ids = np.arange(len(request.token_ids), dtype=np.int64)[None]
        return self.scheduler.prepare(request, Positions(ids, 0))

    def _next_salt(self) -> str:
        return f"user-{next(self._names)}" if self._is_salted else ""

    def plan(self) -> StepPlan:
        return self.scheduler.plan_step()

    def commit(self, plan: StepPlan) -> None:
        sampled = [chunk.sequence_id for chunk in plan.chunks if chunk.sampling is not None]
        self.scheduler.commit(plan, StepResult(dict.fromkeys(sampled, (7,))))


def _plans(prefix_tokens: int, is_salted: bool) -> Callable[[int], Callable[[], int]]:
    """Measures steps that are planned and rolled back, so that each round begins with the same state."""

    def prepare(num_waiting: int) -> Callable[[], int]:
        crowd = _Crowd(num_waiting, prefix_tokens, is_salted)

        def run() -> int:
            for _ in range(NUM_EVENTS):
                crowd.scheduler.rollback(crowd.plan())
            return NUM_EVENTS

        return run

    return prepare


def _commits(num_waiting: int) -> Callable[[], int]:
    """Measures steps of the running requests alone, which are planned, committed and reported."""
    crowd = _Crowd(num_waiting, BLOCK_SIZE, num_spare_blocks=100 * NUM_RUNNING)

    def run() -> int:
        for _ in range(NUM_EVENTS):
            crowd.commit(crowd.plan())
            crowd.scheduler.stats()
        return NUM_EVENTS

    return run


def _arrivals(is_salted: bool) -> Callable[[int], Callable[[], int]]:
    """Measures requests that arrive and leave again; the last to arrive leaves first."""

    def prepare(num_waiting: int) -> Callable[[], int]:
        crowd = _Crowd(num_waiting, BLOCK_SIZE, is_salted)

        def run() -> int:
            arrivals = [crowd.prepare(f"new-{at}" if is_salted else "", 16) for at in range(NUM_EVENTS)]
            for arrival in arrivals:
                crowd.scheduler.add(arrival)
            for arrival in reversed(arrivals):
                crowd.scheduler.abort(arrival.attempt_id)
            return 2 * NUM_EVENTS

        return run

    return prepare


def _aborts(num_waiting: int) -> Callable[[], int]:
    """Measures requests that leave from the middle of the queue; as many arrive at its end."""
    crowd = _Crowd(num_waiting, BLOCK_SIZE)
    middle = itertools.count(NUM_RUNNING + num_waiting // 2)

    def run() -> int:
        arrivals = [crowd.prepare("", 16) for _ in range(NUM_EVENTS)]
        for arrival in arrivals:
            crowd.scheduler.abort(AttemptId(RequestId(f"request-{next(middle)}"), 0))
            crowd.scheduler.add(arrival)
        return 2 * NUM_EVENTS

    return run


CASES = (
    ScaleCase(
        "scheduler: plan a step, blocks short, requests waiting with a prefix of 4,096", 2000, _plans(4096, False)
    ),
    ScaleCase("scheduler: plan a step, blocks short, requests waiting with a salt each", 2000, _plans(16, True)),
    ScaleCase("scheduler: plan, commit and report a step, requests waiting", 2000, _commits),
    ScaleCase("scheduler: a request comes and leaves, requests waiting", 2000, _arrivals(False)),
    ScaleCase("scheduler: a request comes and leaves, tenants waiting", 2000, _arrivals(True)),
    ScaleCase("scheduler: a request leaves from the middle of the queue, requests waiting", 2000, _aborts),
)

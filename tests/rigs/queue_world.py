"""Runs a real engine (scheduler, runner, a tiny model, real steps) and the router's real planner in one thread, with a
clock that only steps advance.

The price of a step follows from its tokens and their contexts, with random scatter, because measured times on a shared
machine differ severalfold from one step to the next. The clock stands still while requests are planned, because the
router has a machine of its own, and jumps over idle time. Requests that arrive during a step are planned as of their
arrival, with the reports sent before it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from worker_tiny_model import HEAD_DIM, HIDDEN, NUM_KV_HEADS, NUM_LAYERS, VOCAB, TinyModel

from fabric.contracts import (
    AttemptId,
    FeatureStats,
    GenerateRequest,
    Member,
    MemberId,
    RequestId,
    SamplingParams,
    StopConditions,
    context_scale_tokens,
)
from llm_workers.compute import PagedKV, ReferencedFeatures, Runner, calibrate, select_backend
from llm_workers.engine import Engine
from llm_workers.engine_interface import Update
from llm_workers.scheduling import FeatureReferences, Scheduler, SequenceTimes, StepPlan
from llm_workers.worker_config import WorkerConfig
from llm_workers.worker_reports import WorkerReporter
from modalities.family import ModelShape, Positions
from router.planning import ClusterState, RouteQuery
from router.planning.plan_types import CandidateTerms

WORKER = MemberId("worker")
SHAPE = ModelShape(
    hidden_size=HIDDEN,
    num_levels=1,
    num_layers=NUM_LAYERS,
    num_kv_heads=NUM_KV_HEADS,
    head_dim=HEAD_DIM,
    vocab_size=VOCAB,
    max_model_len=2048,
)


OVERHEAD_S, TOKEN_S, SEQUENCE_S, CONTEXT_S = 2e-3, 4e-5, 1e-4, 2e-7
"""These are the costs of a step, of each of its tokens, of each sequence in it, and of each token of context that one
token attends to."""
SCATTER = 0.2
"""This is the standard deviation of the logarithm of a step's duration."""


class WorkClock:
    """Keeps a clock that advances by the durations of steps."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    def jump_to(self, at_s: float) -> None:
        self._now_s = max(self._now_s, at_s)

    @contextlib.contextmanager
    def as_of(self, at_s: float) -> Iterator[None]:
        """Sets the clock to `at_s` within the context."""
        before_s, self._now_s = self._now_s, at_s
        yield
        self._now_s = before_s


class PricedRunner(Runner):
    """Runs every step, and advances the clock by its price."""

    def __init__(self, clock: WorkClock, *parts: Any) -> None:
        super().__init__(*parts)
        self._clock = clock
        self._scatter = np.random.default_rng(7)

    def execute(self, plan: StepPlan) -> Any:
        result = super().execute(plan)
        price_s = OVERHEAD_S
        for chunk in plan.chunks:
            num_attended = chunk.num_tokens * (chunk.start + 0.5 * chunk.num_tokens)
            price_s += SEQUENCE_S + TOKEN_S * chunk.num_tokens + CONTEXT_S * num_attended
        self._clock.jump_to(self._clock.now() + price_s * float(np.exp(SCATTER * self._scatter.standard_normal())))
        return result


class TinyFamily:
    shape = SHAPE

    @staticmethod
    def positions(token_ids: Sequence[int], *_: object) -> Positions:
        return Positions(np.tile(np.arange(len(token_ids)), (3, 1)), 0)


class Arrival(NamedTuple):
    at_s: float
    prompt_tokens: int
    output_tokens: int


class Served(NamedTuple):
    predicted: CandidateTerms
    measured: SequenceTimes


class QueueWorld:
    def __init__(self, **config: int) -> None:
        self.config = WorkerConfig(num_blocks=2048, **config)
        self.clock = WorkClock()
        model = TinyModel()
        shape = (NUM_LAYERS, self.config.num_blocks, self.config.block_size, (NUM_KV_HEADS, HEAD_DIM))
        kv = PagedKV(*shape, model.dtype, model.device)
        features = ReferencedFeatures(FeatureReferences())
        runner = PricedRunner(self.clock, model, kv, features, select_backend("auto", kv))
        scale = context_scale_tokens(HIDDEN)
        self.scheduler = Scheduler(self.config, SHAPE.max_model_len, self.clock, scale)
        self._updates: list[Update] = []
        self.engine = Engine(self.scheduler, runner, self.clock, self._post)
        self.reporter = WorkerReporter(WORKER, self.config, self.scheduler.stats(), FeatureStats)
        calibrate(runner, TinyFamily, self.config, self.reporter.costs, self.clock)
        self.cluster = ClusterState(SHAPE, self.config.block_size, random.Random(1))
        self.cluster.update_members([Member(WORKER, "worker", "local://worker", "h", 0)])
        self._reported_at_s = 0.0
        self._received: list[AttemptId] = []
        self._num_requests = 0

    def serve(self, load: Sequence[tuple[float, int, int]]) -> list[Served]:
        """Serves a load. `load` holds (seconds from now, prompt tokens, output tokens) of each request, in order of
        time."""
        begun_s = self.clock.now()
        coming = [Arrival(begun_s + at_s, *sizes) for at_s, *sizes in load]
        predicted: dict[RequestId, CandidateTerms] = {}
        measured: dict[RequestId, SequenceTimes] = {}
        self._report()
        while len(measured) < len(load):
            if len(measured) == len(predicted):
                self.clock.jump_to(coming[0].at_s)
            now = self.clock.now()
            for update in self._take_updates():
                measured |= self._ended(update)
            while coming and coming[0].at_s <= now:
                predicted |= self._dispatch(coming.pop(0))
            self.engine._turn()
            # A request that arrived during the step is planned only with what was reported before it.
            while coming and coming[0].at_s <= self.clock.now():
                predicted |= self._dispatch(coming.pop(0))
        return [Served(terms, measured[name]) for name, terms in predicted.items()]

    # ------------------------------------------------------------ inside

    def _dispatch(self, arrival: Arrival) -> dict[RequestId, CandidateTerms]:
        self._num_requests += 1
        name = RequestId(f"r{self._num_requests}")
        query = RouteQuery(AttemptId(name, 0), arrival.prompt_tokens, {})
        plan = self.cluster.plan(query, arrival.at_s)
        self.cluster.note_dispatched(query, plan, arrival.at_s)
        token_ids = tuple(np.random.default_rng(self._num_requests).integers(1, VOCAB, arrival.prompt_tokens).tolist())
        request = GenerateRequest(
            request_id=name,
            attempt=0,
            router_id=MemberId("router"),
            router_address="local://router",
            token_ids=token_ids,
            placeholders=(),
            media=(),
            sampling=SamplingParams(temperature=0.0),
            stop=StopConditions(arrival.output_tokens, ignore_eos=True),
            age=(arrival.at_s, name),
        )
        with self.clock.as_of(arrival.at_s):
            self.engine.add(request, TinyFamily.positions(token_ids))
        return {name: plan.explanation.winner}

    def _post(self, update: Update) -> None:
        """Takes an update of the engine. One of a step that begins is taken at once, because the step takes time."""
        if update.begun_work is not None:
            self._ended(update)
            self._report()
        else:
            self._updates.append(update)

    def _take_updates(self) -> list[Update]:
        updates, self._updates[:] = list(self._updates), []
        return updates

    def _ended(self, update: Update) -> dict[RequestId, SequenceTimes]:
        """Sends reports when the service would: on arrivals and ends, and at intervals."""
        self.reporter.take(update)
        self._received += [attempt_id for attempt_id, _ in update.admitted]
        finished = update.events.finished if update.events is not None else ()
        is_due = self.clock.now() - self._reported_at_s >= self.config.report_interval_s
        if update.admitted or finished or is_due:
            self._report()
        for one in finished:
            self.cluster.note_ended(one.sequence_id.attempt_id, self.clock.now())
        return {one.sequence_id.request_id: one.times for one in finished}

    def _report(self) -> None:
        """Sends a report that acknowledges what the worker has received since the last one, as its service does."""
        self._reported_at_s = self.clock.now()
        report = structs.replace(self.reporter.report(self._reported_at_s), acknowledged=tuple(self._received))
        self._received.clear()
        self.cluster.apply(report, self._reported_at_s)

"""A real engine (scheduler, runner, a tiny model, real steps) and the router's real planner, in one thread and in time
that only the work itself takes.

The clock counts the processor time of this process, so other processes on the machine do not show; it stands still
while requests are planned, as the router has a machine of its own, and jumps over time in which nothing is to be done.
Requests that come while a step runs are planned as of their arrival, by the reports sent before it.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from worker_tiny_model import HEAD_DIM, HIDDEN, NUM_KV_HEADS, NUM_LAYERS, VOCAB, TinyModel

from fabric.channel_local import LocalChannelHub, LocalFeatureSink
from fabric.flat_tokens import context_scale_tokens
from fabric.ids import AttemptId, MemberId, RequestId
from fabric.messages import GenerateRequest, Member, SamplingParams, StopConditions
from llm_workers.attention import select_backend
from llm_workers.calibrate import calibrate
from llm_workers.config import WorkerConfig
from llm_workers.engine import Engine
from llm_workers.kept import KeptFeatures
from llm_workers.landed import LandedFeatures
from llm_workers.paged_kv import PagedKV
from llm_workers.reporting import Reporter
from llm_workers.runner import Runner
from llm_workers.scheduling.events import SequenceTimes
from llm_workers.scheduling.scheduler import Scheduler
from llm_workers.updates import Update
from modalities.family import ModelShape, Positions
from router.planning.cluster import ClusterState
from router.planning.plan import plan_route
from router.planning.views import CandidateTerms, RouteQuery

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


class WorkClock:
    """Seconds of processor time of this process, without what `paused` encloses."""

    def __init__(self) -> None:
        self._shift_s = -time.process_time()
        self._stopped_at_s: float | None = None

    def now(self) -> float:
        return time.process_time() + self._shift_s if self._stopped_at_s is None else self._stopped_at_s

    @contextlib.contextmanager
    def paused(self, at_s: float | None = None) -> Iterator[None]:
        """Meanwhile it is `at_s`, or as late as at the beginning; afterwards it is as late as at the beginning."""
        before_s = self.now()
        self._stopped_at_s = before_s if at_s is None else at_s
        yield
        self._stopped_at_s = None
        self._shift_s = before_s - time.process_time()

    def jump_to(self, at_s: float) -> None:
        self._shift_s += max(0.0, at_s - self.now())


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
        runner = Runner(model, kv, LandedFeatures({}), select_backend("auto", kv))
        scale = context_scale_tokens(HIDDEN)
        self.scheduler = Scheduler(self.config, SHAPE.max_model_len, self.clock, scale)
        self._updates: list[Update] = []
        self.engine = Engine(self.scheduler, runner, self.clock, self._updates.append)
        sink = LocalFeatureSink(LocalChannelHub(), "worker", 1 << 12)
        self.reporter = Reporter(WORKER, self.config, self.scheduler.stats(), sink, KeptFeatures("never", 0, False))
        calibrate(runner, TinyFamily, self.config, self.reporter.costs, self.clock)
        self.cluster = ClusterState(SHAPE, self.config.block_size, random.Random(1))
        self.cluster.update_members([Member(WORKER, "worker", "local://worker", "h", 0)])
        self._reported_at_s = 0.0
        self._num_requests = 0

    def serve(self, load: Sequence[tuple[float, int, int]]) -> list[Served]:
        """(seconds from now, prompt tokens, output tokens) of each request, in order of time."""
        begun_s = self.clock.now()
        coming = [Arrival(begun_s + at_s, *sizes) for at_s, *sizes in load]
        predicted: dict[RequestId, CandidateTerms] = {}
        measured: dict[RequestId, SequenceTimes] = {}
        self._report()
        while len(measured) < len(load):
            if len(measured) == len(predicted):
                self.clock.jump_to(coming[0].at_s)
            now = self.clock.now()
            with self.clock.paused():
                for update in self._take_updates():
                    measured |= self._ended(update)
                while coming and coming[0].at_s <= now:
                    predicted |= self._dispatch(coming.pop(0))
            self.engine._turn()
            with self.clock.paused():
                # Who came during the step knows only what was reported before it.
                while coming and coming[0].at_s <= self.clock.now():
                    predicted |= self._dispatch(coming.pop(0))
        return [Served(terms, measured[name]) for name, terms in predicted.items()]

    # ------------------------------------------------------------ inside

    def _dispatch(self, arrival: Arrival) -> dict[RequestId, CandidateTerms]:
        self._num_requests += 1
        name = RequestId(f"r{self._num_requests}")
        query = RouteQuery(AttemptId(name, 0), arrival.prompt_tokens, ())
        plan = plan_route(query, self.cluster.snapshot(query, arrival.at_s), arrival.at_s)
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
        with self.clock.paused(arrival.at_s):
            self.engine.add(request, TinyFamily.positions(token_ids))
        return {name: plan.explanation.winner}

    def _take_updates(self) -> list[Update]:
        updates, self._updates[:] = list(self._updates), []
        return updates

    def _ended(self, update: Update) -> dict[RequestId, SequenceTimes]:
        """Reports when the service would: on arrivals and ends, and now and then."""
        self.reporter.take(update)
        finished = update.events.finished if update.events is not None else ()
        is_due = self.clock.now() - self._reported_at_s >= self.config.report_interval_s
        if update.admitted or finished or is_due:
            self._report()
        for one in finished:
            self.cluster.note_ended(one.sequence_id.attempt_id)
        return {one.sequence_id.request_id: one.times for one in finished}

    def _report(self) -> None:
        self._reported_at_s = self.clock.now()
        self.cluster.apply(self.reporter.report(), self._reported_at_s)

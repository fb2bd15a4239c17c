"""Simulates workers that compute in virtual time, each at its own pace, which other load on its machine may slow down.
The router's picture of the workers is the real one, and so are the step costs that the workers learn and report."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from planning_samples import BLOCK_SIZE, SHAPE, query, worker_member, worker_report

from fabric.contracts import context_scale_tokens, weighted_tokens
from llm_workers.scheduling import StepCosts, StepWork
from router.planning import ClusterState

OVERHEAD_S, DECODE_S, TOKEN_S = 0.004, 0.0003, 0.0001
SCALE = context_scale_tokens(SHAPE.hidden_size)


def quiet_s(work: StepWork) -> float:
    return OVERHEAD_S + DECODE_S * work.num_decodes + TOKEN_S * work.weighted_tokens


@dataclass
class PacedWorker:
    """A `PacedWorker` is a simulated worker; `slowness` is a factor of its hardware."""

    name: str
    slowness: float = 1.0
    costs: StepCosts = field(default_factory=StepCosts)
    seq: int = 0
    steps: int = 0


class PaceWorld:
    """Serves one request at a time. `load` is the factor by which causes other than the worker slow down all steps
    now."""

    def __init__(self, *slownesses: float, noise: float = 0.0, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.noise = noise
        self.workers = {f"w{number}": PacedWorker(f"w{number}", slow) for number, slow in enumerate(slownesses)}
        self.now = 100.0
        self.cluster = ClusterState(SHAPE, BLOCK_SIZE, random.Random(seed))
        self.cluster.update_members([worker_member(name) for name in self.workers])
        self._num_requests = 0
        for worker in self.workers.values():
            kinds = (StepWork(0, 16.0), StepWork(0, 128.0), StepWork(1, 0.0), StepWork(8, 0.0))
            # The fastest of several runs counts at boot, so these values have no noise.
            worker.costs.fit([(kind, quiet_s(kind) * worker.slowness) for kind in kinds])
            self._report(worker)

    def serve(self, num_tokens: int = 60, num_out: int = 4, load: float = 1.0, only: str | None = None) -> str:
        """Plans one request (onto `only`, if given) and computes it. Returns the name of the worker that served it."""
        self._num_requests += 1
        others = [name for name in self.workers if only not in (None, name)]
        request = query(num_tokens, attempt=f"r{self._num_requests}", excluded=others)
        plan = self.cluster.plan(request, self.now)
        self.cluster.note_dispatched(request, plan, self.now)
        worker = self.workers[plan.worker_id]
        for step in range(num_out):
            work = StepWork(0, weighted_tokens(num_tokens, 0, SCALE)) if step == 0 else StepWork(1, 0.0)
            seconds = self._seconds(worker, work, load)
            self.now += seconds
            worker.steps += 1
            worker.costs.observe(work, seconds, self.now)
            if step == 0:
                self._report(worker)
        self.cluster.note_ended(request.attempt_id, self.now)
        self._report(worker)
        return plan.worker_id

    def pause(self, seconds: float) -> None:
        """Lets time pass without any work; the workers still report."""
        self.now += seconds
        for worker in self.workers.values():
            self._report(worker)

    def shares(self, num_requests: int, pause_s: float) -> Counter[str]:
        """Serves that many requests one after the other and returns how many each worker served."""
        served: Counter[str] = Counter()
        for _ in range(num_requests):
            served[self.serve()] += 1
            self.pause(pause_s)
        return served

    def burst(self, num_requests: int) -> Counter[str]:
        """Plans requests that arrive at one moment and returns how many each worker would serve."""
        chosen: Counter[str] = Counter()
        for number in range(num_requests):
            request = query(60, attempt=f"burst{number}")
            plan = self.cluster.plan(request, self.now)
            self.cluster.note_dispatched(request, plan, self.now)
            chosen[plan.worker_id] += 1
        return chosen

    def _seconds(self, worker: PacedWorker, work: StepWork, load: float) -> float:
        return quiet_s(work) * worker.slowness * load * self.rng.lognormvariate(0.0, self.noise)

    def _report(self, worker: PacedWorker) -> None:
        worker.seq += 1
        report = worker_report(
            worker.name,
            worker.seq,
            steps=worker.steps,
            step_overhead_s=worker.costs.overhead_s,
            prefill_s_per_token=worker.costs.s_per_token,
            decode_s_per_sequence=worker.costs.s_per_decode,
            max_step_tokens=512,
            max_sequences=64,
        )
        self.cluster.apply(report, self.now)

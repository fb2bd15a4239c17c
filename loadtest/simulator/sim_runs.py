"""Carries out simulations: several runs in several processes, with a progress bar, and the load that a cluster bears.

A `SimRun` is a cluster, a workload or a trace, and a random seed. `run_all` returns the results in the order of the
runs, whichever ends first. The module knows nothing of what the runs are compared for.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import NamedTuple, TextIO

from fabric.contracts import weighted_tokens
from loadtest.simulator.cost_tables import CostTable
from loadtest.simulator.policies import FixedPolicy
from loadtest.simulator.sim_cluster import ClusterSettings, SimCluster, SimResult
from loadtest.simulator.sim_requests import Outcome, SimRequest
from loadtest.simulator.trace_files import TraceOptions, read_trace
from loadtest.simulator.workloads import WorkloadSpec, generate

NOTED_EVERY = 50
"""A run adds to the progress bar after this many requests."""
REFRESH_S = 0.5
SAMPLE = 4000
"""The work of a workload is the mean over this many requests."""


@dataclass(frozen=True, slots=True)
class SimRun:
    """A `SimRun` is one simulation. The trace replaces the workload if there is one."""

    label: str
    settings: ClusterSettings
    workload: WorkloadSpec
    seed: int = 0
    trace: Path | None = None
    trace_options: TraceOptions = field(default_factory=TraceOptions)
    num_clients: int = 0
    assignment: FixedPolicy | None = None

    def requests(self) -> Iterator[SimRequest]:
        if self.trace is not None:
            return read_trace(self.trace, self.settings.table, self.trace_options, self.seed)
        return generate(self.workload, self.seed)

    @property
    def num_requests(self) -> int:
        """Returns the number of requests, or 0 if a trace says it."""
        return self.trace_options.max_requests if self.trace is not None else self.workload.num_requests


def carry_out(
    run: SimRun, progress: Synchronized[int] | None = None, noted: Callable[[], None] = lambda: None
) -> SimResult:
    """Returns the result of one run, which has its label. Calls `noted` whenever it has added to `progress`."""
    num_ended, begun_s = 0, time.monotonic()

    def note(_: Outcome) -> None:
        nonlocal num_ended
        num_ended += 1
        if progress is not None and num_ended % NOTED_EVERY == 0:
            with progress.get_lock():
                progress.value += NOTED_EVERY
            noted()

    assignment = run.assignment
    cluster = SimCluster(run.settings, None if assignment is None else lambda _: assignment)
    result = cluster.run(run.requests(), note, run.num_clients)
    return replace(result, policy=run.label, wall_s=time.monotonic() - begun_s)


def run_all(runs: Sequence[SimRun], num_processes: int, people: TextIO | None = sys.stderr) -> list[SimResult]:
    """Returns the results of all runs, in the order of the runs. Shows a progress bar on the stream `people` meanwhile.
    Raises the error of a run that failed."""
    total = sum(run.num_requests for run in runs)
    if num_processes <= 1 or len(runs) == 1:
        context = multiprocessing.get_context("spawn")
        progress: Synchronized[int] = context.Value("q", 0)
        bar = ProgressBar(total, people)
        results = []
        for run in runs:
            results.append(carry_out(run, progress, lambda: bar.show(progress.value)))
            bar.show(progress.value)
        bar.end()
        return results
    context = multiprocessing.get_context("spawn")
    progress = context.Value("q", 0)
    bar = ProgressBar(total, people)
    with ProcessPoolExecutor(num_processes, context, _take_progress, (progress,)) as pool:
        futures = [pool.submit(_carry_out, run) for run in runs]
        while not all(future.done() for future in futures):
            bar.show(progress.value)
            time.sleep(REFRESH_S)
        bar.end()
        return [future.result() for future in futures]


_shared_progress: Synchronized[int] | None = None


def _take_progress(progress: Synchronized[int]) -> None:
    global _shared_progress
    _shared_progress = progress


def _carry_out(run: SimRun) -> SimResult:
    return carry_out(run, _shared_progress)


class ProgressBar:
    """Shows how many requests of all runs have ended: a bar on a terminal, and a line per tenth elsewhere."""

    WIDTH = 40

    def __init__(self, total: int, people: TextIO | None) -> None:
        self._total, self._people = total, people
        self._begun_s = time.monotonic()
        self._last_tenth = 0
        self._is_terminal = people is not None and people.isatty()

    def show(self, num_ended: int) -> None:
        if self._people is None or not self._total:
            return
        share = min(1.0, num_ended / self._total)
        taken_s = time.monotonic() - self._begun_s
        left = f"{taken_s * (1 - share) / share:.0f} s left" if share > 0.01 else ""
        if self._is_terminal:
            full = round(self.WIDTH * share)
            bar = "#" * full + "." * (self.WIDTH - full)
            print(
                f"\r[{bar}] {share:4.0%} of {self._total:,} requests {left:>14}", end="", file=self._people, flush=True
            )
        elif int(10 * share) > self._last_tenth:
            self._last_tenth = int(10 * share)
            print(f"{share:4.0%} of {self._total:,} requests, {left}", file=self._people, flush=True)

    def end(self) -> None:
        if self._people is not None and self._is_terminal:
            print(file=self._people)


# ---------------------------------------------------------------- load


class LeastWork(NamedTuple):
    """Holds the means, per request, of the work of a workload that no cluster can avoid: the tokens of a conversation
    are computed once, and so is a medium, however many requests contain it."""

    num_prompt: float
    """Counts the tokens of the whole prompt, which take KV blocks."""
    prefill_tokens: float
    """Counts the weighted tokens of the prompt that no earlier request contains."""
    encode_s: float

    @classmethod
    def of(cls, table: CostTable, workload: WorkloadSpec) -> LeastWork:
        """Returns the means over the first requests of a workload."""
        sample = replace(workload, num_requests=SAMPLE)
        num_prompt = prefill_tokens = encode_s = 0.0
        session_to_known: dict[int, int] = {}
        """Maps a conversation to the tokens of its last prompt and answer."""
        encoded: set[tuple[str, str]] = set()
        for request in generate(sample, 0):
            covered = session_to_known.get(request.session, workload.system_tokens)
            num_tokens = 0
            for first, second in request.parts:
                if isinstance(second, int):
                    num_tokens += second
                    continue
                kind = table.kind(str(first))
                num_tokens += kind.num_tokens
                if num_tokens > covered and (kind.modality, second) not in encoded:
                    encoded.add((kind.modality, second))
                    encode_s += table.modality_to_encoding[kind.modality].forward_s(kind.cost)
            num_prompt += num_tokens
            prefill_tokens += weighted_tokens(num_tokens - covered, covered, table.worker.scale_tokens)
            session_to_known[request.session] = num_tokens + request.num_output
        return cls(num_prompt / SAMPLE, prefill_tokens / SAMPLE, encode_s / SAMPLE)


def capacity(settings: ClusterSettings, workload: WorkloadSpec) -> float:
    """Returns the requests per second at load 1: what all workers compute with full steps, or what all encoders encode
    one item at a time, whichever is less. No cluster bears more, because the work is the least that there is; one that
    computes a conversation on a second worker, or a medium on a second encoder, bears less.

    With N sequences in every step, a worker ends `N / (output * step)` requests per second, and each step takes its
    overhead, N decoding sequences, and the prompts of the requests that begin in it. N is limited by the places of a
    step and by the KV blocks."""
    costs = settings.table.worker
    work = LeastWork.of(settings.table, workload)
    num_blocks = (work.num_prompt + 0.5 * workload.mean_output) / settings.block_size + 1
    num_sequences = min(settings.max_sequences, settings.num_blocks / num_blocks)
    steps = workload.mean_output
    prefill_s = costs.s_per_token * work.prefill_tokens
    step_s = costs.step_overhead_s + num_sequences * (costs.s_per_decode + prefill_s / steps)
    slowness = settings.worker_slowness or (1.0,)
    workers = settings.num_workers * num_sequences / (steps * step_s) * sum(1 / one for one in slowness) / len(slowness)
    if not work.encode_s or not settings.num_encoders:
        return workers
    return min(workers, num_full_encoders(settings) / work.encode_s)


def num_full_encoders(settings: ClusterSettings) -> float:
    """Returns how many encoders of the table's speed encode as much as those of the cluster."""
    slowness = settings.encoder_slowness or (1.0,)
    return settings.num_encoders * sum(1 / one for one in slowness) / len(slowness)


def at_load(settings: ClusterSettings, workload: WorkloadSpec, load: float) -> WorkloadSpec:
    """Returns the workload at a rate that is this share of the capacity."""
    return replace(workload, rate=load * capacity(settings, workload))

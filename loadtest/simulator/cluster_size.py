"""Finds the smallest cluster that serves a workload as fast as wished, for `weft simulate size` and the experiment
`sizing`.

A `SizeGoal` says what fast means. `SizeSearch` simulates clusters of one workload and finds the fewest workers, and
then the fewest encoders, that meet the goal. It begins with the members that the work would fill, which
`sim_runs.LeastWork` counts, adds one after the other, and takes encoders away that batching makes unnecessary. The
module knows nothing of how a run works or of how results are shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fabric.contracts import ConfigError
from loadtest.simulator.sim_cluster import ClusterSettings, SimResult
from loadtest.simulator.sim_report import WARM_UP
from loadtest.simulator.sim_requests import Outcome
from loadtest.simulator.sim_runs import LeastWork, SimRun, capacity, num_full_encoders, run_all
from loadtest.simulator.workloads import WorkloadSpec

AMPLE = 2
"""A search for workers gives every cluster this many times the encoders that the workload needs at least, and two more,
so that encoders decide nothing."""
MAX_GROWTH = 4
"""A search ends without a result at this many times the members that the workload needs at least, and four more."""


@dataclass(frozen=True, slots=True)
class SizeGoal:
    """A `SizeGoal` says how fast requests have to be served. It holds for texts and for requests with media, each by
    itself, so that many texts do not hide slow pictures. The defaults of both times are those of autoscaling."""

    ttft_s: float = 2.0
    tpot_s: float = 0.1
    share: float = 0.95
    """Holds the share of the requests that must have their first token within `ttft_s`, and their further tokens
    `tpot_s` apart on average."""


class SizeFigures(NamedTuple):
    """Holds what one size of the cluster did. Times are the quantile of the goal's share, in milliseconds, and 0 where
    there was no such request."""

    num_workers: int
    num_encoders: int
    text_ttft_ms: float
    media_ttft_ms: float
    tpot_ms: float
    share_met: float
    """Holds the share of requests that met the goal, of texts or of those with media, whichever is less."""
    worker_busy: float
    encoder_busy: float
    is_met: bool


def figures_of(result: SimResult, settings: ClusterSettings, goal: SizeGoal) -> SizeFigures:
    """Returns the figures of a run, without its first requests. A request that failed has not met the goal."""
    outcomes = result.outcomes[int(WARM_UP * len(result.outcomes)) :]
    groups = [[one for one in outcomes if bool(one.num_media) == has_media] for has_media in (False, True)]
    share = min(_share_met(group, goal) for group in groups)
    text_ms, media_ms = (_quantile_ms(group, goal.share, lambda one: one.first_token_s) for group in groups)
    return SizeFigures(
        settings.num_workers,
        settings.num_encoders,
        text_ms,
        media_ms,
        _quantile_ms(outcomes, goal.share, lambda one: one.token_s),
        share,
        result.worker_busy,
        result.encoder_busy,
        share >= goal.share,
    )


def _share_met(outcomes: Sequence[Outcome], goal: SizeGoal) -> float:
    met = [one.is_served and one.first_token_s <= goal.ttft_s and one.token_s <= goal.tpot_s for one in outcomes]
    return sum(met) / len(met) if met else 1.0


def _quantile_ms(outcomes: Sequence[Outcome], share: float, time_s: Callable[[Outcome], float]) -> float:
    served = [time_s(one) for one in outcomes if one.is_served]
    return 1e3 * float(np.quantile(served, share)) if served else 0.0


class SizeSearch:
    """A `SizeSearch` simulates clusters that differ only in the numbers of their workers and encoders. The settings'
    own numbers have no meaning here."""

    def __init__(
        self, settings: ClusterSettings, workload: WorkloadSpec, goal: SizeGoal, seed: int = 1, num_processes: int = 1
    ) -> None:
        self._settings, self._workload, self._goal = settings, workload, goal
        self._seed, self._num_processes = seed, num_processes
        self._size_to_figures: dict[tuple[int, int], SizeFigures] = {}
        work, one_encoder = LeastWork.of(settings.table, workload), replace(settings, num_encoders=1)
        one_worker = replace(settings, num_workers=1, num_encoders=0)
        self.least_workers = max(1, math.ceil(workload.rate / capacity(one_worker, workload)))
        """Counts the workers that compute the workload when none of their time is lost."""
        self.least_encoders = math.ceil(workload.rate * work.encode_s / num_full_encoders(one_encoder))
        """Counts the encoders that encode it one item at a time; 0 if it has no media. Batches may do with fewer."""

    @property
    def figures(self) -> Mapping[tuple[int, int], SizeFigures]:
        """Maps each size that was simulated, as workers and encoders, to its figures."""
        return self._size_to_figures

    def at(self, *sizes: tuple[int, int]) -> list[SizeFigures]:
        """Returns the figures of clusters of these sizes, and simulates those that are new, all at once."""
        new = [size for size in dict.fromkeys(sizes) if size not in self._size_to_figures]
        runs = [
            SimRun(
                f"{workers} workers, {encoders} encoders",
                replace(self._settings, num_workers=workers, num_encoders=encoders),
                self._workload,
                self._seed,
            )
            for workers, encoders in new
        ]
        for run, result in zip(runs, run_all(runs, self._num_processes, people=None) if runs else [], strict=True):
            size = run.settings.num_workers, run.settings.num_encoders
            self._size_to_figures[size] = figures_of(result, run.settings, self._goal)
        return [self._size_to_figures[size] for size in sizes]

    def smallest(self) -> SizeFigures:
        """Returns the figures of the cluster with the fewest workers and, among those, the fewest encoders. Raises
        ConfigError if no size within the search meets the goal."""
        ample = AMPLE * self.least_encoders + 2 if self.least_encoders else 0
        workers = self._first(self.least_workers, "workers", lambda number: (number, ample))
        return self.with_fewest_encoders(workers.num_workers)

    def with_fewest_encoders(self, num_workers: int) -> SizeFigures:
        """Returns the figures of the cluster with the fewest encoders that has this many workers. Raises ConfigError if
        no number meets the goal."""
        if not self.least_encoders:
            return self._first(num_workers, "workers", lambda number: (number, 0), most=num_workers)
        found = self._first(self.least_encoders, "encoders", lambda number: (num_workers, number))
        while found.num_encoders > 1:
            (fewer,) = self.at((num_workers, found.num_encoders - 1))
            if not fewer.is_met:
                break
            found = fewer
        return found

    def _first(
        self, least: int, what: str, size_of: Callable[[int], tuple[int, int]], most: int | None = None
    ) -> SizeFigures:
        """Returns the figures of the smallest number of members, from `least` on, that meets the goal."""
        last = MAX_GROWTH * least + 4 if most is None else most
        for number in range(least, last + 1, self._num_processes):
            found = self.at(*(size_of(each) for each in range(number, min(number + self._num_processes, last + 1))))
            for one in found:
                if one.is_met:
                    return one
        raise ConfigError(
            f"no cluster with {least} to {last} {what} serves {self._goal.share:.0%} of the requests within "
            f"{self._goal.ttft_s:g} s and {self._goal.tpot_s:g} s per token; {found[-1].share_met:.0%} with {last}; "
            "allow more time, or look at the times of single requests with `weft simulate run`"
        )


SIZE_HEADINGS = (
    "workers",
    "encoders",
    "met",
    "text TTFT (ms)",
    "media TTFT (ms)",
    "TPOT (ms)",
    "workers busy",
    "encoders busy",
)


def size_row(one: SizeFigures) -> list[str]:
    """Returns the cells of a size under `SIZE_HEADINGS`."""
    times = [f"{time_ms:.0f}" if time_ms else "-" for time_ms in (one.text_ttft_ms, one.media_ttft_ms)]
    busy = [f"{share:.0%}" for share in (one.worker_busy, one.encoder_busy)]
    return [str(one.num_workers), str(one.num_encoders), f"{one.share_met:.1%}", *times, f"{one.tpot_ms:.0f}", *busy]


# ---------------------------------------------------------------- encoders for a number of workers


class SizingCase(NamedTuple):
    """A `SizingCase` is one mix of requests whose encoders are counted."""

    name: str
    kind_to_share: Mapping[str, float]


class SizingHardware(NamedTuple):
    """Says how fast members are, as factors on the times of the cost table."""

    name: str
    worker_slowness: float
    encoder_slowness: float


CASES = (
    SizingCase("10 % pictures", {"text": 0.9, "image": 0.1}),
    SizingCase("50 % pictures", {"text": 0.5, "image": 0.5}),
    SizingCase("30 % pictures of six tiles", {"text": 0.7, "image-hd": 0.3}),
    SizingCase("50 % sounds of 30 s", {"text": 0.5, "audio-30s": 0.5}),
    SizingCase("20 % videos of 30 frames", {"text": 0.8, "video-30f": 0.2}),
    SizingCase("20 % videos of 120 frames", {"text": 0.8, "video-120f": 0.2}),
    SizingCase("videos of 120 frames alone", {"video-120f": 1.0}),
)
HARDWARE = (
    SizingHardware("a model of 70B, a whole GPU per encoder", 1.0, 1.0),
    SizingHardware("a model of 70B, a seventh of a GPU per encoder", 1.0, 7.0),
    SizingHardware("workers five times as fast, a whole GPU per encoder", 0.2, 1.0),
)
LOAD = 0.5
"""The rate of a case is this share of what the workers bear, as `sim_runs.capacity` counts it."""


class SizingResult(NamedTuple):
    """A `SizingResult` is the smallest number of encoders for one mix on one kind of hardware."""

    case: SizingCase
    hardware: SizingHardware
    rate: float
    least_encoders: int
    smallest: SizeFigures | None
    """Holds None if no number of encoders meets the goal."""
    one_less: SizeFigures | None
    """Holds the figures with one encoder less; None if there would be none."""


def size_cases(
    settings: ClusterSettings,
    workload: WorkloadSpec,
    goal: SizeGoal,
    num_processes: int = 1,
    cases: Sequence[SizingCase] = CASES,
    hardware: Sequence[SizingHardware] = HARDWARE,
) -> list[SizingResult]:
    """Counts the encoders for the workers of `settings`, for each mix and each kind of hardware."""
    results = []
    for kind in hardware:
        own = replace(settings, worker_slowness=(kind.worker_slowness,), encoder_slowness=(kind.encoder_slowness,))
        for case in cases:
            mixed = replace(workload, kind_to_share=case.kind_to_share)
            rate = LOAD * capacity(replace(own, num_encoders=0), mixed)
            search = SizeSearch(own, replace(mixed, rate=rate), goal, settings.seed, num_processes)
            try:
                smallest = search.with_fewest_encoders(settings.num_workers)
            except ConfigError:
                results.append(SizingResult(case, kind, rate, search.least_encoders, None, None))
                continue
            fewer = smallest.num_encoders - 1
            one_less = search.at((settings.num_workers, fewer))[0] if fewer else None
            results.append(SizingResult(case, kind, rate, search.least_encoders, smallest, one_less))
    return results

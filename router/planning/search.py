"""Searches the workers that could serve a query: for each it computes a lower bound, and then its score with the
encoders that suit it best.

The search takes workers in order of the lower bound (their queue and their prefill, as if no medium had to be waited
for) until the bound alone is worse than the scores found so far. So the pruned search finds what the full one would
find. This module knows nothing of how the views come about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fabric.errors import NoCapacity
from fabric.ids import MemberId
from fabric.messages import MediaItem
from router.planning.landing import Landings, land_items
from router.planning.links import link_class, machine
from router.planning.score import ScoredPrompt, covered_tokens, cut, walk
from router.planning.views import CandidateTerms, ClusterView, EncoderView, Line, RouteQuery, WorkerView
from router.planning.waiting import PlacementNeed, Waiting, idle_pace, waiting

_ROUNDING = 1e-9
"""A bound may exceed the scores found so far by this relative amount before the search stops, because bounds and scores
add the same terms in a different order."""


class Bound(NamedTuple):
    """A `Bound` is a worker that could serve the request, with the least time that it needs."""

    bound_s: float
    own_s: float
    """This is the part of `bound_s` without the work that is ahead of the request."""
    covered: int
    waiting: Waiting
    worker: WorkerView


class Candidate(NamedTuple):
    """A `Candidate` is a worker with its score."""

    worker: WorkerView
    covered: int
    num_prefill_tokens: int
    waiting: Waiting
    prefill_s: float
    held_s: float
    ttft_s: float
    landings: Landings

    def terms(self) -> CandidateTerms:
        return CandidateTerms(
            worker_id=self.worker.worker_id,
            covered_tokens=self.covered,
            num_prefill_tokens=self.num_prefill_tokens,
            queue_s=self.waiting.queue_s,
            prefill_s=self.waiting.shared_s + self.prefill_s,
            held_s=self.held_s,
            first_token_s=self.waiting.pace.base_s,
            ttft_s=self.ttft_s,
            items=self.landings.items,
        )


@dataclass(frozen=True, slots=True)
class Search:
    """A `Search` is one query against one snapshot. `known` caches landings: workers that lack the same items and reach
    the encoders over the same links have the same ones."""

    query: RouteQuery
    snapshot: ClusterView
    prompt: ScoredPrompt
    options: Mapping[int, Sequence[EncoderView]]
    bounds: Sequence[Bound]
    tolerance_s: float
    encoder_machines: frozenset[str]
    known: dict[tuple[tuple[int, ...], str], Landings] = field(default_factory=dict)

    @classmethod
    def of(cls, query: RouteQuery, snapshot: ClusterView) -> Search:
        prompt = cut(query, snapshot.context_scale_tokens)
        options = encoder_options(query, snapshot)
        workers = [worker for worker in snapshot.workers if worker.worker_id not in query.excluded]
        if not workers:
            raise NoCapacity("no worker is available")
        bounds = [_bound(worker, prompt, snapshot.block_size) for worker in workers]
        if any(not encoders for encoders in options.values()):
            bounds = [b for b in bounds if all(options[item.index] for item in prompt.missing_items(b.covered))]
        if not bounds:
            modalities = sorted({item.modality for item in query.media if not options[item.index]})
            raise NoCapacity(f"no encoder is available for {', '.join(modalities)}")
        bounds.sort(key=lambda bound: bound.bound_s)
        own_s = min(bound.own_s for bound in bounds)
        machines = frozenset(machine(encoder.host) for encoder in snapshot.encoders)
        return cls(query, snapshot, prompt, options, bounds, snapshot.tolerance * own_s, machines)

    def run(self, prune: bool = True) -> list[Candidate]:
        """Scores workers and returns them as candidates. With `prune`, it scores all that could be the best, near-equal
        to the best or the second best; otherwise it scores all."""
        scored: list[Candidate] = []
        best_s = second_s = float("inf")
        for bound in self.bounds:
            limit_s = max(best_s + self.tolerance_s, second_s)
            if prune and bound.bound_s > limit_s * (1.0 + _ROUNDING):
                break
            candidate = self._score(bound)
            scored.append(candidate)
            best_s, second_s = sorted((best_s, second_s, candidate.ttft_s))[:2]
        return scored

    def lower_bound_s(self, candidate: Candidate) -> float:
        """Returns the time to first token on this worker with every queue empty and the encoders chosen again for that
        case. If the encoders as they were chosen give less, it returns that: a greedy choice may be worse on empty
        queues than on full ones."""
        worker, missing = candidate.worker, self.prompt.missing_items(candidate.covered)
        idle = {item.index: [e._replace(queued_cost=0) for e in self.options[item.index]] for item in missing}
        idle_landings = land_items(missing, idle, self.links_to(worker.host), self.query.feature_row_bytes)
        pace = idle_pace(worker, _need(worker, self.prompt, candidate.covered, self.snapshot.block_size))

        def end_s(landings: Landings) -> float:
            return walk(self.prompt, candidate.covered, 0.0, pace.per_unit_s, landings.unit_to_landing_s).end_s

        return min(end_s(idle_landings), end_s(candidate.landings)) + pace.base_s

    def landings(self, items: Sequence[MediaItem], host: str) -> Landings:
        """Returns the landings of these items at a worker on `host`."""
        if not items:
            return Landings((), {})
        key = tuple(item.index for item in items), host if machine(host) in self.encoder_machines else ""
        if key not in self.known:
            self.known[key] = land_items(items, self.options, self.links_to(host), self.query.feature_row_bytes)
        return self.known[key]

    def links_to(self, host: str) -> dict[MemberId, Line]:
        links = self.snapshot.links
        return {encoder.encoder_id: links[link_class(encoder.host, host)] for encoder in self.snapshot.encoders}

    def _score(self, bound: Bound) -> Candidate:
        worker, covered, ahead = bound.worker, bound.covered, bound.waiting
        landings = self.landings(self.prompt.missing_items(covered), worker.host)
        start_s, pace = ahead.queue_s + ahead.shared_s, ahead.pace
        walked = walk(self.prompt, covered, start_s, pace.per_unit_s, landings.unit_to_landing_s)
        num_prefill_tokens = self.prompt.num_tokens - covered
        ttft_s = walked.end_s + pace.base_s
        return Candidate(worker, covered, num_prefill_tokens, ahead, walked.prefill_s, walked.held_s, ttft_s, landings)


def _bound(worker: WorkerView, prompt: ScoredPrompt, block_size: int) -> Bound:
    covered = covered_tokens(worker, prompt.num_tokens, block_size)
    need = _need(worker, prompt, covered, block_size)
    ahead = waiting(worker, need, block_size)
    own_s = ahead.pace.per_unit_s * need.weighted_tokens + ahead.pace.base_s
    return Bound(ahead.queue_s + ahead.shared_s + own_s, own_s, covered, ahead, worker)


def _need(worker: WorkerView, prompt: ScoredPrompt, covered: int, block_size: int) -> PlacementNeed:
    num_blocks = -(-prompt.num_tokens // block_size) - worker.covered_blocks
    return PlacementNeed(prompt.num_tokens - covered, prompt.num_weighted_after(covered), max(0, num_blocks))


def encoder_options(query: RouteQuery, snapshot: ClusterView) -> dict[int, list[EncoderView]]:
    """Returns, per medium, the encoders that support its modality. The list starts at a random encoder, because equal
    ones are taken in its order."""
    encoders = [encoder for encoder in snapshot.encoders if encoder.encoder_id not in query.excluded]
    first = int(snapshot.tie_break * len(encoders))
    turned = encoders[first:] + encoders[:first]
    return {item.index: [e for e in turned if item.modality in e.modalities] for item in query.media}

"""Chooses the route of a request: `plan_route` takes the worker with the earliest first token, each worker with the
encoders that suit it best. `plan_encoding` chooses encoders alone, for items that a worker needs after all.

A `Search` takes the workers in order of a lower bound (their queue and their prefill, as if no medium had to be waited
for) until the bound alone is worse than the scores found so far. So the pruned search finds what the full one would
find. The score of a worker `w` is the time to first token that it would need; `walk` computes it over the spans of the
prompt, in order:

    t = time until w can start (its queue: see `waiting`)
    for each span not covered by w's KV prefix:
        text span:   t = t + prefill_w(length, context)
        media unit:  t = max(t, land(unit, w)) + prefill_w(length, context)
    ttft(w) = t + first_token_w

Text ahead of a medium overlaps with the medium's encoding, because `t` advances meanwhile; with no text ahead of it,
the walk is the plain sum of encoding, transfer and prefill. All functions are pure functions of frozen values; chance
enters only as the snapshot's `tie_break`. The module knows nothing of how the views come about, or of how waits and
landing times are predicted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fabric.contracts import MediaItem, MemberId, NoCapacity, weighted_tokens
from router.planning.link_classes import machine
from router.planning.predictions import Landings, PlacementNeed, Waiting, idle_pace, land_items, waiting
from router.planning.views import (
    Assignment,
    CandidateTerms,
    ClusterView,
    EncoderView,
    Explanation,
    ItemTerms,
    Line,
    RoutePlan,
    RouteQuery,
    WorkerView,
    link_class,
)


def plan_route(query: RouteQuery, snapshot: ClusterView, now: float) -> RoutePlan:
    """Returns the plan with the earliest predicted first token: a worker, and an encoder for each item that the worker
    lacks. Of workers that are near-equal, it takes one with the fewest open attempts; `tie_break` decides among those.

    Raises NoCapacity if there is no worker, or if no encoder can take a modality; the error then names the modality.
    """
    search = Search.of(query, snapshot)
    scored = search.run()
    best_s = min(candidate.ttft_s for candidate in scored)
    near = [candidate for candidate in scored if candidate.ttft_s <= best_s + search.tolerance_s]
    fewest = min(candidate.worker.num_open for candidate in near)
    near = [candidate for candidate in near if candidate.worker.num_open == fewest]
    winner = near[int(snapshot.tie_break * len(near))]
    others = [candidate for candidate in scored if candidate is not winner]
    runner_up = min(others, key=lambda candidate: candidate.ttft_s, default=None)
    items = winner.landings.items
    missing = {terms.item_index for terms in items}
    return RoutePlan(
        attempt_id=query.attempt_id,
        worker_id=winner.worker.worker_id,
        worker_address=winner.worker.address,
        assignments=tuple(Assignment(terms.item_index, terms.encoder_id) for terms in items),
        covered_items=tuple(item.index for item in query.media if item.index not in missing),
        predicted_ttft_s=winner.ttft_s,
        lower_bound_s=search.lower_bound_s(winner),
        explanation=Explanation(
            winner=winner.terms(),
            runner_up=runner_up.terms() if runner_up else None,
            num_workers=len(search.bounds),
            num_scored=len(scored),
            num_near_equal=len(near),
        ),
        planned_at_s=now,
    )


def plan_encoding(
    query: RouteQuery, worker_id: MemberId, item_indexes: Sequence[int], snapshot: ClusterView
) -> tuple[ItemTerms, ...]:
    """Returns encoders, chosen by the same landing times, for items that a worker needs after all (because it evicted
    them, or because an encoder is lost).

    Raises NoCapacity, naming the modality, if no encoder can take it.
    """
    options = encoder_options(query, snapshot)
    items = [item for item in query.media if item.index in set(item_indexes)]
    for item in items:
        if not options[item.index]:
            raise NoCapacity(f"no encoder is available for {item.modality}")
    host = next((worker.host for worker in snapshot.workers if worker.worker_id == worker_id), "")
    links = {encoder.encoder_id: snapshot.links[link_class(encoder.host, host)] for encoder in snapshot.encoders}
    return land_items(items, options, links, query.feature_row_bytes).items


def encoder_options(query: RouteQuery, snapshot: ClusterView) -> dict[int, list[EncoderView]]:
    """Returns, per medium, the encoders that support its modality. The list starts at a random encoder, because equal
    ones are taken in its order."""
    encoders = [encoder for encoder in snapshot.encoders if encoder.encoder_id not in query.excluded]
    first = int(snapshot.tie_break * len(encoders))
    turned = encoders[first:] + encoders[:first]
    return {item.index: [e for e in turned if item.modality in e.modalities] for item in query.media}


# ------------------------------------------------------------ the search

_ROUNDING = 1e-9
"""A bound may exceed the scores found so far by this relative amount before the search stops, because bounds and scores
add the same terms in a different order."""


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
        idle = {
            item.index: [e._replace(queued_cost=0, queue=None) for e in self.options[item.index]] for item in missing
        }
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


class Bound(NamedTuple):
    """A `Bound` is a worker that could serve the request, with the least time that it needs."""

    bound_s: float
    own_s: float
    """This is the part of `bound_s` without the work that is ahead of the request."""
    covered: int
    waiting: Waiting
    worker: WorkerView


def _bound(worker: WorkerView, prompt: ScoredPrompt, block_size: int) -> Bound:
    covered = covered_tokens(worker, prompt.num_tokens, block_size)
    need = _need(worker, prompt, covered, block_size)
    ahead = waiting(worker, need, block_size)
    own_s = ahead.pace.per_unit_s * need.weighted_tokens + ahead.pace.base_s
    return Bound(ahead.queue_s + ahead.shared_s + own_s, own_s, covered, ahead, worker)


def _need(worker: WorkerView, prompt: ScoredPrompt, covered: int, block_size: int) -> PlacementNeed:
    num_blocks = -(-prompt.num_tokens // block_size) - worker.covered_blocks
    return PlacementNeed(prompt.num_tokens - covered, prompt.num_weighted_after(covered), max(0, num_blocks))


# ------------------------------------------------------------ the score of one worker

TEXT = -1


class Span(NamedTuple):
    """A `Span` holds the prompt positions `[start, end)`: text, or a run of one unit's features."""

    start: int
    end: int
    item: int
    """This is the `MediaItem.index`, or `TEXT`."""
    unit: int
    num_weighted: float
    """This is the number of the span's tokens, weighted by their context (`fabric.contracts.learned_cost`)."""


class ScoredPrompt(NamedTuple):
    """A `ScoredPrompt` is a query's prompt, cut into the parts that the walk needs."""

    spans: tuple[Span, ...]
    """These spans contain all positions, in order, without holes or empty spans."""
    span_ends: tuple[int, ...]
    media: tuple[MediaItem, ...]
    item_ends: tuple[int, ...]
    """This holds, for each medium, where its last run ends (0 if it has no run)."""
    num_tokens: int
    context_scale_tokens: float

    def num_weighted_after(self, covered_tokens: int) -> float:
        """Returns what remains to be computed after a prefix, in weighted tokens."""
        return weighted_tokens(self.num_tokens - covered_tokens, covered_tokens, self.context_scale_tokens)

    def missing_items(self, covered_tokens: int) -> tuple[MediaItem, ...]:
        """Returns the media that a prefix does not wholly contain; each of them must be encoded, and as a whole."""
        return tuple(item for item, end in zip(self.media, self.item_ends, strict=True) if end > covered_tokens)


def cut(query: RouteQuery, context_scale_tokens: float) -> ScoredPrompt:
    """Cuts a query into spans."""
    spans: list[Span] = []
    item_to_end: dict[int, int] = {}

    def add(start: int, end: int, item: int, unit: int) -> None:
        if end > start:
            spans.append(Span(start, end, item, unit, weighted_tokens(end - start, start, context_scale_tokens)))

    at = 0
    for run in query.placeholders:
        if run.length > 0:
            add(at, run.offset, TEXT, 0)
            add(run.offset, run.end, run.item, run.unit)
            item_to_end[run.item] = at = run.end
    add(at, query.token_count, TEXT, 0)
    item_ends = tuple(item_to_end.get(item.index, 0) for item in query.media)
    ends = tuple(span.end for span in spans)
    return ScoredPrompt(tuple(spans), ends, query.media, item_ends, query.token_count, context_scale_tokens)


def covered_tokens(worker: WorkerView, num_tokens: int, block_size: int) -> int:
    """Returns how many prompt tokens need no computing: whole blocks only, and never the last token, because its logits
    are needed."""
    return min(worker.covered_blocks, max(num_tokens - 1, 0) // block_size) * block_size


class Walk(NamedTuple):
    prefill_s: float
    held_s: float
    end_s: float


def walk(
    prompt: ScoredPrompt,
    covered: int,
    start_s: float,
    per_token_s: float,
    unit_to_landing_s: Mapping[tuple[int, int], float],
) -> Walk:
    """Walks from `start_s` over the spans after `covered` tokens. Each unit on the way must have a landing time."""
    now_s, prefill_s, held_s = start_s, 0.0, 0.0
    for start, end, item, unit, num_weighted in prompt.spans[bisect_right(prompt.span_ends, covered) :]:
        if item != TEXT:
            landing_s = unit_to_landing_s[item, unit]
            if landing_s > now_s:
                held_s += landing_s - now_s
                now_s = landing_s
        if start < covered:
            num_weighted = weighted_tokens(end - covered, covered, prompt.context_scale_tokens)
        span_s = per_token_s * num_weighted
        prefill_s += span_s
        now_s += span_s
    return Walk(prefill_s, held_s, now_s)

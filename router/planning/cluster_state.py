"""Keeps the router's mutable view of the cluster, from which each query gets its frozen snapshot.

It owns the indexes, the members' reports, the learned costs, the in-flight accounting and the exclusions. All input
arrives by method calls with the time as an argument; no input that arrives, is late or is missing makes it fail. It
knows nothing of sockets, or of other routers: it sees what they dispatched in the members' reports.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from fabric.contracts import (
    AttemptId,
    EncodeResult,
    EncoderReport,
    FeatureEvents,
    GenerateResult,
    KvEvents,
    KvScheme,
    KvSnapshot,
    Member,
    MemberId,
    MmHash,
    WorkerReport,
    context_scale_tokens,
    split_hashes,
    weighted_tokens,
)
from kv_index import ApplyResult, FeatureIndex, IndexStats, PrefixIndex
from modalities.family import ModelShape
from router.planning.cost_learning import EstimatorName, Learning, StageError
from router.planning.kv_room import KvRoom, RoomNeed, WorkerStocks, kv_room
from router.planning.link_classes import LinkOverride
from router.planning.member_costs import CommonCosts, CostDefaults, common_costs, common_line
from router.planning.member_state import EncoderState, InFlight, WorkerState
from router.planning.route_plan import plan_encoding, plan_route
from router.planning.saved_costs import SavedCosts
from router.planning.views import ClusterView, EncoderView, ItemTerms, Line, RoutePlan, RouteQuery, WorkerView

ClusterMessage = WorkerReport | EncoderReport | KvEvents | KvSnapshot | FeatureEvents


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    max_index_blocks: int = 1 << 18
    max_index_items: int = 1 << 16
    stale_after_s: float = 3.0
    """Reports older than this are no longer used."""
    snapshot_retry_s: float = 1.0
    """The router asks again for a snapshot that has not come after this time."""
    page_wait_s: float = 10.0
    """While a snapshot comes in pages, the router asks again if no further page has come after this time. It is longer,
    because a worker sends a page per engine step, and a request in between makes it begin with the first page again."""
    tolerance: float = 0.02
    """Workers count as equal if they differ by less than this share of a request's own work."""
    links: tuple[LinkOverride, ...] = ()
    """These rules replace the classes of links that follow from where members run; the first that fits a pair wins."""
    estimator: EstimatorName = "ageing"
    """Chooses how costs are learned: `ageing` trusts old estimates less, and `average` is a plain exponential
    average."""
    cost_defaults: CostDefaults = CostDefaults()  # noqa: RUF009 (a NamedTuple is immutable)


class MemberChange(NamedTuple):
    """Lists the workers and encoders that came and went. A member that restarted under its id is in both."""

    joined: tuple[Member, ...]
    left: tuple[Member, ...]


class ClusterState:
    """Keeps the state of all members. It is not thread-safe: it belongs to the router's event loop."""

    def __init__(
        self,
        shape: ModelShape,
        block_size: int,
        rng: random.Random,
        settings: PlannerSettings = PlannerSettings(),
        saved: SavedCosts | None = None,
    ) -> None:
        """Creates the state of a cluster without members. `saved` holds the costs that a former run has learned."""
        self._block_size = block_size
        self._rng = rng
        self._settings = settings
        self._workers: dict[MemberId, WorkerState] = {}
        self._encoders: dict[MemberId, EncoderState] = {}
        self._scheme_to_prefixes: dict[KvScheme | None, PrefixIndex] = {}
        """Holds an index per scheme that a worker has used; the blocks of workers without a scheme are never looked
        up."""
        self._features = FeatureIndex(settings.max_index_items)
        scale_tokens = context_scale_tokens(shape.hidden_size)
        self._learning = Learning(settings.cost_defaults, scale_tokens, settings.links, settings.estimator, saved)
        self._in_flight = InFlight()
        self._member_to_exclusion_end_s: dict[MemberId, float] = {}
        self._member_to_asked_s: dict[MemberId, float] = {}
        self._member_to_page_s: dict[MemberId, float] = {}
        """Holds when the latest page came, for members whose snapshot is arriving in pages."""

    # ------------------------------------------------------------ membership

    def update_members(self, members: Sequence[Member]) -> MemberChange:
        """Takes the directory's view of the members. Members that left lose their load, their index entries and their
        exclusions."""
        new = {member.member_id: member for member in members if member.kind in ("worker", "encoder")}
        states: list[WorkerState | EncoderState] = [*self._workers.values(), *self._encoders.values()]
        old = {state.member.member_id: state.member for state in states}
        left = tuple(m for member_id, m in old.items() if member_id not in new or new[member_id].epoch != m.epoch)
        for member in left:
            self._forget(member)
        gone = {member.member_id for member in left}
        joined = tuple(m for member_id, m in new.items() if member_id not in old or member_id in gone)
        for member in joined:
            if member.kind == "worker":
                self._prefixes(member)
                self._workers[member.member_id] = self._learning.new_worker(member)
            else:
                self._encoders[member.member_id] = self._learning.new_encoder(member)
        return MemberChange(joined, left)

    def exclude(self, member_id: MemberId, until: float) -> None:
        """Keeps plans from using the member before `until`; a longer exclusion stays in force."""
        if member_id in self._workers or member_id in self._encoders:
            self._member_to_exclusion_end_s[member_id] = max(
                until, self._member_to_exclusion_end_s.get(member_id, until)
            )

    # ------------------------------------------------------------ messages

    def apply(self, message: ClusterMessage, now: float) -> Sequence[MemberId]:
        """Takes in a report, events or a snapshot. Returns the members to ask for a snapshot (`SnapshotRequest`), each
        at most once per `snapshot_retry_s`. Messages of members that are not in the view are ignored."""
        if isinstance(message, WorkerReport):
            return self._take_worker_report(message, now)
        if isinstance(message, EncoderReport):
            return self._take_encoder_report(message, now)
        if isinstance(message, FeatureEvents):
            if message.encoder_id not in self._encoders:
                return ()
            return self._ask_on_gap(message.encoder_id, self._features.apply(message), now)
        worker_id = message.worker_id
        if worker_id not in self._workers:
            return ()
        prefixes = self._prefixes(self._workers[worker_id].member)
        if isinstance(message, KvSnapshot):
            result = prefixes.load_snapshot(message)
            if result is ApplyResult.PARTIAL:
                self._member_to_page_s[worker_id] = now
            else:
                self._member_to_page_s.pop(worker_id, None)
            return self._ask_on_gap(worker_id, result, now)
        result = prefixes.apply(worker_id, message.epoch, message.first_seq, message.events)
        return self._ask_on_gap(worker_id, result, now)

    # ------------------------------------------------------------ planning

    def plan(self, query: RouteQuery, now: float) -> RoutePlan:
        """Returns the plan with the earliest predicted first token. It changes nothing but the random source: call
        `note_dispatched` once the plan is carried out. Raises NoCapacity if there is no worker, or if no encoder can
        take a modality; the error then names the modality."""
        return plan_route(query, self.snapshot(query, now), now)

    def plan_encoding(
        self, query: RouteQuery, worker_id: MemberId, item_indexes: Sequence[int], now: float
    ) -> tuple[ItemTerms, ...]:
        """Returns encoders, chosen by the same landing times, for items that a worker needs after all. Raises
        NoCapacity, naming the modality, if no encoder can take it."""
        return plan_encoding(query, worker_id, item_indexes, self.snapshot(query, now))

    def snapshot(self, query: RouteQuery, now: float) -> ClusterView:
        """Returns frozen views for one query; excluded members are left out. It changes nothing but the random
        source."""
        worker_to_blocks = self._covered_blocks(query.scheme_to_hashes)
        encoder_to_cached = self._cached(query)
        barred = self._barred(query.excluded, now)
        worker_line = common_line(state.prefill.estimate(now) for state in self._workers.values())
        encoders: Iterable[EncoderState] = self._encoders.values() if query.media else ()
        encoder_costs = common_costs(state.cost.estimates(now) for state in encoders)
        return ClusterView(
            block_size=self._block_size,
            workers=tuple(
                self._worker_view(state, worker_to_blocks.get(worker_id, 0), worker_line, now)
                for worker_id, state in self._workers.items()
                if worker_id not in barred
            ),
            encoders=tuple(
                self._encoder_view(state, encoder_to_cached.get(encoder_id, frozenset()), encoder_costs, now)
                for encoder_id, state in self._encoders.items()
                if encoder_id not in barred
            )
            if query.media
            else (),
            links=self._learning.links(),
            context_scale_tokens=self._learning.context_scale_tokens,
            tie_break=self._rng.random(),
            tolerance=self._settings.tolerance,
        )

    def can_serve(self, modalities: frozenset[str], excluded: frozenset[MemberId], now: float) -> bool:
        """Returns whether there are a worker, and an encoder for each modality, that a plan may use. If so,
        `plan_route` finds a route for a query with these media and exclusions."""
        barred = self._barred(excluded, now)
        served = {m for each in self._encoders.values() if each.member.member_id not in barred for m in each.modalities}
        return modalities <= served and any(worker_id not in barred for worker_id in self._workers)

    def room(self, need: RoomNeed, excluded: frozenset[MemberId], now: float) -> KvRoom:
        """Returns whether a worker has room for a request now, later or never (`kv_room`). A worker without a report,
        or whose reports stopped, is taken to have room, because the router degrades and never blocks."""
        states, barred = tuple(self._workers.values()), self._barred(excluded, now)
        worker_to_blocks = self._covered_blocks(need.scheme_to_hashes)
        stocks = [self._stock(state, now) for state in states]
        numbers = np.array(stocks, dtype=np.float64).reshape(len(stocks), 4)
        total_blocks, free_blocks, inbox_bytes = numbers[:, :3].astype(np.int64).T
        ids = [state.member.member_id for state in states]
        return kv_room(
            need,
            WorkerStocks(
                worker_ids=ids,
                block_sizes=np.full(len(ids), self._block_size, dtype=np.int64),
                total_blocks=total_blocks,
                free_blocks=free_blocks,
                covered_blocks=np.array([worker_to_blocks.get(each, 0) for each in ids], dtype=np.int64),
                blocks_per_s=numbers[:, 3],
                inbox_bytes=inbox_bytes,
                is_usable=np.array([each not in barred for each in ids], dtype=np.bool_),
            ),
        )

    def next_return_s(self, now: float) -> float | None:
        """Returns when the next exclusion ends, or None if no member is excluded."""
        return min((until for until in self._member_to_exclusion_end_s.values() if until > now), default=None)

    def note_dispatched(self, query: RouteQuery, plan: RoutePlan, now: float) -> None:
        """Counts the plan's work on its worker and encoders until their reports contain it."""
        winner = plan.explanation.winner
        num_blocks = -(-winner.num_prefill_tokens // self._block_size)
        if plan.worker_id in self._workers:
            scale = self._learning.context_scale_tokens
            num_weighted = round(weighted_tokens(winner.num_prefill_tokens, winner.covered_tokens, scale))
            self._in_flight.add(query.attempt_id, plan.worker_id, num_weighted, num_blocks)
        self.note_encoding(query.attempt_id, winner.items)

    def note_encoding(self, attempt_id: AttemptId, items: Sequence[ItemTerms]) -> None:
        """Counts items that were sent to encoders (those of a plan, or of `plan_encoding`)."""
        encoder_to_cost: dict[MemberId, int] = {}
        for terms in items:
            encoder_to_cost[terms.encoder_id] = encoder_to_cost.get(terms.encoder_id, 0) + terms.load
        for encoder_id, cost in encoder_to_cost.items():
            if encoder_id in self._encoders:
                self._in_flight.add(attempt_id, encoder_id, cost)

    def note_ended(self, attempt_id: AttemptId) -> None:
        """Records that the attempt ended, with or without success. A second call does nothing."""
        self._in_flight.end(attempt_id)

    # ------------------------------------------------------------ learning

    def observe_generate(self, plan: RoutePlan, result: GenerateResult, now: float, first_token_s: float = 0.0) -> None:
        """Corrects the worker's costs by what the result reports. `first_token_s` is the time from the dispatch to the
        arrival of the first token, or 0 if it is unknown."""
        worker = self._workers.get(result.worker_id)
        self._learning.observe_generate(plan, result, worker, now, first_token_s)

    def observe_encode(self, plan: RoutePlan, result: EncodeResult, now: float) -> None:
        """Corrects the encoder's costs, and ends the encoder's share of the attempt."""
        self._in_flight.end_at(plan.attempt_id, result.encoder_id)
        self._learning.observe_encode(plan, result, self._encoders.get(result.encoder_id), now)

    def accuracy(self) -> Mapping[str, StageError]:
        """Returns the comparison of predicted with actual values, per stage."""
        return self._learning.accuracy.stages()

    def kv_schemes(self) -> tuple[KvScheme, ...]:
        """Returns the schemes of the workers, each once: a query must hold the hashes of these."""
        schemes = (state.member.kv_scheme for state in self._workers.values())
        return tuple(dict.fromkeys(scheme for scheme in schemes if scheme is not None))

    def learned(self, now: float, wall_s: float) -> SavedCosts:
        """Returns the learned costs that another run can begin with; `wall_s` is the present wall time."""
        return self._learning.saved(now, wall_s)

    def prefix_stats(self) -> IndexStats:
        """Returns the sums over the indexes of all schemes."""
        stats = [prefixes.stats() for prefixes in self._scheme_to_prefixes.values()]
        return IndexStats(*map(sum, zip(*stats, strict=True))) if stats else PrefixIndex(0).stats()

    def feature_stats(self) -> IndexStats:
        return self._features.stats()

    def check_invariants(self) -> None:
        """Raises AssertionError unless the in-flight sums are consistent."""
        self._in_flight.check_invariants()

    # ------------------------------------------------------------ inside

    def _take_worker_report(self, report: WorkerReport, now: float) -> Sequence[MemberId]:
        state = self._workers.get(report.worker_id)
        if state is None or not state.freshness.accept(report.epoch, report.seq, now):
            return ()
        state.take(report, now)
        self._learning.observe_report(report, now)
        self._in_flight.acknowledge(report.worker_id, report.acknowledged)
        is_arriving = now - self._member_to_page_s.get(report.worker_id, -inf) < self._settings.page_wait_s
        is_in_step = is_arriving or self._prefixes(state.member).is_in_step(report.worker_id)
        return self._ask_unless(is_in_step, report.worker_id, now)

    def _take_encoder_report(self, report: EncoderReport, now: float) -> Sequence[MemberId]:
        state = self._encoders.get(report.encoder_id)
        if state is None or not state.freshness.accept(report.epoch, report.seq, now):
            return ()
        state.take(report, now)
        self._in_flight.acknowledge(report.encoder_id, report.acknowledged)
        return self._ask_unless(self._features.is_in_step(report.encoder_id), report.encoder_id, now)

    def _ask_on_gap(self, member_id: MemberId, result: ApplyResult, now: float) -> Sequence[MemberId]:
        return self._ask_unless(result is not ApplyResult.GAP, member_id, now)

    def _ask_unless(self, is_in_step: bool, member_id: MemberId, now: float) -> Sequence[MemberId]:
        asked_s = self._member_to_asked_s.get(member_id)
        if is_in_step or (asked_s is not None and now - asked_s < self._settings.snapshot_retry_s):
            return ()
        self._member_to_asked_s[member_id] = now
        return (member_id,)

    def _worker_view(self, state: WorkerState, covered_blocks: int, common: Line | None, now: float) -> WorkerView:
        is_stale = state.freshness.is_stale(now, self._settings.stale_after_s)
        return state.view(covered_blocks, self._in_flight.load(state.member.member_id), is_stale, common, now)

    def _encoder_view(
        self, state: EncoderState, cached: frozenset[MmHash], common: CommonCosts, now: float
    ) -> EncoderView:
        is_stale = state.freshness.is_stale(now, self._settings.stale_after_s)
        return state.view(cached, self._in_flight.load(state.member.member_id), is_stale, common, now)

    def _stock(self, state: WorkerState, now: float) -> tuple[float, float, float, float]:
        """Returns a worker's blocks in all, those that a new request could take, the bytes of its inbox, and the blocks
        that it returns per second. The blocks that queued tokens will take count as taken, and so does one block for
        each sequence that decodes or was just dispatched."""
        report = state.report
        if report is None:
            return 0, 0, 0, 0.0
        engine, inbox_bytes = report.engine, report.features.inbox_bytes_total
        if state.freshness.is_stale(now, self._settings.stale_after_s):
            return engine.kv_blocks_total, engine.kv_blocks_total, inbox_bytes, 0.0
        load = self._in_flight.load(state.member.member_id)
        promised = load.pending_blocks + load.num_pending + -(-engine.queued_tokens // self._block_size)
        promised += engine.num_decoding
        rate = engine.kv_blocks_used / report.residence_s if report.residence_s else 0.0
        return engine.kv_blocks_total, engine.kv_blocks_total - engine.kv_blocks_used - promised, inbox_bytes, rate

    def _barred(self, excluded: frozenset[MemberId], now: float) -> frozenset[MemberId]:
        return excluded | {member_id for member_id, until in self._member_to_exclusion_end_s.items() if until > now}

    def _prefixes(self, worker: Member) -> PrefixIndex:
        """Returns the index of the worker's scheme."""
        prefixes = self._scheme_to_prefixes.get(worker.kv_scheme)
        if prefixes is None:
            prefixes = PrefixIndex(self._settings.max_index_blocks)
            self._scheme_to_prefixes[worker.kv_scheme] = prefixes
        return prefixes

    def _covered_blocks(self, scheme_to_hashes: Mapping[KvScheme, bytes]) -> dict[MemberId, int]:
        """Returns the leading blocks of `self._block_size` tokens that each worker holds."""
        worker_to_blocks: dict[MemberId, int] = {}
        for scheme, hashes in scheme_to_hashes.items():
            if (prefixes := self._scheme_to_prefixes.get(scheme)) is not None:
                for worker_id, num_blocks in prefixes.lookup(split_hashes(hashes)).items():
                    worker_to_blocks[worker_id] = num_blocks * scheme.block_size // self._block_size
        return worker_to_blocks

    def _cached(self, query: RouteQuery) -> dict[MemberId, frozenset[MmHash]]:
        encoder_to_cached: dict[MemberId, frozenset[MmHash]] = {}
        for mm_hash in {item.mm_hash for item in query.media}:
            for encoder_id in self._features.holders(mm_hash):
                encoder_to_cached[encoder_id] = encoder_to_cached.get(encoder_id, frozenset()) | {mm_hash}
        return encoder_to_cached

    def _forget(self, member: Member) -> None:
        member_id = member.member_id
        self._learning.forget(member)
        if (state := self._workers.pop(member_id, None)) is not None:
            self._prefixes(state.member).remove_worker(member_id)
        self._encoders.pop(member_id, None)
        self._features.remove_encoder(member_id)
        self._in_flight.forget_member(member_id)
        self._member_to_exclusion_end_s.pop(member_id, None)
        self._member_to_asked_s.pop(member_id, None)
        self._member_to_page_s.pop(member_id, None)

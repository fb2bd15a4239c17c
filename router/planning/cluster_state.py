"""Keeps the router's picture of the cluster, and makes plans from it.

`ClusterState` owns the indexes, the members' columns, the learned costs, the in-flight accounting and the exclusions.
All input arrives by method calls with the time, on the router's clock, as an argument; no message can make a call fail,
however late it is. The module knows nothing of sockets, and of other routers only their news
(`peer_news`) and what the members' reports contain.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    RouterNews,
    WaitingWork,
    WorkerReport,
    context_scale_tokens,
    key_of,
    weighted_tokens,
)
from kv_index import ApplyResult, FeatureIndex, IndexStats, PrefixIndex
from modalities.family import ModelShape
from router.planning.cost_learning import Learning, StageError
from router.planning.kv_room import KvRoom, RoomColumns, RoomNeed
from router.planning.link_classes import LinkOverride, LinkPlace, LinkRules
from router.planning.member_columns import ClusterColumns, EncoderColumns, Floats, LinkPatterns, WorkerColumns
from router.planning.member_costs import CostDefaults
from router.planning.member_shares import EncoderShare, WorkerShare, awaited_tokens
from router.planning.member_state import EncoderState, InFlight, WorkerState
from router.planning.peer_news import NewsLog, PeerBook
from router.planning.plan_types import (
    Chance,
    ItemTerms,
    MediaOfPrompt,
    PairScores,
    PlanSettings,
    QueryHints,
    RoutePlan,
    RouteQuery,
)
from router.planning.predicted_work import predicted_work
from router.planning.promised_prompts import marks_of
from router.planning.route_plan import plan_encoding, plan_route, score_pairs
from router.planning.saved_costs import SavedCosts
from router.planning.stage_plan import StageLinkCosts

ClusterMessage = WorkerReport | EncoderReport | KvEvents | KvSnapshot | FeatureEvents


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """Holds the settings of the planner and of the router's indexes."""

    max_index_blocks: int = 1 << 20
    """Limits the KV blocks that the index of one scheme knows."""
    max_index_items: int = 1 << 16
    """Limits the features that an index of features knows."""
    stale_after_s: float = 3.0
    """The router takes a member whose last report is older than this for silent: it does not trust the cache of the
    member, and counts what it has open there as not done."""
    snapshot_retry_s: float = 1.0
    """The router asks again for a snapshot that has not come after this time."""
    page_wait_s: float = 10.0
    """While a snapshot comes in pages, the router asks again if no further page has come after this time. It is longer,
    because a worker sends a page per engine step, and a request in between makes it begin with the first page again."""
    tolerance: float = 0.02
    """Workers count as equal if they differ by less than this share of a request's own work. It is less than one more
    request of the same kind in a queue, so near-equality never hides load."""
    affinity_limit_s: float = 10.0
    """A cached prefix does not bind requests to a worker whose queue is longer than this."""
    exploration: float = 0.002
    """This fraction of the plans takes any worker whose score is at most a quarter worse than the best one. So the
    router goes on learning about workers that it would not choose, and popular prefixes spread."""
    links: tuple[LinkOverride, ...] = ()
    """These rules replace the classes of links that follow from where members run; the first that fits a pair wins."""
    cost_defaults: CostDefaults = CostDefaults()  # noqa: RUF009 (a NamedTuple is immutable)

    @property
    def stage_costs(self) -> StageLinkCosts:
        return StageLinkCosts(LinkRules(self.links), self.cost_defaults)


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
        """Creates the state of a cluster without members. `block_size` is that of workers that do not say their own,
        and `saved` holds the costs that a former run has learned."""
        self._block_size = block_size
        self._rng = rng
        self._settings = settings
        self._plan_settings = PlanSettings(
            settings.stale_after_s, settings.tolerance, settings.affinity_limit_s, settings.exploration
        )
        self._workers: dict[MemberId, WorkerState] = {}
        self._encoders: dict[MemberId, EncoderState] = {}
        self._worker_columns, self._encoder_columns = WorkerColumns(), EncoderColumns()
        self._patterns = LinkPatterns()
        self._modality_to_row: dict[str, int] = {}
        self._scheme_to_prefixes: dict[KvScheme | None, PrefixIndex] = {}
        """Holds an index per scheme that a worker has used; the blocks of workers without a scheme are never looked
        up."""
        self._schemes: tuple[KvScheme, ...] | None = None
        """Holds the schemes of the workers; None means that they have to be found again."""
        self._spare_prefixes: PrefixIndex | None = PrefixIndex(settings.max_index_blocks)
        """Holds the index of the first scheme until a worker names that scheme. It is made before the router serves,
        because a large one takes its memory for up to a tenth of a second."""
        self._features = FeatureIndex(settings.max_index_items)
        self._kept = FeatureIndex(settings.max_index_items)
        """Records which workers keep features after prefill."""
        scale_tokens = context_scale_tokens(shape.hidden_size)
        self._learning = Learning(settings.cost_defaults, scale_tokens, settings.links, saved)
        self._in_flight = InFlight(self._worker_columns, self._encoder_columns)
        self.news = NewsLog()
        """Collects what other routers should know of this router's dispatches."""
        self._peers = PeerBook()
        self._rooms = RoomColumns(settings.stale_after_s)
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
        for attempt_id in self._peers.keep({member.member_id for member in members if member.kind == "router"}):
            self._in_flight.forget(attempt_id)
        gone = {member.member_id for member in left}
        joined = tuple(m for member_id, m in new.items() if member_id not in old or member_id in gone)
        for member in joined:
            self._join(member)
        return MemberChange(joined, left)

    def exclude(self, member_id: MemberId, until: float) -> None:
        """Keeps plans from using the member before `until`; a longer exclusion stays in force."""
        for columns in (self._worker_columns, self._encoder_columns):
            if (slot := columns.member_to_slot.get(member_id)) is not None:
                columns.barred_until_s[slot] = max(columns.barred_until_s[slot], until)

    # ------------------------------------------------------------ messages

    def apply(self, message: ClusterMessage, now: float) -> Sequence[MemberId]:
        """Takes in a report, events or a snapshot. Returns the members to ask for a snapshot (`SnapshotRequest`), each
        at most once per `snapshot_retry_s`. Messages of members that are not in the view are ignored."""
        if isinstance(message, WorkerReport):
            return self._take_worker_report(message, now)
        if isinstance(message, KvEvents):
            return self._take_kv_events(message, now)
        if isinstance(message, EncoderReport):
            return self._take_encoder_report(message, now)
        if isinstance(message, FeatureEvents):
            return self._take_feature_events(message, now)
        return self._take_snapshot(message, now)

    # ------------------------------------------------------------ planning

    def plan(self, query: RouteQuery, now: float) -> RoutePlan:
        """Returns the plan with the earliest predicted first token. It changes nothing but the random source: call
        `note_dispatched` once the plan is carried out. Raises NoCapacity if there is no worker, or if no encoder can
        take a modality; the error then names the modality."""
        chance = Chance(self._rng.random(), self._rng.random())
        return plan_route(query, self.columns(now), self.hints(query, now), now, self._plan_settings, chance)

    def score_pairs(self, query: RouteQuery, now: float, max_pairs: int) -> PairScores:
        """Returns the scores of the pairs of workers and encoders among which `plan` would choose now. Raises
        NoCapacity as `plan` does."""
        return score_pairs(query, self.columns(now), self.hints(query, now), now, self._plan_settings, max_pairs)

    def plan_encoding(
        self, query: RouteQuery, worker_id: MemberId, item_indexes: Sequence[int], now: float
    ) -> tuple[ItemTerms, ...]:
        """Returns encoders, chosen by the same landing times, for items that a worker needs after all. Raises
        NoCapacity, naming the modality, if no encoder can take it."""
        columns, hints, chance = self.columns(now), self.hints(query, now), Chance(self._rng.random())
        return plan_encoding(query, worker_id, item_indexes, columns, hints, now, self._plan_settings, chance)

    def columns(self, now: float) -> ClusterColumns:
        """Returns what plans read of the members. The columns change in place with later messages and dispatches."""
        if self._learning.refresh(now):
            self._worker_columns.believe(self._learning.believed.workers)
            self._encoder_columns.believe(self._learning.believed.encoders)
        workers, encoders = self._worker_columns, self._encoder_columns
        if self._patterns.is_stale:
            rules = self._learning.link_rules
            self._patterns.refresh(rules, self._places(workers), self._places(encoders), encoders.capacity)
        return ClusterColumns(
            workers,
            encoders,
            self._patterns,
            self._learning.believed.links,
            self._modality_to_row,
            self._learning.context_scale_tokens,
        )

    def hints(self, query: RouteQuery, now: float) -> QueryHints:
        """Returns what the indexes and the requests in flight say of a query."""
        depths = self._depths(query.scheme_to_hashes)
        promised: Floats | None = None
        for scheme, hashes in query.scheme_to_hashes.items():
            raised = self._in_flight.promised_blocks(scheme, hashes)
            if raised is not None:
                promised = raised * scheme.block_size if promised is None else promised + raised * scheme.block_size
        if not query.media:
            return QueryHints(depths, promised)
        ready: dict[MmHash, list[tuple[int, float]]] = {}
        kept: dict[MmHash, Sequence[int]] = {}
        heard_s = now - self._settings.stale_after_s  # A worker whose reports stopped may have given up what it kept.
        hashes_of_media = list(dict.fromkeys([item.mm_hash for item in query.media]))
        encoder_slots, worker_slots = (each.holders_of(hashes_of_media) for each in (self._features, self._kept))
        for mm_hash, holders, keepers in zip(hashes_of_media, encoder_slots, worker_slots, strict=True):
            found = self._in_flight.features(mm_hash, now, query.attempt_id)
            found += [(slot, 0.0) for slot in holders]
            if found:
                ready[mm_hash] = found
            if heard := [slot for slot in keepers if self._worker_columns.report_at_s[slot] >= heard_s]:
                kept[mm_hash] = heard
        return QueryHints(depths, promised, ready, kept)

    def can_serve(self, modalities: frozenset[str], excluded: frozenset[MemberId], now: float) -> bool:
        """Returns whether there are a worker, and an encoder for each modality, that a plan may use. If so, `plan`
        finds a route for a query with these media and exclusions."""
        if not self._worker_columns.usable(excluded, now).any():
            return False
        usable = self._encoder_columns.usable(excluded, now)
        rows = [self._modality_to_row.get(modality) for modality in modalities]
        able = self._encoder_columns.is_able[:, : len(usable)] * usable
        return all(row is not None and able[row].any() for row in rows)

    def room(self, need: RoomNeed, excluded: frozenset[MemberId], now: float) -> KvRoom:
        """Returns whether a worker has room for a request now, later or never (`kv_room`). A worker without a report is
        taken to have room, and one whose reports stopped has what it had then and can have given back since."""
        workers = self._worker_columns
        is_usable = workers.usable(excluded, now)
        are_all_usable = int(is_usable.sum()) == len(workers.member_to_slot)
        barred = (
            [] if are_all_usable else [each for each, slot in workers.member_to_slot.items() if not is_usable[slot]]
        )
        at_once = None if barred else self._rooms.room_at_once(need, now)
        if at_once is not None:
            return at_once
        shared = self._shared_tokens(need.scheme_to_hashes)
        members = [(workers.members[slot], int(shared[slot])) for slot in np.flatnonzero(shared)]
        worker_to_shared = {member.member_id: num for member, num in members if member is not None}
        return self._rooms.room(need, worker_to_shared, barred, now)

    def predicted_work(
        self, need: RoomNeed, media: MediaOfPrompt, barred: frozenset[MemberId], now: float
    ) -> WaitingWork:
        """Returns what a request that workers in `barred` can't take will be to the others, less its cached prefix."""
        workers = self.columns(now).workers
        covered = int((self._depths(need.scheme_to_hashes) * workers.block_size[: len(workers)]).max(initial=0))
        return predicted_work(need, media, covered, barred, workers, self._learning, now)

    def next_return_s(self, now: float) -> float | None:
        """Returns when the next exclusion ends, or None if no member is excluded."""
        barred = np.concatenate([c.barred_until_s[: len(c)] for c in (self._worker_columns, self._encoder_columns)])
        ends = barred[(barred > now) & (barred < np.inf)]
        return float(ends.min()) if len(ends) else None

    def note_dispatched(self, query: RouteQuery, plan: RoutePlan, now: float) -> None:
        """Counts the plan's work on its worker and encoders until their reports contain it."""
        winner = plan.explanation.winner
        if (state := self._workers.get(plan.worker_id)) is not None:
            scheme, scale = state.member.kv_scheme, self._learning.context_scale_tokens
            block_size = scheme.block_size if scheme is not None else self._block_size
            num_weighted = weighted_tokens(winner.num_prefill_tokens, winner.covered_tokens, scale)
            hashes = query.scheme_to_hashes.get(scheme, b"") if scheme is not None else b""
            marks = marks_of(hashes)
            num_in_use = self._in_flight.num_in_use(plan.worker_id, scheme, marks)
            num_blocks = -(-query.token_count // block_size) - num_in_use
            awaited = awaited_tokens(query, plan, scale, now)
            share = WorkerShare(num_weighted, num_blocks, scheme, hashes, marks, awaited)
            self._in_flight.add_worker(query.attempt_id, plan.worker_id, share, now)
            self.news.dispatched(query.attempt_id, plan.worker_id, share, now)
            self._note_promised(plan.worker_id)
        self.note_encoding(query.attempt_id, winner.items, now, query.priority)

    def note_encoding(
        self, attempt_id: AttemptId, items: Sequence[ItemTerms], now: float = 0.0, priority: int = 0
    ) -> None:
        """Counts items that were sent to encoders (those of a plan, or of `plan_encoding`)."""
        encoder_to_items: dict[MemberId, list[ItemTerms]] = {}
        for terms in items:
            encoder_to_items.setdefault(terms.encoder_id, []).append(terms)
        encoders = self._encoder_columns
        for encoder_id, own in encoder_to_items.items():
            if (slot := encoders.member_to_slot.get(encoder_id)) is None:
                continue
            seconds = sum(terms.device_prepare_s + terms.encode_s for terms in own)
            decode_s = sum(terms.decode_s for terms in own)
            # A request that waits for the feature of another request keeps the flight if that request is aborted.
            done: dict[MmHash, float] = {}
            for terms in own:
                done.setdefault(terms.mm_hash, now + terms.landing_s - terms.transfer_s)
            num_units = sum(terms.num_units for terms in own if not terms.is_cached)
            share = self._encoder_share(slot, seconds, decode_s, done, now, priority, num_units)
            self._in_flight.add_encoder(attempt_id, encoder_id, share, now)
            self.news.encoding(attempt_id, encoder_id, share, priority, now)

    def _encoder_share(
        self,
        slot: int,
        seconds: float,
        decode_s: float,
        done: Mapping[MmHash, float],
        at_s: float,
        priority: int,
        num_units: int,
    ) -> EncoderShare:
        """Returns work that was sent at `at_s` to the encoder of a slot."""
        encoders = self._encoder_columns
        state_at_s = float(encoders.state_at_s[slot]) if encoders.is_reported[slot] else at_s
        key = key_of(seconds, float(encoders.patience[slot]), at_s - state_at_s, priority)
        return EncoderShare(seconds, key, decode_s, done, state_at_s, num_units)

    def note_encoding_ended(self, attempt_id: AttemptId, encoder_id: MemberId, now: float) -> None:
        """Records that the attempt's work on an encoder ended, with or without success. A second call does nothing."""
        self._in_flight.end_at(attempt_id, encoder_id, now)
        self.news.encoded(attempt_id, encoder_id, now)

    def note_first_token(self, attempt_id: AttemptId, now: float) -> None:
        """Records that the attempt's first token came, so that its prompt is computed, and its worker has begun with
        the next step."""
        at_s = self._in_flight.computed(attempt_id, now)
        self.news.computed(attempt_id, at_s)

    def note_ended(self, attempt_id: AttemptId, now: float) -> None:
        """Records that the attempt ended, with or without success. A second call does nothing."""
        for member_id in self._in_flight.end(attempt_id, now):
            self._note_promised(member_id)
        self.news.ended(attempt_id)

    def take_news(self, news: RouterNews, now: float) -> None:
        """Takes in what another router has dispatched, and what of that has left the members' queues."""
        router_id = news.router_id
        for attempt_id in self._peers.lost(news):
            self._in_flight.forget(attempt_id)
        for told in news.dispatched:
            attempt_id, at_s = AttemptId(told.request_id, told.attempt), now - told.age_s
            awaited = [(now + due_s, num) for due_s, num in told.awaited]
            load = WorkerShare(told.weighted_tokens, told.num_blocks, told.scheme, marks=told.marks, awaited=awaited)
            self._in_flight.add_worker(attempt_id, told.worker_id, load, at_s, router_id)
            self._peers.add(router_id, attempt_id)
            self._note_promised(told.worker_id)
        for work in news.encodings:
            attempt_id, at_s = AttemptId(work.request_id, work.attempt), now - work.age_s
            if (slot := self._encoder_columns.member_to_slot.get(work.encoder_id)) is None:
                continue
            done = {mm_hash: now + left_s for mm_hash, left_s in work.features}
            share = self._encoder_share(slot, work.seconds, work.decode_s, done, at_s, work.priority, work.num_units)
            self._in_flight.add_encoder(attempt_id, work.encoder_id, share, at_s, router_id)
            self._peers.add(router_id, attempt_id)
        for computed in news.computed:
            attempt_id = AttemptId(computed.request_id, computed.attempt)
            self._in_flight.computed_at(attempt_id, now - computed.age_s)
        for encoded in news.encoded:
            attempt_id = AttemptId(encoded.request_id, encoded.attempt)
            self._in_flight.end_at(attempt_id, encoded.encoder_id, now - encoded.age_s)
        for request_id, number in news.ended:
            attempt_id = AttemptId(request_id, number)
            for member_id in self._in_flight.end(attempt_id, now):
                self._note_promised(member_id)
            self._peers.remove(router_id, attempt_id)

    # ------------------------------------------------------------ learning

    def observe_generate(self, plan: RoutePlan, result: GenerateResult, now: float, first_token_s: float = 0.0) -> None:
        """Corrects the worker's costs by what the result reports. `first_token_s` is the time from the dispatch to the
        arrival of the first token, or 0 if it is unknown."""
        worker = self._workers.get(result.worker_id)
        self._learning.observe_generate(plan, result, worker, now, first_token_s)

    def observe_encode(self, plan: RoutePlan, result: EncodeResult, now: float) -> None:
        """Corrects the encoder's costs, and ends the encoder's share of the attempt."""
        self._in_flight.end_at(plan.attempt_id, result.encoder_id, now)
        self.news.encoded(plan.attempt_id, result.encoder_id, now)
        self._learning.observe_encode(plan, result, self._encoders.get(result.encoder_id), now)

    def accuracy(self) -> Mapping[str, StageError]:
        """Returns the comparison of predicted with actual values, per stage."""
        return self._learning.accuracy.stages()

    def kv_schemes(self) -> tuple[KvScheme, ...]:
        """Returns the schemes of the workers, each once: a query must hold the hashes of these."""
        if self._schemes is None:
            schemes = (state.member.kv_scheme for state in self._workers.values())
            self._schemes = tuple(dict.fromkeys(scheme for scheme in schemes if scheme is not None))
        return self._schemes

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
        if state is None or not state.freshness.accept(report.epoch, report.seq):
            return ()
        state.take(report, now)
        dispatched_s = self._in_flight.latest_dispatch_s(report.worker_id, report.acknowledged)
        state_at_s = state.age.state_at_s(report.at_s, now, dispatched_s, report.engine_age_s)
        self._worker_columns.take(self._worker_columns.member_to_slot[report.worker_id], report, now, state_at_s)
        self._learning.observe_report(report, now)
        self._rooms.report(report, now)
        self._in_flight.acknowledge(report.worker_id, report.acknowledged)
        self._in_flight.note_report(report, state_at_s)
        self._note_promised(report.worker_id)
        is_arriving = now - self._member_to_page_s.get(report.worker_id, -inf) < self._settings.page_wait_s
        is_in_step = is_arriving or self._prefixes(state.member).is_in_step(report.worker_id)
        return self._ask_unless(is_in_step, report.worker_id, now)

    def _take_encoder_report(self, report: EncoderReport, now: float) -> Sequence[MemberId]:
        state = self._encoders.get(report.encoder_id)
        if state is None or not state.freshness.accept(report.epoch, report.seq):
            return ()
        state.take(report, now)
        dispatched_s = self._in_flight.latest_dispatch_s(report.encoder_id, report.acknowledged)
        state_at_s = state.age.state_at_s(report.at_s, now, dispatched_s)
        self._encoder_columns.take(self._encoder_columns.member_to_slot[report.encoder_id], report, now, state_at_s)
        self._in_flight.acknowledge(report.encoder_id, report.acknowledged)
        self._in_flight.note_encoder_report(report.encoder_id, state_at_s)
        return self._ask_unless(self._features.is_in_step(report.encoder_id), report.encoder_id, now)

    def _take_kv_events(self, message: KvEvents, now: float) -> Sequence[MemberId]:
        state = self._workers.get(message.worker_id)
        if state is None:
            return ()
        prefixes = self._prefixes(state.member)
        chain_to = partial(self._in_flight.chain_to, message.worker_id)
        result = prefixes.apply(message.worker_id, message.epoch, message.first_seq, message.events, chain_to)
        return self._ask_on_gap(message.worker_id, result, now)

    def _take_snapshot(self, page: KvSnapshot, now: float) -> Sequence[MemberId]:
        worker_id = page.worker_id
        state = self._workers.get(worker_id)
        if state is None:
            return ()
        result = self._prefixes(state.member).load_snapshot(page)
        if result is ApplyResult.PARTIAL:
            self._member_to_page_s[worker_id] = now
        else:
            self._member_to_page_s.pop(worker_id, None)
        return self._ask_on_gap(worker_id, result, now)

    def _take_feature_events(self, events: FeatureEvents, now: float) -> Sequence[MemberId]:
        """Takes in the events of an encoder's cache, or of the features that a worker keeps."""
        holder_id = events.encoder_id
        index = self._features if holder_id in self._encoders else self._kept
        if holder_id not in self._encoders and holder_id not in self._workers:
            return ()
        return self._ask_on_gap(holder_id, index.apply(events), now)

    def _ask_on_gap(self, member_id: MemberId, result: ApplyResult, now: float) -> Sequence[MemberId]:
        return self._ask_unless(result is not ApplyResult.GAP, member_id, now)

    def _ask_unless(self, is_in_step: bool, member_id: MemberId, now: float) -> Sequence[MemberId]:
        asked_s = self._member_to_asked_s.get(member_id)
        if is_in_step or (asked_s is not None and now - asked_s < self._settings.snapshot_retry_s):
            return ()
        self._member_to_asked_s[member_id] = now
        return (member_id,)

    def _prefixes(self, worker: Member) -> PrefixIndex:
        """Returns the index of the worker's scheme."""
        prefixes = self._scheme_to_prefixes.get(worker.kv_scheme)
        if prefixes is None:
            prefixes = self._spare_prefixes or PrefixIndex(self._settings.max_index_blocks)
            self._spare_prefixes = None
            self._scheme_to_prefixes[worker.kv_scheme] = prefixes
        return prefixes

    def _depths(self, scheme_to_hashes: Mapping[KvScheme, bytes]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Returns the leading blocks of a prompt that each worker holds, by slot."""
        depths, is_known = np.zeros(len(self._worker_columns), np.int32), False
        for scheme, hashes in scheme_to_hashes.items():
            if (prefixes := self._scheme_to_prefixes.get(scheme)) is not None:
                if not is_known:
                    prefixes.lookup(hashes, depths)
                    is_known = True
                else:
                    others = np.zeros_like(depths)
                    prefixes.lookup(hashes, others)
                    depths += others
        return depths

    def _shared_tokens(self, scheme_to_hashes: Mapping[KvScheme, bytes]) -> Floats:
        """Returns the leading tokens of a prompt, by slot of the worker, that the worker has cached and that an open
        request of this router begins with too, so that their blocks are in use."""
        workers = self._worker_columns
        shared = np.zeros(len(workers))
        for scheme, hashes in scheme_to_hashes.items():
            depths = self._in_flight.promised_blocks(scheme, hashes)
            if depths is not None:
                shared += np.minimum(depths, self._depths({scheme: hashes})) * scheme.block_size
        return shared

    def _places(self, columns: WorkerColumns | EncoderColumns) -> list[LinkPlace]:
        nowhere = LinkPlace("")
        return [self._learning.place(each.member_id) if each is not None else nowhere for each in columns.members]

    def _join(self, member: Member) -> None:
        member_id = member.member_id
        if member.kind == "worker":
            self._schemes = None
            self._workers[member_id] = self._learning.new_worker(member)
            slot = self._learning.worker_row(member_id)
            self._worker_columns.add(member, slot)
            scheme = member.kv_scheme
            block_size = scheme.block_size if scheme is not None else self._block_size
            self._worker_columns.block_size[slot] = block_size
            self._rooms.add(member_id, block_size)
            self._prefixes(member).add_worker(member_id, slot)
            self._kept.add_member(member_id, slot)
        else:
            self._encoders[member_id] = self._learning.new_encoder(member)
            rows = {modality: self._learning.modality_row(modality) for modality in member.modalities}
            self._modality_to_row.update(rows)
            slot = self._learning.encoder_row(member_id)
            self._encoder_columns.add(member, slot)
            self._encoder_columns.serve(slot, tuple(rows.values()))
            self._features.add_member(member_id, slot)
        self._patterns.forget()

    def _note_promised(self, worker_id: MemberId) -> None:
        """Tells the columns of the room what was dispatched to a worker, and given back, since its last report."""
        workers = self._worker_columns
        if (slot := workers.member_to_slot.get(worker_id)) is not None:
            num_tokens = int(workers.pending_blocks[slot] * workers.block_size[slot])
            self._rooms.promise(worker_id, num_tokens, int(workers.num_pending[slot]))

    def _forget(self, member: Member) -> None:
        member_id = member.member_id
        self._in_flight.forget_member(member_id)
        self._rooms.remove(member_id)
        if member.kind == "worker":
            del self._workers[member_id]
            self._schemes = None
            self._worker_columns.remove(member_id)
            self._prefixes(member).remove_worker(member_id)
            self._kept.remove_member(member_id)
        else:
            del self._encoders[member_id]
            self._encoder_columns.remove(member_id)
            self._features.remove_member(member_id)
        self._learning.forget(member)
        self._member_to_asked_s.pop(member_id, None)
        self._member_to_page_s.pop(member_id, None)
        self._patterns.forget()

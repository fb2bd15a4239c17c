"""Builds small clusters and queries for the planner's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from fabric.contracts import (
    NUM_BINS,
    WEFT_KV,
    ArenaStats,
    AttemptId,
    DeviceStats,
    EncoderReport,
    EngineStats,
    FeatureStats,
    ItemStats,
    KvScheme,
    MediaItem,
    Member,
    MemberId,
    MmHash,
    PlaceholderRange,
    RequestId,
    WorkerReport,
    add_work,
)
from modalities.family import ModelShape
from router.planning import ClusterState, RoutePlan, RouteQuery
from router.planning.link_classes import LINK_CLASSES, LinkClass, LinkRules
from router.planning.member_columns import UNLIMITED, ClusterColumns, EncoderColumns, LinkPatterns, WorkerColumns
from router.planning.plan_types import Chance, EncoderCosts, ItemTerms, Line, PlanSettings, QueryHints
from router.planning.route_plan import RouteSearch

BLOCK_SIZE = 16
SCHEME = KvScheme(WEFT_KV, BLOCK_SIZE)
SHAPE = ModelShape(
    hidden_size=1024, num_levels=1, num_layers=4, num_kv_heads=4, head_dim=64, vocab_size=1000, max_model_len=8192
)
PREFILL = Line(0.005, 0.001)
DECODE = Line(0.002, 0.0)
NO_COST = Line(0.0, 0.0)
ENCODE = Line(0.010, 0.0001)
LINK = Line(0.001, 1e-9)
ROW_BYTES = 4096


def image(index: int, num_tokens: int = 64, cost: int = 256, digit: str = "", modality: str = "image") -> MediaItem:
    mm_hash = MmHash((digit or format(index, "x")) * 32)
    return MediaItem(index, modality, mm_hash, (1, 16, 16), (num_tokens,), cost, f"messages.0.content.{index}")


def query(*parts: int | MediaItem, attempt: str = "req", excluded: Sequence[str] = ()) -> RouteQuery:
    """Returns the query for a prompt of `parts` in order. A number stands for this many tokens of text, an item for its
    placeholders."""
    media, runs, at = [], [], 0
    for part in parts:
        if isinstance(part, int):
            at += part
            continue
        media.append(part)
        for unit, num_tokens in enumerate(part.unit_tokens):
            runs.append(PlaceholderRange(at, num_tokens, part.index, unit, 0))
            at += num_tokens
    return RouteQuery(
        attempt_id=AttemptId(RequestId(attempt), 0),
        token_count=at,
        scheme_to_hashes={SCHEME: b"".join(index.to_bytes(16, "little") for index in range(at // BLOCK_SIZE))},
        media=tuple(media),
        placeholders=tuple(runs),
        feature_row_bytes=ROW_BYTES,
        excluded=frozenset(MemberId(member_id) for member_id in excluded),
    )


class WorkerSpec(NamedTuple):
    """A `WorkerSpec` describes a worker to the planner in the planner's own terms."""

    worker_id: MemberId
    host: str = "h-0"
    covered_blocks: int = 0
    queued_tokens: float = 0.0
    num_decoding: int = 0
    num_open: int = 0
    kv_blocks_free: int | None = None
    prefill: Line = PREFILL
    decode_s: float = 0.0
    pending_tokens: float = 0.0
    num_pending: int = 0
    report_age_s: float = 0.0
    max_step_tokens: int = 0
    place_wait_s: float = 0.0
    kv_blocks_per_s: float = 0.0
    kept: frozenset[MmHash] = frozenset()
    step_left_s: float = 0.0
    """Holds the rest, at the report, of a step that computes prompt tokens."""
    awaited: tuple[tuple[float, float], ...] = ()
    """Holds when other requests' features should land, in seconds from now, and how many tokens wait for them."""


class EncoderSpec(NamedTuple):
    """An `EncoderSpec` describes an encoder. Its queue of `queued_cost` patches is ahead of all new work."""

    encoder_id: MemberId
    host: str = "h-0"
    modalities: frozenset[str] = frozenset({"image"})
    queued_cost: int = 0
    cached: frozenset[MmHash] = frozenset()
    costs: EncoderCosts = EncoderCosts(DECODE, NO_COST, ENCODE)
    modality_to_costs: Mapping[str, EncoderCosts] = MappingProxyType({})
    num_decoders: int = 1

    def costs_of(self, modality: str) -> EncoderCosts:
        return self.modality_to_costs.get(modality, self.costs)


def worker(name: str, **changes: object) -> WorkerSpec:
    return WorkerSpec(MemberId(name))._replace(**changes)


def encoder(name: str, **changes: object) -> EncoderSpec:
    return EncoderSpec(MemberId(name))._replace(**changes)


TRUSTING = PlanSettings(stale_after_s=1e9)
"""Takes no member for silent."""


@dataclass(frozen=True)
class Cluster:
    """A `Cluster` is what the planner sees, as specs. The planner's columns are made of it for each query."""

    workers: tuple[WorkerSpec, ...]
    encoders: tuple[EncoderSpec, ...]
    links: Mapping[LinkClass, Line]
    tie_break: float = 0.0
    explore: float = 1.0
    context_scale_tokens: float = float("inf")
    settings: PlanSettings = TRUSTING

    def columns(self, now: float) -> ClusterColumns:
        names = sorted({name for each in self.encoders for name in each.modalities})
        modality_to_row = {name: number for number, name in enumerate(names, start=1)}
        workers, encoders, patterns = WorkerColumns(), EncoderColumns(), LinkPatterns()
        for slot, spec in enumerate(self.workers):
            workers.add(worker_member(spec.worker_id, spec.host), slot)
            _fill_worker(workers, slot, spec, now)
        for slot, spec in enumerate(self.encoders):
            encoders.add(encoder_member(spec.encoder_id, spec.host, tuple(spec.modalities)), slot)
            encoders.serve(slot, [modality_to_row[name] for name in spec.modalities])
            _fill_encoder(encoders, slot, spec, now)
        rates = np.zeros((len(names) + 1, 6, max(len(self.encoders), 1)))
        for slot, spec in enumerate(self.encoders):
            for name, row in modality_to_row.items():
                rates[row, :, slot] = [number for line in spec.costs_of(name) for number in line]
        encoders.believe(rates)
        rules = LinkRules()
        places = [[rules.place(each) for each in kind.members if each] for kind in (workers, encoders)]
        patterns.refresh(rules, places[0], places[1], encoders.capacity)
        links = np.array([self.links[link] for link in LINK_CLASSES])
        return ClusterColumns(workers, encoders, patterns, links, modality_to_row, self.context_scale_tokens)

    def hints(self, request: RouteQuery) -> QueryHints:
        hashes = {item.mm_hash for item in request.media}
        return QueryHints(
            np.array([spec.covered_blocks for spec in self.workers], np.int32),
            encoder_ready={
                each: [(slot, 0.0) for slot, spec in enumerate(self.encoders) if each in spec.cached] for each in hashes
            },
            worker_kept={
                each: [slot for slot, spec in enumerate(self.workers) if each in spec.kept] for each in hashes
            },
        )

    def search(self, request: RouteQuery, now: float = 0.0) -> RouteSearch:
        chance = Chance(self.tie_break, self.explore)
        return RouteSearch(request, self.columns(now), self.hints(request), now, self.settings, chance)


def _fill_worker(workers: WorkerColumns, slot: int, spec: WorkerSpec, now: float) -> None:
    workers.report_at_s[slot] = workers.state_at_s[slot] = now - spec.report_age_s
    workers.is_reported[slot] = 1.0
    workers.block_size[slot] = BLOCK_SIZE
    workers.queued_tokens[slot], workers.num_decoding[slot] = spec.queued_tokens, spec.num_decoding
    workers.pending_units[slot], workers.num_pending[slot] = spec.pending_tokens, spec.num_pending
    workers.open_units[slot], workers.num_open[slot] = spec.pending_tokens, spec.num_open
    workers.base_s[slot], workers.per_token_s[slot] = spec.prefill
    workers.reported_base_s[slot], workers.reported_decode_s[slot] = spec.prefill.base_s, spec.decode_s
    workers.max_step_tokens[slot] = spec.max_step_tokens or UNLIMITED
    workers.step_left_s[slot] = spec.step_left_s
    workers.list_awaited(slot, [(now + due_s, num) for due_s, num in spec.awaited])
    # A sequence stays for a second; so the rates follow from how many there are.
    workers.residence_s[slot] = 1.0
    if spec.place_wait_s:
        workers.max_sequences[slot] = 1
        workers.num_there[slot] = spec.place_wait_s - spec.num_pending
    if spec.kv_blocks_free is not None:
        workers.kv_blocks_used[slot], workers.pending_blocks[slot] = spec.kv_blocks_per_s, 1
        workers.kv_blocks_total[slot] = spec.kv_blocks_per_s + spec.kv_blocks_free + 1


def _fill_encoder(encoders: EncoderColumns, slot: int, spec: EncoderSpec, now: float) -> None:
    encoders.report_at_s[slot] = encoders.state_at_s[slot] = now
    encoders.is_reported[slot] = 1.0
    seconds = spec.costs.encode.at(spec.queued_cost) if spec.queued_cost else 0.0
    add_work(encoders.profiles[:, slot], seconds, -1.0)
    encoders.decode_queue_s[slot] = encoders.decode_short_s[slot] = spec.costs.decode.per_unit_s * spec.queued_cost
    encoders.num_decoders[slot] = spec.num_decoders


def snapshot(
    workers: Sequence[WorkerSpec], encoders: Sequence[EncoderSpec] = (), tolerance: float = 0.02, **changes: object
) -> Cluster:
    """Returns the cluster of these members, whose links all cost the same."""
    settings = TRUSTING._replace(tolerance=tolerance)
    cluster = Cluster(tuple(workers), tuple(encoders), dict.fromkeys(LinkClass, LINK), settings=settings)
    return replace(cluster, **changes)


def plan_route(request: RouteQuery, cluster: Cluster, now: float) -> RoutePlan:
    return cluster.search(request, now).plan()


def plan_encoding(
    request: RouteQuery, worker_id: str, item_indexes: Sequence[int], cluster: Cluster
) -> tuple[ItemTerms, ...]:
    return cluster.search(request).plan_encoding(MemberId(worker_id), frozenset(item_indexes))


def worker_member(name: str, host: str = "h-0", epoch: int = 1) -> Member:
    return Member(MemberId(name), "worker", f"address-{name}", host, epoch, kv_scheme=SCHEME)


def encoder_member(name: str, host: str = "h-0", modalities: tuple[str, ...] = ("image",)) -> Member:
    return Member(MemberId(name), "encoder", f"address-{name}", host, 1, modalities)


def worker_report(name: str, seq: int, **changes: object) -> WorkerReport:
    """Returns a report with these fields, which may be fields of its `engine` too; all others are 0."""
    of_engine = {field: changes.pop(field) for field in EngineStats.__struct_fields__ if field in changes}
    fields = {"worker_id": name, "epoch": 1, "seq": seq, "acknowledged": ()} | changes
    return WorkerReport(**fields, engine=EngineStats(**of_engine), features=FeatureStats())


def encoder_report(name: str, seq: int, **changes: object) -> EncoderReport:
    """Returns a report with these fields; all others are 0."""
    fields = {"encoder_id": name, "epoch": 1, "seq": seq, "acknowledged": ()} | changes
    return EncoderReport(**fields, items=ItemStats(), device=DeviceStats(), arena=ArenaStats())


# ------------------------------------------------------------ what a router knows


class WorkerSeen(NamedTuple):
    """Holds what the router knows of a worker with respect to one query, number by number."""

    worker_id: MemberId
    covered_blocks: int
    """Counts leading blocks of `BLOCK_SIZE` tokens."""
    queued_tokens: float
    num_decoding: float
    num_open: float
    kv_blocks_free: float | None
    prefill: Line
    pending_tokens: float
    num_pending: float
    report_age_s: float
    max_step_tokens: float


class EncoderSeen(NamedTuple):
    encoder_id: MemberId
    queued_s: float
    """Sums the reported forward passes and those that were dispatched since."""
    decode_queue_s: float
    cached: frozenset[MmHash]
    modality_to_costs: Mapping[str, EncoderCosts]


class StateSeen(NamedTuple):
    workers: list[WorkerSeen]
    encoders: list[EncoderSeen]
    links: dict[LinkClass, Line]


def views_of(state: ClusterState, request: RouteQuery, now: float) -> StateSeen:
    """Returns what the router knows of the members that the request may use."""
    columns, hints = state.columns(now), state.hints(request, now)
    workers, encoders = columns.workers, columns.encoders
    seen_workers = [
        _worker_seen(workers, slot, hints, now) for slot in np.flatnonzero(workers.usable(request.excluded, now))
    ]
    seen_encoders = [
        _encoder_seen(columns, slot, hints) for slot in np.flatnonzero(encoders.usable(request.excluded, now))
    ]
    links = {link: Line(*columns.links[number].tolist()) for number, link in enumerate(LINK_CLASSES)}
    return StateSeen(seen_workers, seen_encoders, links)


def _worker_seen(workers: WorkerColumns, slot: int, hints: QueryHints, now: float) -> WorkerSeen:
    member = workers.members[slot]
    assert member is not None
    total = workers.kv_blocks_total[slot]
    taken = workers.kv_blocks_used[slot] + workers.kv_blocks_coming[slot] + workers.pending_blocks[slot]
    return WorkerSeen(
        member.member_id,
        int(hints.depths[slot] * workers.block_size[slot] // BLOCK_SIZE),
        float(workers.queued_tokens[slot]),
        float(workers.num_decoding[slot]),
        float(workers.num_open[slot]),
        float(total - taken) if total else None,
        Line(float(workers.base_s[slot]), float(workers.per_token_s[slot])),
        float(workers.pending_units[slot]),
        float(workers.num_pending[slot]),
        now - float(workers.report_at_s[slot]),
        float(workers.max_step_tokens[slot]),
    )


def _encoder_seen(columns: ClusterColumns, slot: int, hints: QueryHints) -> EncoderSeen:
    encoders = columns.encoders
    member = encoders.members[slot]
    assert member is not None
    costs = {}
    for name in member.modalities:
        numbers = encoders.rates[columns.modality_to_row[name], :, slot].tolist()
        costs[name] = EncoderCosts(*(Line(*numbers[at : at + 2]) for at in (0, 2, 4)))
    queued = encoders.profiles[:NUM_BINS, slot] + encoders.pending_profiles[:NUM_BINS, slot]
    return EncoderSeen(
        member.member_id,
        float(queued.sum()),
        float(encoders.decode_queue_s[slot] + encoders.pending_decode_s[slot]),
        frozenset(mm_hash for mm_hash, ready in hints.encoder_ready.items() if slot in dict(ready)),
        costs,
    )

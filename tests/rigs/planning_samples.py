"""Builds small clusters and queries for the planner's tests."""

from __future__ import annotations

from collections.abc import Sequence

from fabric.contracts import (
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
)
from modalities.family import ModelShape
from router.planning import RouteQuery
from router.planning.link_classes import LinkClass
from router.planning.views import ClusterView, EncoderCosts, EncoderView, Line, WorkerView

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


def worker(name: str, **changes: object) -> WorkerView:
    view = WorkerView(MemberId(name), f"address-{name}", "h-0", 0, 0, 0, 0, None, PREFILL)
    return view._replace(**changes)


def encoder(name: str, **changes: object) -> EncoderView:
    costs = EncoderCosts(DECODE, NO_COST, ENCODE)
    view = EncoderView(MemberId(name), "h-0", frozenset({"image"}), 0, frozenset(), costs)
    return view._replace(**changes)


def snapshot(
    workers: Sequence[WorkerView], encoders: Sequence[EncoderView] = (), tie_break: float = 0.0, **changes: object
) -> ClusterView:
    links = dict.fromkeys(LinkClass, LINK)
    return ClusterView(BLOCK_SIZE, tuple(workers), tuple(encoders), links, tie_break=tie_break, **changes)


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

"""Lists the members of the cluster as JSON values for pages and programs, and makes the picture of the cluster at one
moment, which says what every member does.

The picture is made of the members' last reports and of what this router has open on them. The module knows nothing of
HTTP, of how reports arrive or of how the picture looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from fabric.contracts import EncoderReport, Member, MemberId, WorkerReport
from router.planning import MemberLink, MemberStanding

Shown = dict[str, object]
R = TypeVar("R", EncoderReport, WorkerReport)
MAX_LINKS = 1024
"""A picture leaves the links out if there are more of them."""


class PictureParts(NamedTuple):
    """Holds what a picture is made of."""

    members: Iterable[Member]
    """Holds the workers and encoders that plans may use, and those that are being stopped."""
    worker_to_report: Mapping[MemberId, WorkerReport]
    encoder_to_report: Mapping[MemberId, EncoderReport]
    standings: Mapping[MemberId, MemberStanding]
    """Has no entry for a member that is being stopped."""
    links: Iterable[MemberLink]


def picture_of(parts: PictureParts) -> Shown:
    """Returns the `encoders`, the `workers` and the `links` between them. A number that no report has said is null."""
    members = sorted(parts.members, key=lambda each: each.member_id)
    return {
        "encoders": [
            _head(each, parts) | numbers_of(parts.encoder_to_report.get(each.member_id), ENCODER_NUMBERS)
            for each in members
            if each.kind == "encoder"
        ],
        "workers": [
            _head(each, parts) | _pool_of(each) | numbers_of(parts.worker_to_report.get(each.member_id), WORKER_NUMBERS)
            for each in members
            if each.kind == "worker"
        ],
        "links": [
            {"encoder_id": each.encoder_id, "worker_id": each.worker_id, "link": each.link.value}
            for each in parts.links
        ],
    }


def listed_members(members: Iterable[Member]) -> list[Shown]:
    """Returns where each member runs, in the order of kinds and ids, and which stage it is, if it is one."""
    fields = ("member_id", "kind", "host", "pid", "epoch", "config_flaw")
    named = sorted(members, key=lambda member: (member.kind, member.member_id))
    return [
        {field: getattr(each, field) for field in fields}
        | ({} if each.stage is None else {"stage": each.stage.model_stage})
        | _pool_of(each)
        for each in named
    ]


def scrape_targets(members: Iterable[Member], node_port: int, cluster_name: str) -> list[Shown]:
    """Returns what Prometheus scrapes besides the routers' own servers, as its HTTP service discovery expects it: the
    endpoint of each node at `node_port`, or each worker and encoder if that is 0."""
    shown = sorted((each for each in members if each.http_address), key=lambda each: each.member_id)
    if node_port:
        hosts = sorted({each.http_address.rpartition(":")[0] for each in shown})
        return [{"targets": [f"{host}:{node_port}"], "labels": {"cluster": cluster_name}} for host in hosts]
    return [
        {"targets": [each.http_address], "labels": {"weft_kind": each.kind, "weft_member": each.member_id}}
        for each in shown
        if each.kind != "router"
    ]


def _head(member: Member, parts: PictureParts) -> Shown:
    """Returns what all kinds of members have."""
    standing = parts.standings.get(member.member_id)
    state = "leaving" if standing is None else "excluded" if standing.is_excluded else "there"
    return {
        "member_id": member.member_id,
        "host": member.host,
        "modalities": list(member.modalities),
        "state": state,
        "report_age_s": None if standing is None else standing.report_age_s,
        "num_open": 0 if standing is None else standing.num_open,
    }


def _pool_of(member: Member) -> Shown:
    """Returns to which pool a worker belongs and what it computes with; nothing for other members."""
    return {"pool": member.pool, "engine": member.engine} if member.kind == "worker" else {}


def numbers_of(report: R | None, name_to_number: Mapping[str, Callable[[R], float]]) -> Shown:
    """Returns the numbers of a report by their names, or null for each without a report."""
    return {name: None if report is None else number(report) for name, number in name_to_number.items()}


ENCODER_NUMBERS: Mapping[str, Callable[[EncoderReport], float]] = {
    "queue_s": lambda report: report.queued_s,
    "decode_queue_s": lambda report: report.decode_queue_s,
    "num_waiting": lambda report: report.num_items_queued,
    "num_active": lambda report: report.num_in_flight,
    "busy": lambda report: report.busy_fraction,
    "memory_used": lambda report: report.arena.used_bytes,
    "memory_cached": lambda report: report.arena.cached_bytes,
    "memory_size": lambda report: report.arena.total_bytes,
    "num_leases": lambda report: report.arena.num_leases,
    "num_done": lambda report: report.items.num_encoded,
    "num_hits": lambda report: report.items.num_cache_hits,
    "num_asked": lambda report: report.items.num_received,
}
"""Maps the numbers of an encoder to where its report has them. Memory is in bytes; `num_done` and what follows it count
items since the start."""
WORKER_NUMBERS: Mapping[str, Callable[[WorkerReport], float]] = {
    "queue_s": lambda report: report.engine.queued_weighted_tokens * report.prefill_s_per_token,
    "num_waiting": lambda report: report.engine.num_waiting,
    "num_active": lambda report: report.engine.num_running,
    "num_decoding": lambda report: report.engine.num_decoding,
    "num_held": lambda report: report.engine.num_at_doorstep,
    "memory_used": lambda report: report.engine.kv_blocks_used,
    "memory_size": lambda report: report.engine.kv_blocks_total,
    "inbox_bytes": lambda report: report.features.inbox_bytes_used,
    "num_done": lambda report: report.engine.tokens_generated,
    "num_hits": lambda report: report.engine.prefix_hit_tokens,
    "num_asked": lambda report: report.engine.prefix_query_tokens,
    "step_s": lambda report: report.engine.step_s,
}
"""Maps the numbers of a worker to where its report has them. Memory is in KV blocks; `num_done` and what follows it
count tokens since the start, and `step_s` seconds."""

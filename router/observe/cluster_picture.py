"""Lists the members of the cluster as JSON values for pages and programs, and makes the picture of the cluster at one
moment, which says what every member does.

The picture is made of the members' last reports and of what this router has open on them. The module knows nothing of
HTTP, of how reports arrive or of how the picture looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fabric.contracts import EncoderReport, Member, MemberId, WorkerReport
from router.planning import MemberLink, MemberStanding

Shown = dict[str, object]
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
            _head(each, parts) | encoder_numbers(parts.encoder_to_report.get(each.member_id))
            for each in members
            if each.kind == "encoder"
        ],
        "workers": [
            _head(each, parts) | worker_numbers(parts.worker_to_report.get(each.member_id))
            for each in members
            if each.kind == "worker"
        ],
        "links": [
            {"encoder_id": each.encoder_id, "worker_id": each.worker_id, "link": each.link.value}
            for each in parts.links
        ],
    }


def listed_members(members: Iterable[Member]) -> list[Shown]:
    """Returns where each member runs, in the order of kinds and ids."""
    fields = ("member_id", "kind", "host", "pid", "epoch", "config_flaw")
    named = sorted(members, key=lambda member: (member.kind, member.member_id))
    return [{field: getattr(each, field) for field in fields} for each in named]


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


def encoder_numbers(report: EncoderReport | None) -> Shown:
    """Returns the numbers of an encoder. Memory is in bytes; `num_done` and what follows it count since its start."""
    if report is None:
        return dict.fromkeys(ENCODER_NUMBERS)
    values = (
        report.queued_s,
        report.decode_queue_s,
        report.num_items_queued,
        report.num_in_flight,
        report.busy_fraction,
        report.arena.used_bytes,
        report.arena.cached_bytes,
        report.arena.total_bytes,
        report.arena.num_leases,
        report.items.num_encoded,
        report.items.num_cache_hits,
        report.items.num_received,
    )
    return dict(zip(ENCODER_NUMBERS, values, strict=True))


ENCODER_NUMBERS = (
    "queue_s",
    "decode_queue_s",
    "num_waiting",
    "num_active",
    "busy",
    "memory_used",
    "memory_cached",
    "memory_size",
    "num_leases",
    "num_done",
    "num_hits",
    "num_asked",
)


def worker_numbers(report: WorkerReport | None) -> Shown:
    """Returns the numbers of a worker. Memory is in KV blocks; `num_done` and what follows it count since its start, in
    tokens."""
    if report is None:
        return dict.fromkeys(WORKER_NUMBERS)
    engine = report.engine
    values = (
        engine.queued_weighted_tokens * report.prefill_s_per_token,
        engine.num_waiting,
        engine.num_running,
        engine.num_decoding,
        engine.num_at_doorstep,
        engine.kv_blocks_used,
        engine.kv_blocks_total,
        report.features.inbox_bytes_used,
        engine.tokens_generated,
        engine.prefix_hit_tokens,
        engine.prefix_query_tokens,
        engine.step_s,
    )
    return dict(zip(WORKER_NUMBERS, values, strict=True))


WORKER_NUMBERS = (
    "queue_s",
    "num_waiting",
    "num_active",
    "num_decoding",
    "num_held",
    "memory_used",
    "memory_size",
    "inbox_bytes",
    "num_done",
    "num_hits",
    "num_asked",
    "step_s",
)

"""Says for people what a router knows of each member besides its report: how old that is, what the router has open on
the member, whether plans leave it out, and over which links features travel.

The module reads the planner's columns and changes nothing. It knows nothing of how a plan is made.
"""

from __future__ import annotations

from typing import NamedTuple

from fabric.contracts import MemberId
from router.planning.link_classes import LINK_CLASSES, LinkClass
from router.planning.member_columns import ClusterColumns, EncoderColumns, WorkerColumns


class MemberStanding(NamedTuple):
    """A `MemberStanding` is how a router sees one member."""

    report_age_s: float | None
    """Is the time since its last report came, or None if none has come."""
    num_open: int
    """Counts this router's attempts that have not ended on the member."""
    is_excluded: bool
    """Says that plans leave the member out for a while, because it has failed."""


class MemberLink(NamedTuple):
    """A `MemberLink` is the way on which one worker reads features of one encoder."""

    encoder_id: MemberId
    worker_id: MemberId
    link: LinkClass


def member_standings(columns: ClusterColumns, now: float) -> dict[MemberId, MemberStanding]:
    """Returns how the router sees each worker and each encoder at `now`, on the router's clock."""
    return _standings(columns.workers, now) | _standings(columns.encoders, now)


def member_links(columns: ClusterColumns, max_links: int) -> list[MemberLink]:
    """Returns the links from all encoders to all workers, or none if there are more than `max_links`."""
    workers, encoders, patterns = columns.workers, columns.encoders, columns.patterns
    if len(workers.member_to_slot) * len(encoders.member_to_slot) > max_links:
        return []
    return [
        MemberLink(encoder_id, worker_id, LINK_CLASSES[patterns.classes[patterns.pattern_of_worker[worker], encoder]])
        for encoder_id, encoder in sorted(encoders.member_to_slot.items())
        for worker_id, worker in sorted(workers.member_to_slot.items())
    ]


def _standings(columns: WorkerColumns | EncoderColumns, now: float) -> dict[MemberId, MemberStanding]:
    return {
        member_id: MemberStanding(
            now - float(columns.report_at_s[slot]) if columns.is_reported[slot] else None,
            int(columns.num_open[slot]),
            bool(columns.barred_until_s[slot] > now),
        )
        for member_id, slot in columns.member_to_slot.items()
    }

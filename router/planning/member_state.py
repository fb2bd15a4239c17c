"""What the router knows of one worker or one encoder: its last report and its learned costs. Mutable, one per member.

A member without a report counts as idle. One whose reports stopped is balanced by this router's own open attempts,
without affinity: its queue, its cache and its memory are not what they were.
"""

from __future__ import annotations

from fabric.ids import MmHash
from fabric.messages import EncoderReport, Member, WorkerReport
from router.planning.cost import LinearCost
from router.planning.encoder_cost import EncoderCost
from router.planning.in_flight import Load
from router.planning.views import EncoderView, Line, WorkerView


class Freshness:
    """Order and age of one member's reports."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None
        self._at_s = 0.0

    def accept(self, epoch: int, seq: int, now: float) -> bool:
        """False for a report that is not newer than the last."""
        if self._last is not None and (epoch, seq) <= self._last:
            return False
        self._last, self._at_s = (epoch, seq), now
        return True

    def is_stale(self, now: float, stale_after_s: float) -> bool:
        """Reports came, and stopped."""
        return self._last is not None and now - self._at_s > stale_after_s


class WorkerState:
    def __init__(self, member: Member, prefill: Line) -> None:
        self.member = member
        self.freshness = Freshness()
        self.report: WorkerReport | None = None
        self.prefill = LinearCost(prefill)

    def take(self, report: WorkerReport) -> None:
        self.report = report
        self.prefill.anchor(Line(report.step_overhead_s, report.prefill_s_per_token))

    def view(self, covered_blocks: int, load: Load, is_stale: bool) -> WorkerView:
        """`load` is what this router has on it."""
        member, report = self.member, self.report
        if report is None or is_stale:
            return WorkerView(
                member.member_id,
                member.address,
                member.host,
                covered_blocks=0 if is_stale else covered_blocks,
                queued_tokens=load.open_units,
                num_decoding=load.num_open,
                num_open=load.num_open,
                kv_blocks_free=None,
                prefill=self.prefill.line,
            )
        is_sized = report.kv_blocks_total > 0
        num_free = max(0, report.kv_blocks_total - report.kv_blocks_used - load.pending_blocks)
        return WorkerView(
            member.member_id,
            member.address,
            member.host,
            covered_blocks,
            queued_tokens=report.queued_tokens + load.pending_units,
            num_decoding=report.num_decoding + load.num_pending,
            num_open=load.num_open,
            kv_blocks_free=num_free if is_sized else None,
            prefill=self.prefill.line,
        )


class EncoderState:
    def __init__(self, member: Member, cost: EncoderCost) -> None:
        self.member = member
        self.freshness = Freshness()
        self.report: EncoderReport | None = None
        self.cost = cost
        self.modalities = frozenset(member.modalities)

    def take(self, report: EncoderReport) -> None:
        self.report = report
        self.cost.anchor(report)

    def view(self, cached: frozenset[MmHash], load: Load, is_stale: bool) -> EncoderView:
        if self.report is None or is_stale:
            queued_cost = load.open_units
        else:
            queued_cost = self.report.queued_cost + load.pending_units
        return EncoderView(
            self.member.member_id,
            self.member.host,
            self.modalities,
            queued_cost,
            frozenset() if is_stale else cached,
            self.cost.general,
            self.cost.by_modality(),
        )

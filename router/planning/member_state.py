"""Keeps what the router knows of each worker and each encoder, and how much work it has on them. A `WorkerState` or an
`EncoderState` holds one member's last report and its learned costs; both are mutable, and turn into the planner's
frozen view of the member. `InFlight` counts the work that this router dispatched.

The two stand together because a view needs both: a report does not contain what was dispatched since. Without that
work, all requests of a burst between two reports would go to the one member that was idle in its last report.

A member without a report counts as idle. A member whose reports stopped is balanced by this router's own open attempts
on it, and what it may have cached is ignored, because its queue, its cache and its memory have changed since. The
module knows nothing of the choice between members, or of how costs are learned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fabric.contracts import AttemptId, EncoderReport, Member, MemberId, MmHash, WorkerReport
from router.planning.member_costs import (
    GENERAL,
    CommonCosts,
    CommonStages,
    CostEstimator,
    EncoderCost,
    Estimate,
    StageEstimates,
    believed,
)
from router.planning.views import EncoderCosts, EncoderView, Line, ReportedQueue, WorkerView

# ------------------------------------------------------------ one member


class WorkerState:
    def __init__(self, member: Member, prefill: CostEstimator, delivery: CostEstimator) -> None:
        self.member = member
        self.freshness = Freshness()
        self.report: WorkerReport | None = None
        self.prefill = prefill
        self.delivery = delivery
        """Costs the request's way to the worker together with the first token's way to the router."""

    def take(self, report: WorkerReport, now: float) -> None:
        self.report = report
        self.prefill.anchor(Line(report.step_overhead_s, report.prefill_s_per_token), now)

    def view(
        self, covered_blocks: int, load: MemberLoad, is_stale: bool, common: Line | None, now: float
    ) -> WorkerView:
        """Returns the planner's view of the worker. `load` is what this router has on it, and `common` is what workers
        cost in general."""
        member, report = self.member, self.report
        prefill = believed(self.prefill.estimate(now), common)
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
                prefill=prefill,
            )
        engine = report.engine
        is_sized = engine.kv_blocks_total > 0
        num_free = max(0, engine.kv_blocks_total - engine.kv_blocks_used - load.pending_blocks)
        return WorkerView(
            member.member_id,
            member.address,
            member.host,
            covered_blocks,
            queued_tokens=engine.queued_weighted_tokens or float(engine.queued_tokens),
            num_decoding=engine.num_decoding,
            num_open=load.num_open,
            kv_blocks_free=num_free if is_sized else None,
            prefill=prefill,
            decode_s=self._decode_s(report, prefill),
            pending_tokens=load.pending_units,
            num_pending=load.num_pending,
            report_age_s=self.freshness.age_s(now),
            max_step_tokens=report.max_step_tokens,
            place_wait_s=_place_wait_s(report, load),
            kv_blocks_per_s=engine.kv_blocks_used / report.residence_s if report.residence_s else 0.0,
        )

    def _decode_s(self, report: WorkerReport, believed_line: Line) -> float:
        """Returns the decode time per sequence. The worker measured it together with the step's overhead, so the
        believed overhead scales it."""
        own_s = self.prefill.line.base_s
        return report.decode_s_per_sequence * (believed_line.base_s / own_s if own_s else 1.0)


def _place_wait_s(report: WorkerReport, load: MemberLoad) -> float:
    """Returns the seconds until a new sequence gets a place. When all places of a step are taken, they become free in
    order, at the pace at which sequences end."""
    num_there = report.engine.num_running + report.engine.num_waiting + load.num_pending
    num_over = num_there + 1 - report.max_sequences
    if not report.max_sequences or num_over <= 0:
        return 0.0
    return report.residence_s * num_over / report.max_sequences


class EncoderState:
    def __init__(self, member: Member, cost: EncoderCost) -> None:
        self.member = member
        self.freshness = Freshness()
        self.report: EncoderReport | None = None
        self.cost = cost
        self.modalities = frozenset(member.modalities)

    def take(self, report: EncoderReport, now: float) -> None:
        self.report = report
        self.cost.anchor(report, now)

    def view(
        self, cached: frozenset[MmHash], load: MemberLoad, is_stale: bool, common: CommonCosts, now: float
    ) -> EncoderView:
        """Returns the planner's view of the encoder. `load` is what this router has on it, and `common` is what
        encoders cost in general."""
        queue: ReportedQueue | None = None
        if self.report is None or is_stale:
            queued_cost = load.open_units
        else:
            queued_cost = self.report.queued_cost + load.pending_units
            if any(self.report.queue_profile) or self.report.forward_left_s:
                queue = ReportedQueue(self.report, self.freshness.age_s(now), load.pending_units)
        costs = self._costs(common, now)
        return EncoderView(
            self.member.member_id,
            self.member.host,
            self.modalities,
            queued_cost,
            frozenset() if is_stale else cached,
            costs.pop(GENERAL),
            costs,
            queue,
        )

    def _costs(self, common: CommonCosts, now: float) -> dict[str, EncoderCosts]:
        """Returns the costs by modality, and under `GENERAL`: the encoder's own costs as far as they are trusted. A
        modality that it has not met costs what it costs on other encoders."""
        estimates = self.cost.estimates(now)
        unmet = (name for name in common if name not in estimates and name in self.modalities)
        estimates |= {name: _unknown(self.cost.of(GENERAL)) for name in unmet}
        return {name: each.believed(common.get(name, CommonStages())) for name, each in estimates.items()}


def _unknown(costs: EncoderCosts) -> StageEstimates:
    return StageEstimates(*(Estimate(line, 0.0) for line in costs))


class Freshness:
    """Keeps the order and the age of one member's reports."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None
        self._at_s = 0.0

    def accept(self, epoch: int, seq: int, now: float) -> bool:
        """Records a report. Returns False for a report that is not newer than the last one."""
        if self._last is not None and (epoch, seq) <= self._last:
            return False
        self._last, self._at_s = (epoch, seq), now
        return True

    def is_stale(self, now: float, stale_after_s: float) -> bool:
        """Returns whether reports came and then stopped."""
        return self._last is not None and now - self._at_s > stale_after_s

    def age_s(self, now: float) -> float:
        """Returns the seconds since the last accepted report."""
        return max(0.0, now - self._at_s)


# ------------------------------------------------------------ the work in flight


class InFlight:
    """Counts the work that this router dispatched, by attempt and member, with the sums by member.

    Each dispatched attempt puts load on a member (tokens on a worker, patches on an encoder). The load is *pending*
    until a report acknowledges it, and *open* until the attempt ends on that member. When reports stop, only the open
    load is left to balance by. To end or acknowledge a share twice does nothing the second time."""

    def __init__(self) -> None:
        self._attempt_to_shares: dict[AttemptId, dict[MemberId, _Share]] = {}
        self._member_to_load: dict[MemberId, MemberLoad] = {}

    def load(self, member_id: MemberId) -> MemberLoad:
        """Returns the member's load. The object is not a copy, because a copy would cost more than it protects; callers
        read it and do not keep it."""
        return self._member_to_load.get(member_id) or MemberLoad()

    def add(self, attempt_id: AttemptId, member_id: MemberId, units: int, num_blocks: int = 0) -> None:
        """Adds load to an attempt's share on a member. If more of an attempt goes to the same member, its share grows,
        and the new part is pending."""
        share = self._attempt_to_shares.setdefault(attempt_id, {}).get(member_id)
        load = self._member_to_load.setdefault(member_id, MemberLoad())
        if share is None:
            share = self._attempt_to_shares[attempt_id][member_id] = _Share()
            load.num_open += 1
        load.num_pending += not share.is_pending
        share.is_pending = True
        share.units += units
        share.pending_units += units
        share.pending_blocks += num_blocks
        load.open_units += units
        load.pending_units += units
        load.pending_blocks += num_blocks

    def acknowledge(self, member_id: MemberId, attempt_ids: Iterable[AttemptId]) -> None:
        """Records that the member's report contains these attempts."""
        for attempt_id in attempt_ids:
            share = self._attempt_to_shares.get(attempt_id, {}).get(member_id)
            if share is not None:
                self._settle(member_id, share)

    def end(self, attempt_id: AttemptId) -> None:
        """Ends the attempt on all members."""
        for member_id, share in self._attempt_to_shares.pop(attempt_id, {}).items():
            self._drop(member_id, share)

    def end_at(self, attempt_id: AttemptId, member_id: MemberId) -> None:
        """Ends the attempt on one member, as when an encoder has delivered."""
        shares = self._attempt_to_shares.get(attempt_id, {})
        self._drop(member_id, shares.pop(member_id, None))
        if not shares:
            self._attempt_to_shares.pop(attempt_id, None)

    def forget_member(self, member_id: MemberId) -> None:
        """Drops all load of a member that has left."""
        if self._member_to_load.pop(member_id, None) is None:
            return
        for attempt_id in [attempt for attempt, shares in self._attempt_to_shares.items() if member_id in shares]:
            del self._attempt_to_shares[attempt_id][member_id]
            if not self._attempt_to_shares[attempt_id]:
                del self._attempt_to_shares[attempt_id]

    def check_invariants(self) -> None:
        """Raises AssertionError unless the sums equal the shares."""
        sums: dict[MemberId, MemberLoad] = {member_id: MemberLoad() for member_id in self._member_to_load}
        for shares in self._attempt_to_shares.values():
            assert shares, "an attempt without shares is dropped"
            for member_id, share in shares.items():
                load = sums[member_id]
                load.num_open += 1
                load.open_units += share.units
                load.num_pending += share.is_pending
                load.pending_units += share.pending_units
                load.pending_blocks += share.pending_blocks
        assert sums == self._member_to_load, (sums, self._member_to_load)

    def _settle(self, member_id: MemberId, share: _Share) -> None:
        if not share.is_pending:
            return
        load = self._member_to_load[member_id]
        load.num_pending -= 1
        load.pending_units -= share.pending_units
        load.pending_blocks -= share.pending_blocks
        share.pending_units = share.pending_blocks = 0
        share.is_pending = False

    def _drop(self, member_id: MemberId, share: _Share | None) -> None:
        if share is None:
            return
        self._settle(member_id, share)
        load = self._member_to_load[member_id]
        load.num_open -= 1
        load.open_units -= share.units


@dataclass(slots=True)
class MemberLoad:
    """Holds sums over one member's attempts; the units are tokens or patches."""

    num_open: int = 0
    open_units: int = 0
    num_pending: int = 0
    pending_units: int = 0
    pending_blocks: int = 0


@dataclass(slots=True)
class _Share:
    """A `_Share` is the load of one attempt on one member."""

    units: int = 0
    pending_units: int = 0
    pending_blocks: int = 0
    is_pending: bool = False

"""Chooses the replicas of the stages behind the thinker for one request, and keeps what that choice needs to know.

The stages of a request are planned together: the chosen chain of replicas, one for each stage, has the least sum of
waits and transfer times, counted from the worker on. Text is never delayed for speech, so the worker comes from the
plan of the first token (`ClusterState.plan`), and the chain starts there. `plan_stages` is pure; `StageState` keeps the
members, their latest reports, and what this router has open on them, which reports do not count yet.

The module knows nothing of what a stage computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fabric.contracts import AttemptId, Member, MemberId, MemberStage, NoCapacity, StageReport
from router.planning.link_classes import LinkClass, LinkPlace, LinkRules
from router.planning.member_costs import CostDefaults

CHUNK_BYTES = 16 * 1024
"""Is the size for which transfers between stages are compared: more than a chunk of codes, less than one of hidden
rows. At this size the latency of a link decides."""
DEFAULT_STEP_S = 0.02
"""Stands for the time of a step at a replica that has not reported any."""


class StageCandidate(NamedTuple):
    """A `StageCandidate` is a replica that can run one stage of the request."""

    member: Member
    place: LinkPlace
    wait_s: float
    """Predicts the time that the request loses at the replica to the requests that it has already."""


class StageHop(NamedTuple):
    """A `StageHop` is the chosen replica of one stage, with the terms of its score."""

    member_id: MemberId
    stage: MemberStage
    connector: str
    wait_s: float
    transfer_s: float
    """Predicts the time of one chunk from the stage before."""


class StagePlan(NamedTuple):
    """A `StagePlan` names one replica for each stage behind the thinker, in the order of the stages."""

    hops: tuple[StageHop, ...]

    @property
    def cost_s(self) -> float:
        return sum(hop.wait_s + hop.transfer_s for hop in self.hops)


class StageLinkCosts(NamedTuple):
    """Holds what a link between two stages costs."""

    rules: LinkRules
    defaults: CostDefaults

    def transfer_s(self, source: LinkPlace, target: LinkPlace) -> float:
        return self.defaults.link(self.rules.link_class(source, target)).at(CHUNK_BYTES)

    def connector(self, source: LinkPlace, target: LinkPlace, offered: Sequence[str]) -> str:
        """Returns the connector for a link: shared memory on one machine, NIXL between machines, or the only one that
        the target has. It is empty if no connector of the target reaches it."""
        is_near = self.rules.link_class(source, target) in NEAR or source.machine == target.machine
        wanted = ("local", "shared_memory", "nixl") if is_near else ("nixl",)
        return next((name for name in wanted if name in offered), "")


NEAR = (LinkClass.SAME_PROCESS, LinkClass.SAME_HOST)


def plan_stages(
    start: LinkPlace, stage_to_candidates: Mapping[int, Sequence[StageCandidate]], costs: StageLinkCosts
) -> StagePlan:
    """Returns the chain with the least cost. It looks at each pair of neighbouring candidates once. Raises NoCapacity,
    naming the stage, if a stage has no candidate that can be reached."""
    best: list[tuple[float, tuple[StageHop, ...], LinkPlace]] = [(0.0, (), start)]
    for stage_id in sorted(stage_to_candidates):
        reached: list[tuple[float, tuple[StageHop, ...], LinkPlace]] = []
        for each in stage_to_candidates[stage_id]:
            ways = [way for cost_s, hops, place in best if (way := _way(cost_s, hops, place, each, costs)) is not None]
            if ways:
                cost_s, hops = min(ways, key=lambda way: way[0])
                reached.append((cost_s, hops, each.place))
        if not reached:
            raise NoCapacity(f"no replica of stage {stage_id}, which speech needs, can be reached")
        best = reached
    return StagePlan(min(best, key=lambda way: way[0])[1])


def _way(
    cost_s: float, hops: tuple[StageHop, ...], place: LinkPlace, target: StageCandidate, costs: StageLinkCosts
) -> tuple[float, tuple[StageHop, ...]] | None:
    """Returns the cost and the hops of a chain that is extended by one replica, or None if no connector leads there."""
    stage = target.member.stage
    assert stage is not None
    connector = costs.connector(place, target.place, [name for name, _ in stage.connector_to_inbox])
    if not connector:
        return None
    transfer_s = costs.transfer_s(place, target.place)
    hop = StageHop(target.member.member_id, stage, connector, target.wait_s, transfer_s)
    return cost_s + target.wait_s + transfer_s, (*hops, hop)


class StageState:
    """A `StageState` is the router's view of the stages behind the thinker."""

    def __init__(self, costs: StageLinkCosts | None = None, num_stages: int = 0) -> None:
        """`num_stages` counts the stages behind the thinker that a request needs; it is 0 in a cluster that does not
        speak."""
        self.num_stages = num_stages
        self._costs = costs or StageLinkCosts(LinkRules(), CostDefaults())
        self._members: dict[MemberId, Member] = {}
        self._reports: dict[MemberId, StageReport] = {}
        self._barred_until_s: dict[MemberId, float] = {}
        self._open: dict[MemberId, set[AttemptId]] = {}

    @property
    def members(self) -> Sequence[Member]:
        return tuple(self._members.values())

    def update_members(self, members: Sequence[Member]) -> None:
        """Takes the stages that plans may use."""
        old = self._members
        self._members = {each.member_id: each for each in members if each.stage is not None}
        for member_id, member in old.items():
            new = self._members.get(member_id)
            if new is None or new.epoch != member.epoch:
                self._reports.pop(member_id, None)
                self._barred_until_s.pop(member_id, None)

    def take_report(self, report: StageReport) -> None:
        """Takes a report. An older one than the latest is ignored."""
        latest = self._reports.get(report.member_id)
        if latest is None or (report.epoch, report.seq) > (latest.epoch, latest.seq):
            self._reports[report.member_id] = report

    def exclude(self, member_id: MemberId, until_s: float) -> None:
        self._barred_until_s[member_id] = max(until_s, self._barred_until_s.get(member_id, until_s))

    def note_opened(self, member_id: MemberId, attempt: AttemptId) -> None:
        self._open.setdefault(member_id, set()).add(attempt)

    def note_ended(self, member_id: MemberId, attempt: AttemptId) -> None:
        """Forgets an open call; a second time changes nothing."""
        attempts = self._open.get(member_id, set())
        attempts.discard(attempt)
        if not attempts:
            self._open.pop(member_id, None)

    @property
    def num_open(self) -> int:
        return sum(map(len, self._open.values()))

    @property
    def missing_stages(self) -> list[int]:
        """Returns the stages without a replica, in ascending order."""
        there = {each.stage.stage_id for each in self._members.values() if each.stage is not None}
        return [stage_id for stage_id in range(1, self.num_stages + 1) if stage_id not in there]

    def next_change_s(self, now: float) -> float:
        """Returns the time until the next exclusion ends, or a long time if there is none."""
        return min((until - now for until in self._barred_until_s.values() if until > now), default=60.0)

    def plan(self, worker: Member, excluded: frozenset[MemberId], now: float) -> StagePlan:
        """Returns the chain of replicas for a request whose thinker is `worker`. Raises NoCapacity."""
        stage_to_candidates: dict[int, list[StageCandidate]] = {each: [] for each in range(1, self.num_stages + 1)}
        for member in self._members.values():
            assert member.stage is not None
            is_barred = self._barred_until_s.get(member.member_id, 0.0) > now or member.member_id in excluded
            if not is_barred and member.stage.stage_id in stage_to_candidates:
                candidate = StageCandidate(member, self._costs.rules.place(member), self._wait_s(member))
                stage_to_candidates[member.stage.stage_id].append(candidate)
        return plan_stages(self._costs.rules.place(worker), stage_to_candidates, self._costs)

    def _wait_s(self, member: Member) -> float:
        """Predicts what the replica's other requests cost a new one. Requests in one batch share its steps, each adding
        a part; requests beyond the batch wait for whole rounds of it."""
        assert member.stage is not None
        report = self._reports.get(member.member_id)
        num_reported, step_s = 0, DEFAULT_STEP_S
        if report is not None:
            num_reported = report.num_waiting + report.num_running + report.num_waiting_for_chunk
            step_s = report.step_s or DEFAULT_STEP_S
        num_others = max(num_reported, len(self._open.get(member.member_id, ())))
        size = max(1, member.stage.max_num_seqs)
        num_rounds = num_others // size
        return step_s * (num_others / size + 10.0 * num_rounds)

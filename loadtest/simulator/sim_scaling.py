"""Scales the pools of a simulated cluster with the production code of `deploy.scaling`, on virtual time.

A `PoolAutoscaler` stands for Ray Serve and its policy: it takes the loads of a pool's members twice per interval, asks
a `PoolScaler` once per interval, and has the cluster start members or stop the newest ones. A member that starts takes
its time before it joins. A member that stops gets nothing new and finishes what it has (`SimCluster.stop_member`).

The module knows nothing of where requests come from.
"""

from __future__ import annotations

from dataclasses import dataclass

from deploy.scaling import (
    EncoderMeter,
    PoolScaler,
    ReplicaLoad,
    ScalingDecision,
    ScalingRules,
    WorkerMeter,
    waiting_load,
)
from fabric.contracts import MemberId
from loadtest.simulator.sim_cluster import SimCluster
from loadtest.simulator.sim_encoder import SimEncoder
from loadtest.simulator.sim_worker import SimWorker

SLO_TPOT_S = 0.1


@dataclass(frozen=True, slots=True)
class SizeChange:
    """A `SizeChange` is a decision that changed the size of a pool."""

    at_s: float
    kind: str
    num_before: int
    num_after: int
    told: str


class PoolAutoscaler:
    """A `PoolAutoscaler` scales the encoders or the workers of one cluster from its construction on."""

    def __init__(
        self, cluster: SimCluster, kind: str, rules: ScalingRules, startup_s: float, *, sees_routers: bool = True
    ) -> None:
        """Scales the members of `kind`, each of which takes `startup_s` to start. Without `sees_routers`, the decisions
        know nothing of what waits at the routers."""
        self._sees_routers = sees_routers
        self.kind, self.rules = kind, rules
        self.changes: list[SizeChange] = []
        self.sizes: list[tuple[float, int]] = []
        """Holds the number of running members at each decision."""
        self.last: ScalingDecision | None = None
        self._cluster, self._startup_s = cluster, startup_s
        self._scaler = PoolScaler(rules)
        self._encoder_meters: dict[MemberId, EncoderMeter] = {}
        self._worker_meters: dict[MemberId, WorkerMeter] = {}
        self._loads: dict[MemberId, tuple[float, ReplicaLoad]] = {}
        self._target = len(self._running())
        self._num_starting = 0
        cluster.loop.after(0.0, self._look)
        cluster.loop.after(rules.interval_s, self._decide)

    def _running(self) -> list[SimEncoder | SimWorker]:
        return self._cluster.running(self.kind)

    def _look(self) -> None:
        """Takes the loads of the members that run."""
        now_s = self._cluster.loop.now()
        for member in self._running():
            self._loads[member.member.member_id] = now_s, self._load(member)
        self._cluster.loop.after(self.rules.interval_s / 2, self._look)

    def _load(self, member: SimEncoder | SimWorker) -> ReplicaLoad:
        member_id = member.member.member_id
        if isinstance(member, SimEncoder):
            encoder_meter = self._encoder_meters.setdefault(member_id, EncoderMeter(self.rules.queue_limit_s))
            return encoder_meter.load(member.report())
        return self._worker_meters.setdefault(member_id, WorkerMeter(SLO_TPOT_S)).load(member.report())

    def _decide(self) -> None:
        now_s = self._cluster.loop.now()
        names = [member.member.member_id for member in self._running()]
        heard = self._scaler.hear(now_s, names, {name: self._loads[name][0] for name in names if name in self._loads})
        loads = {str(name): self._loads[name][1] if name in heard else None for name in names}
        routers = self._cluster.routers if self._sees_routers else ()
        works = [work for router in routers for work in router.waiting_work()]
        decision = self.last = self._scaler.decide(now_s, self._target, loads, waiting_load(self.kind, works))
        self.sizes.append((now_s, len(names)))
        if decision.num_replicas != self._target:
            self.changes.append(SizeChange(now_s, self.kind, self._target, decision.num_replicas, decision.told()))
        self._follow(decision.num_replicas)
        self._cluster.loop.after(self.rules.interval_s, self._decide)

    def _follow(self, num_replicas: int) -> None:
        """Starts members, or stops those that have not joined yet and then the newest ones, as Serve does."""
        for _ in range(num_replicas - self._target):
            self._num_starting += 1
            self._cluster.loop.after(self._startup_s, self._started)
        self._target = num_replicas
        running = self._running()
        self._num_starting = max(min(self._num_starting, num_replicas - len(running)), 0)
        for member in running[num_replicas:]:
            self._cluster.stop_member(member.member.member_id)

    def _started(self) -> None:
        if self._num_starting:  # It may have been stopped before it joined.
            self._num_starting -= 1
            self._cluster.join_member(self.kind)

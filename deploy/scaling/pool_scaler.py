"""Decides how many replicas one pool should have. The decision is a feedback control over predicted seconds of work.

A `PoolScaler` is asked once per interval. It asks for as many replicas as the largest of three needs:

    work    the replicas that keep up with the arriving work at `target_utilization`
    queue   the replicas that keep up and also work off the queue that will be there when a new replica can help
    memory  the replicas whose KV blocks hold what is in use now, with some to spare; more if all are full

Requests that wait at the routers, because no worker has room or others are ahead of them, are in all three: their work
has arrived, they queue, and they will use KV blocks.

It goes up at once, so that a burst is answered within two intervals: the rate of work is an average over two. Replicas
that are starting belong to the target, and what they will do until a new one could help is taken off the queue, so a
shortage is never answered twice. It goes down only when a smaller pool would have been enough at every decision of
`downscale_delay_s`, and then by at most a quarter of the pool. The smaller pool must do with a lower utilisation than
the one at which the pool grows, so a constant load never makes it swing. While a replica is silent, the pool does not
shrink, because silence says nothing of the load.

The module has no clock. It knows nothing of what the replicas are, of how they start and end, or of Ray.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from deploy.scaling.replica_load import ReplicaLoad

Reason = Literal["work", "queue", "memory", "less work", "bounds", "silence", "waiting to shrink", "steady"]
SPARE = 0.8
"""A smaller pool is enough if it needs at most this share of the utilisation, of the memory and of the queue at which
the pool would grow again."""
TOLERANCE = 0.05
"""A need that exceeds a number of replicas by no more than this does not call for another replica."""
SHRINK_SHARE = 4
"""One decision removes at most one replica in this many, and at least one."""
STALE_INTERVALS = 3.0
"""A replica whose load has not changed for this many intervals is silent."""
RATE_INTERVALS = 2
"""The rate of work is an average over this many intervals."""
SUSTAINED = 2
"""The queue must exceed its limit at this many decisions in a row before it calls for another replica."""
FULL_MEMORY = 0.95
"""A pool is full from this share of its memory on."""
GROWTH_OF_FULL = 1.5
AT_ROUTERS = ""
"""No replica has this name, under which the work that waits at the routers is counted."""
FULL_UTILIZATION = 0.95
"""The prediction of a queue goes no further than this utilisation, where the queue would be without limit."""


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """Says how one pool is scaled. Raises ValueError for bounds without a meaning."""

    min_replicas: int = 1
    max_replicas: int = 1
    slo_ttft_s: float = 2.0
    """Holds the time to first token that requests should meet."""
    target_queue_s: float | None = None
    """Holds how long work may wait in this pool; None means a quarter of `slo_ttft_s`."""
    target_utilization: float = 0.7
    """The pool grows when its replicas would be busy for more than this share of the time."""
    target_memory_use: float = 0.85
    """The pool grows when more than this share of its KV blocks is in use."""
    interval_s: float = 5.0
    """Holds the time between two decisions."""
    downscale_delay_s: float = 120.0
    """The pool shrinks when fewer replicas would have been enough for this long."""
    startup_s: float = 30.0
    """Holds the first estimate of the time from a decision until a new replica takes work; starts correct it."""

    def __post_init__(self) -> None:
        if not 0 < self.min_replicas <= self.max_replicas:
            raise ValueError(
                f"min_replicas is {self.min_replicas} and max_replicas is {self.max_replicas}; the first must be at "
                "least 1, and the second at least as large as the first"
            )

    @property
    def queue_limit_s(self) -> float:
        """Returns how long work may wait in this pool."""
        return self.slo_ttft_s / 4 if self.target_queue_s is None else self.target_queue_s


class ScalingTerms(NamedTuple):
    """A `ScalingTerms` holds what a decision was made from. All of it is exported and logged."""

    num_running: int
    num_silent: int
    num_starting: int
    queue_s: float
    """Sums the queues of all replicas and what waits at the routers."""
    work_rate: float
    """Holds the work that arrives, in seconds of a replica per second."""
    memory_use: float
    """Sums the shares of memory in use."""
    startup_s: float
    """Holds the present estimate of the time that a replica takes to start."""
    for_work: float
    for_queue: float
    for_memory: float
    """The pool needs so many replicas for its memory; the two fields above hold the same for work and queue."""
    fewest: int
    """Holds the smallest pool that would be enough now, with something to spare."""
    waiting_s: float = 0.0
    """Holds the work that waits at the routers, which has arrived; `waiting_memory` holds the replicas whose KV blocks
    it will fill."""
    waiting_memory: float = 0.0


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """A `ScalingDecision` says how many replicas the pool should have, and why."""

    at_s: float
    num_before: int
    num_replicas: int
    reason: Reason
    terms: ScalingTerms

    def told(self) -> str:
        """Returns the decision in words, for a log."""
        terms = self.terms
        change = f"stay at {self.num_replicas}"
        if self.num_replicas != self.num_before:
            change = f"go from {self.num_before} to {self.num_replicas}"
        return (
            f"{change} ({self.reason}): {terms.num_running} running, {terms.num_starting} starting, {terms.num_silent} "
            f"silent; work of {terms.work_rate:.2f} replicas arrives and asks for {terms.for_work:.2f}; a queue of "
            f"{terms.queue_s:.2f} s asks for {terms.for_queue:.2f}; memory in use of {terms.memory_use:.2f} replicas "
            f"asks for {terms.for_memory:.2f}; {terms.waiting_s:.2f} s of work, and memory of "
            f"{terms.waiting_memory:.2f} replicas, wait at the routers; {terms.fewest} would be enough; a start takes "
            f"{terms.startup_s:.1f} s"
        )


class PoolScaler:
    """A `PoolScaler` decides for one pool, and remembers what its decisions need."""

    def __init__(self, rules: ScalingRules) -> None:
        self.rules = rules
        self._decided_at_s: float | None = None
        self._seen: dict[str, tuple[float, object]] = {}
        """Holds, by replica, when its load last changed, and the mark by which a change is seen."""
        self._enough: deque[tuple[float, int]] = deque()
        """Holds the smallest pool that would have been enough at each decision since the pool could shrink."""
        self._arrived: dict[str, tuple[float, float]] = {}
        """Holds, by replica, the work that had arrived at its two stages at the last decision that knew it."""
        self._arrivals: deque[tuple[float, float, float]] = deque(maxlen=RATE_INTERVALS)
        """Holds what arrived since each of the last decisions: the seconds, and the work of each stage."""
        self._num_over = 0
        """Counts the decisions in a row at which the queue exceeded its limit."""
        self._starts: deque[float] = deque()
        """Holds when each replica that is starting was asked for."""
        self._startup_s = rules.startup_s
        self._num_running = 0

    def is_due(self, now_s: float) -> bool:
        """Returns whether an interval is over since the last decision."""
        return self._decided_at_s is None or now_s - self._decided_at_s >= self.rules.interval_s

    def hear(self, now_s: float, running: Iterable[str], marks: Mapping[str, object]) -> set[str]:
        """Returns the running replicas that are not silent. A mark is a value that changes with each new load, for
        example the time at which the replica took it; comparing it with this pool's own time needs no common clock."""
        present = set(running)
        self._seen = {name: seen for name, seen in self._seen.items() if name in present}
        for name in present & set(marks):
            if name not in self._seen or self._seen[name][1] != marks[name]:
                self._seen[name] = (now_s, marks[name])
        limit_s = STALE_INTERVALS * self.rules.interval_s
        return {name for name, (changed_s, _) in self._seen.items() if now_s - changed_s <= limit_s}

    def decide(
        self,
        now_s: float,
        num_target: int,
        loads: Mapping[str, ReplicaLoad | None],
        waiting: ReplicaLoad = ReplicaLoad(),  # noqa: B008 (a NamedTuple is immutable)
    ) -> ScalingDecision:
        """Returns the number of replicas that the pool should have. `num_target` is the number that it was last asked
        to have, and `loads` holds each running replica; the load of a silent one is None. `waiting` is what waits at
        the routers (`waiting_load`)."""
        self._count_arrivals(now_s, {**loads, AT_ROUTERS: waiting})
        self._decided_at_s = now_s
        self._learn_startup(now_s, num_target, len(loads))
        terms = self._terms(now_s, num_target, loads, waiting)
        wanted, reason = self._choice(now_s, num_target, terms)
        num_replicas = min(max(wanted, self.rules.min_replicas), self.rules.max_replicas)
        if num_replicas != wanted:
            reason = "bounds"
        self._starts.extend([now_s] * (num_replicas - num_target))
        return ScalingDecision(now_s, num_target, num_replicas, reason, terms)

    def _choice(self, now_s: float, num_target: int, terms: ScalingTerms) -> tuple[int, Reason]:
        wanted, reason = self._wanted(terms)
        if wanted > num_target:
            self._enough.clear()
            return wanted, reason
        if terms.num_silent or not terms.num_running:
            self._enough.clear()
            return num_target, "silence"
        if len(self._arrivals) < RATE_INTERVALS:
            return num_target, "waiting to shrink"
        self._enough.append((now_s, max(terms.fewest, wanted)))
        if max(terms.fewest, wanted) >= num_target:
            self._enough.clear()
            return num_target, "steady"
        if now_s - self._enough[0][0] < self.rules.downscale_delay_s:
            return num_target, "waiting to shrink"
        enough = max(number for _, number in self._enough)
        self._enough.clear()
        return max(enough, num_target - max(1, num_target // SHRINK_SHARE)), "less work"

    # ------------------------------------------------------------ the needs

    def _count_arrivals(self, now_s: float, loads: Mapping[str, ReplicaLoad | None]) -> None:
        """Takes the work that has arrived at all replicas since the last decision. A replica that was not there before
        has begun with nothing, unless this is the first decision. Work that a router has kept and then sent on leaves
        one sum and enters another, so it counts once."""
        added = [0.0, 0.0]
        for name, load in loads.items():
            if load is None:
                continue
            arrived = load.arrived_s, load.arrived_beside_s
            before = self._arrived.get(name, arrived if self._decided_at_s is None else (0.0, 0.0))
            added = [total + new - old for total, new, old in zip(added, arrived, before, strict=True)]
            self._arrived[name] = arrived
        self._arrived = {name: arrived for name, arrived in self._arrived.items() if name in loads}
        if self._decided_at_s is not None:
            self._arrivals.append((now_s - self._decided_at_s, added[0], added[1]))

    def _work_rate(self) -> float:
        """Returns the work that arrives per second at the busier stage. Work that was given up counts as negative."""
        passed_s = sum(seconds for seconds, _, _ in self._arrivals)
        if passed_s <= 0.0:
            return 0.0
        return (
            max(sum(first for _, first, _ in self._arrivals), sum(beside for _, _, beside in self._arrivals), 0.0)
            / passed_s
        )

    def _terms(
        self, now_s: float, num_target: int, loads: Mapping[str, ReplicaLoad | None], waiting: ReplicaLoad
    ) -> ScalingTerms:
        known = [load for load in loads.values() if load is not None]
        num_running = len(loads)
        queue_s, work_rate = sum(load.queue_s for load in known) + waiting.queue_s, self._work_rate()
        memory_use = sum(load.memory_use for load in known)
        is_over = bool(known) and queue_s > self.rules.queue_limit_s * num_running
        self._num_over = self._num_over + 1 if is_over else 0
        return ScalingTerms(
            num_running=num_running,
            num_silent=num_running - len(known),
            num_starting=max(num_target - num_running, 0),
            queue_s=queue_s,
            work_rate=work_rate,
            memory_use=memory_use,
            startup_s=self._startup_s,
            for_work=work_rate / self.rules.target_utilization,
            for_queue=self._for_queue(now_s, num_running, num_target, queue_s, work_rate),
            for_memory=self._for_memory(len(known), memory_use, waiting.memory_use),
            fewest=self._fewest(num_running, queue_s, work_rate, memory_use + waiting.memory_use),
            waiting_s=waiting.arrived_s,
            waiting_memory=waiting.memory_use,
        )

    def _for_queue(self, now_s: float, num_running: int, num_target: int, queue_s: float, work_rate: float) -> float:
        """Returns the replicas that keep up with the work and bring the queue back to its limit in the time that a
        start takes.

        With n replicas, work of rate r and a queue of b seconds when a new replica can help, n - r seconds of the queue
        go per second, so b - (n - r) d = n q must hold for a time d and a limit q: n = (r + b / d) / (1 + q / d)."""
        limit_s = self.rules.queue_limit_s
        if queue_s <= limit_s * num_running:
            return 0.0
        expected_s = queue_s + (work_rate - num_running) * self._startup_s
        for started_s in self._starts:
            # A replica that starts now and earlier ones that are starting help at different times.
            expected_s -= min(max(now_s - started_s, 0.0), self._startup_s)
        drain_s = max(self._startup_s, 2 * self.rules.interval_s)
        need = (work_rate + max(expected_s, 0.0) / drain_s) / (1.0 + limit_s / drain_s)
        is_sustained = self._num_over >= SUSTAINED and num_target <= num_running
        return max(need, num_running + 1.0) if is_sustained else need

    def _for_memory(self, num_known: int, memory_use: float, waiting: float) -> float:
        """Returns the replicas that hold what is in use, and what waits for room, with some to spare. What is not yet
        generated is not known, so a full pool grows by half at least."""
        need = (memory_use + waiting) / self.rules.target_memory_use
        is_full = num_known > 0 and memory_use >= FULL_MEMORY * num_known
        return max(need, GROWTH_OF_FULL * num_known) if is_full else need

    def _wanted(self, terms: ScalingTerms) -> tuple[int, Reason]:
        needs: dict[Reason, float] = {"work": terms.for_work, "queue": terms.for_queue, "memory": terms.for_memory}
        reason = max(needs, key=lambda name: needs[name])
        return math.ceil(needs[reason] - TOLERANCE), reason

    def _fewest(self, num_running: int, queue_s: float, work_rate: float, memory_use: float) -> int:
        """Returns the smallest number of replicas, at most that of the running ones, that would be enough with
        something to spare. The queue of a smaller pool is predicted by the utilisation u: it grows as u / (1 - u)."""
        rules = self.rules
        for number in range(rules.min_replicas, num_running):
            if work_rate > number * rules.target_utilization * SPARE:
                continue
            if memory_use > number * rules.target_memory_use * SPARE:
                continue
            growth = _queue_share(work_rate / number) / max(_queue_share(work_rate / num_running), 1e-9)
            growth = max(growth, num_running / number)
            if queue_s / num_running * growth <= rules.queue_limit_s * SPARE:
                return number
        return num_running

    # ------------------------------------------------------------ starts

    def _learn_startup(self, now_s: float, num_target: int, num_running: int) -> None:
        """Takes the time that a replica took to start, when more run than before."""
        for _ in range(min(max(num_running - self._num_running, 0), len(self._starts))):
            taken_s = now_s - self._starts.popleft()
            self._startup_s += (taken_s - self._startup_s) / 2
        self._num_running = num_running
        while len(self._starts) > max(num_target - num_running, 0):
            self._starts.pop()


def _queue_share(utilization: float) -> float:
    limited = min(max(utilization, 0.0), FULL_UTILIZATION)
    return limited / (1.0 - limited)

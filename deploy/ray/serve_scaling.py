"""Scales the encoders and workers of a Serve application: it carries loads to `deploy.scaling` and its decisions to
Serve.

A replica answers `record_autoscaling_stats` with its load (`load_stats`). Serve collects these numbers in its
controller and asks the policy of each pool ten times a second how many replicas it should have. `PoolPolicy` asks its
`PoolScaler` once per interval, and repeats the answer in between. It sends each decision to the cluster's directory,
from which the routers fetch it for logs and metrics. The routers tell the directory what waits there, and the policy
asks it.

Serve's own signals, the counts of requests, are not used, and neither are its delays: the decision contains them. The
class travels to the controller by value, and `deploy.scaling` by name, so Weft is installed where the controller runs.

The module makes no decision.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from deploy.ray import directory
from deploy.scaling import PoolScaler, PoolShares, ReplicaLoad, ScalingDecision, ScalingRules, waiting_load
from fabric.contracts import ScalingReport, WaitingWork

_LOG = logging.getLogger("ray.serve")
_PREFIX = "weft_"
ASK_S = 1.0
"""The policy asks the directory this often what waits at the routers."""
SENDS_PER_INTERVAL = 2.0
"""A replica sends its load this often in an interval."""


def serve_autoscaling(
    rules: ScalingRules, pool: str, cluster: str, shares: PoolShares | None = None
) -> AutoscalingConfig:
    """Returns the config with which Serve scales a pool by `rules`. A pool of workers counts its part of the work that
    waits at the routers as its own, by `shares`."""
    send_s = rules.interval_s / SENDS_PER_INTERVAL
    kwargs = {
        "pool": pool,
        "cluster": cluster,
        "shares": None if shares is None else (shares.pool, dict(shares.pool_to_most)),
        "rules": {name: getattr(rules, name) for name in ScalingRules.__dataclass_fields__},
    }
    with warnings.catch_warnings():
        # Serve will replace this key by an environment variable, which a Ray that is joined would not have.
        warnings.filterwarnings("ignore", "The `metrics_interval_s` field")
        return AutoscalingConfig(
            min_replicas=rules.min_replicas,
            max_replicas=rules.max_replicas,
            metrics_interval_s=send_s,
            look_back_period_s=3 * send_s,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=AutoscalingPolicy(policy_function=PoolPolicy, policy_kwargs=kwargs),
        )


def load_stats(load: ReplicaLoad) -> dict[str, float]:
    """Returns a load as Serve carries it."""
    return {f"{_PREFIX}{name}": float(value) for name, value in load._asdict().items()}


class PoolPolicy:
    """A `PoolPolicy` is Serve's autoscaling policy for one pool. It lives in Serve's controller."""

    def __init__(
        self, pool: str, cluster: str, rules: dict[str, Any], shares: tuple[str, dict[str, int]] | None = None
    ) -> None:
        self._pool, self._cluster = pool, cluster
        self._shares = None if shares is None else PoolShares(*shares)
        self._scaler = PoolScaler(ScalingRules(**rules))
        self._reasons: Counter[str] = Counter()
        self._directory: Any = None
        self._asked: Future[tuple[WaitingWork, ...]] | None = None
        self._asked_at_s = -ASK_S
        self._waiting: tuple[WaitingWork, ...] = ()
        """Holds what waits at the routers, by the newest answer of the directory."""

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        now_s, target = time.monotonic(), context.target_num_replicas
        self._ask(now_s)
        if not self._scaler.is_due(now_s):
            return target, {}
        running = [replica.unique_id for replica in context.running_replicas]
        marks, loads = newest_loads(context.raw_metrics or {})
        heard = self._scaler.hear(now_s, running, marks)
        decision = self._scaler.decide(
            now_s,
            target,
            {name: loads[name] if name in heard else None for name in running},
            waiting_load(self._pool, self._waiting, self._shares),
        )
        self._reasons[decision.reason] += 1
        if decision.num_replicas != target:
            _LOG.warning("the %ss %s", self._pool, decision.told())
        self._tell(scaling_report(self._pool, decision, self._reasons))
        return decision.num_replicas, {}

    def _ask(self, now_s: float) -> None:
        """Takes the directory's answer about what waits at the routers, if one has come, and asks again after `ASK_S`.
        It never waits, because Serve's controller has one event loop for everything."""
        if self._asked is not None and self._asked.done():
            asked, self._asked = self._asked, None
            try:
                self._waiting = asked.result()
            except ray.exceptions.RayError:
                self._waiting, self._directory = (), None
        if self._asked is None and now_s - self._asked_at_s >= ASK_S:
            self._asked_at_s = now_s
            if (actor := self._reached()) is not None:
                self._asked = actor.waiting.remote().future()

    def _tell(self, report: ScalingReport) -> None:
        """Sends a decision to the directory, and waits for nothing."""
        if (actor := self._reached()) is not None:
            actor.take_scaling.remote(report)

    def _reached(self) -> Any:
        """Returns the directory, or None if there is none, as when the cluster ends."""
        try:
            if self._directory is None:
                self._directory = directory.directory_actor(self._cluster)
        except (ValueError, ray.exceptions.RayError):
            self._directory = None
        return self._directory


def newest_loads(
    series: Mapping[str, Mapping[Any, Sequence[Any]]],
) -> tuple[dict[str, object], dict[str, ReplicaLoad]]:
    """Returns, for each replica that has sent its load, when it took the newest one, and that load. `series` maps the
    name of a number to the values that each replica has sent."""
    marks: dict[str, object] = {}
    found: dict[str, dict[str, float]] = {}
    for field in ReplicaLoad._fields:
        for replica, values in series.get(f"{_PREFIX}{field}", {}).items():
            if values:
                marks[replica.unique_id] = values[-1].timestamp
                found.setdefault(replica.unique_id, {})[field] = values[-1].value
    complete = {name: fields for name, fields in found.items() if len(fields) == len(ReplicaLoad._fields)}
    return {name: marks[name] for name in complete}, {name: ReplicaLoad(**fields) for name, fields in complete.items()}


def scaling_report(pool: str, decision: ScalingDecision, reasons: Mapping[str, int]) -> ScalingReport:
    """Returns a decision as the routers export it."""
    terms = decision.terms
    return ScalingReport(
        pool=pool,
        reason=decision.reason,
        told=decision.told(),
        reason_to_count=dict(reasons),
        num_desired=decision.num_replicas,
        num_running=terms.num_running,
        num_starting=terms.num_starting,
        num_silent=terms.num_silent,
        queue_s=terms.queue_s,
        work_rate=terms.work_rate,
        memory_use=terms.memory_use,
        for_work=terms.for_work,
        for_queue=terms.for_queue,
        for_memory=terms.for_memory,
        num_enough=terms.fewest,
        startup_s=terms.startup_s,
        waiting_s=terms.waiting_s,
        waiting_memory=terms.waiting_memory,
    )

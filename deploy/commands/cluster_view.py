"""Reads what a running cluster says of itself, and computes rates from two readings.

`read_view` asks a cluster for its readiness, members, metrics and latest requests, and makes a `ClusterView` of the
answers. A `Series` holds the samples of an exposition of Prometheus. `rates_between` compares two views: counters give
rates, and the buckets of histograms give quantiles of the time between. The module knows nothing of how a view is
shown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from deploy.commands.cluster_client import ClusterClient
from fabric.contracts import ConfigError, WeftError

TARGET_TIMEOUT_S = 1.0
"""A member that shows its metrics itself gets this much time to answer."""
MEMBER_PREFIXES = ("weft_worker_", "weft_encoder_")
FIRST_TOKEN = "weft_router_time_to_first_token_seconds"
BETWEEN_TOKENS = "weft_router_inter_token_latency_seconds"
REQUESTS = "weft_router_requests_total"
IN_FLIGHT = "weft_router_requests_in_flight"
WAITING = "weft_router_requests_waiting"
COMPLETION_TOKENS = "weft_router_completion_tokens_total"

WORKER_TO_METRIC = {
    "num_active": "weft_worker_num_running",
    "num_waiting": "weft_worker_num_waiting",
    "num_held": "weft_worker_num_waiting_for_features",
    "memory_used": "weft_worker_kv_used_blocks",
    "memory_size": "weft_worker_kv_capacity_blocks",
    "num_hits": "weft_worker_prefix_hit_tokens_total",
    "num_asked": "weft_worker_prefix_query_tokens_total",
    "num_done": "weft_worker_tokens_generated_total",
    "queued_tokens": "weft_worker_queued_weighted_tokens",
    "s_per_token": "weft_worker_prefill_seconds_per_token",
}
ENCODER_TO_METRIC = {
    "num_active": "weft_encoder_num_in_flight",
    "num_waiting": "weft_encoder_num_items_queued",
    "busy": "weft_encoder_busy_ratio",
    "memory_used": "weft_encoder_arena_used_bytes",
    "memory_size": "weft_encoder_arena_capacity_bytes",
    "num_hits": "weft_encoder_cache_hits_total",
    "num_asked": "weft_encoder_items_received_total",
    "num_done": "weft_encoder_items_encoded_total",
    "queue_s": "weft_encoder_queue_seconds",
}
"""Each maps what is shown of a member to the metric that says it."""
ROUTER_METRICS = (FIRST_TOKEN, BETWEEN_TOKENS, REQUESTS, IN_FLIGHT, WAITING, COMPLETION_TOKENS)


class Series:
    """`Series` are the samples of expositions of Prometheus: all of a router's, which tells of every router, and those
    of members in the expositions of nodes or members (`others`)."""

    def __init__(self, text: str = "", others: Iterable[str] = ()) -> None:
        self._name_to_samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        self._add(text, "")
        for other in others:
            self._add(other, MEMBER_PREFIXES)

    def _add(self, text: str, prefixes: str | tuple[str, ...]) -> None:
        for family in text_string_to_metric_families(text):
            for sample in family.samples if family.name.startswith(prefixes) else ():
                self._name_to_samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def has(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._name_to_samples)

    def total(self, name: str, **labels: str) -> float | None:
        """Returns the sum of the samples with these labels, or None if there is none."""
        fitting = [
            value
            for own, value in self._name_to_samples.get(name, ())
            if all(own.get(label) == wanted for label, wanted in labels.items())
        ]
        return sum(fitting) if fitting else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Maps each value of a label to the sum of its samples."""
        sums: dict[str, float] = {}
        for own, value in self._name_to_samples.get(name, ()):
            sums[own.get(label, "")] = sums.get(own.get(label, ""), 0.0) + value
        return sums

    def buckets(self, name: str) -> dict[float, float]:
        """Maps the upper bound of each bucket of a histogram to its cumulative count, summed over all labels."""
        return {float(bound): count for bound, count in self.by_label(f"{name}_bucket", "le").items()}


class MemberRow(NamedTuple):
    """A `MemberRow` is what is shown of one worker or encoder. A figure that its metrics do not say is None."""

    member_id: str
    kind: str
    host: str
    pid: int
    queue_s: float | None = None
    """Is the predicted time of the work that waits."""
    num_active: float | None = None
    """Counts the sequences that have begun, or the items on their way through an encoder."""
    num_waiting: float | None = None
    num_held: float | None = None
    """Counts the sequences that wait for a feature."""
    busy: float | None = None
    """Is the share of the last second in which an encoder computed."""
    memory_used: float | None = None
    memory_size: float | None = None
    """Is the number of KV blocks of a worker, or the bytes of an encoder's arena."""
    num_hits: float | None = None
    num_asked: float | None = None
    """Counts the prompt tokens of a worker, or the items of an encoder, that were looked for in its cache."""
    num_done: float | None = None
    """Counts the generated tokens of a worker, or the encoded items of an encoder."""
    config_flaw: str = ""
    """Says why the member refused the last change of the config; it is empty if it did not."""
    pool: str = ""
    engine: str = ""
    """Names the engine of a worker, as `pool` names its pool; both are empty for an encoder."""

    @property
    def state(self) -> str:
        """Returns `busy`, `idle`, or `no figures` if the metrics of this member can't be read."""
        if self.num_active is None:
            return "no figures"
        return "busy" if self.num_active or self.num_waiting or self.busy else "idle"

    @property
    def memory_share(self) -> float | None:
        return share_of(self.memory_used, self.memory_size)

    @property
    def hit_share(self) -> float | None:
        return share_of(self.num_hits, self.num_asked)


def share_of(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


class RouterRow(NamedTuple):
    member_id: str
    host: str
    pid: int
    num_in_flight: float | None
    config_flaw: str = ""


class ClusterView(NamedTuple):
    """A `ClusterView` is what a cluster said of itself at one moment."""

    at_s: float
    """Is the time of the reading, on the clock of the caller."""
    readiness: Mapping[str, Any]
    model: str | None = None
    version: str | None = None
    routers: tuple[RouterRow, ...] = ()
    members: tuple[MemberRow, ...] = ()
    requests: tuple[Mapping[str, Any], ...] = ()
    """Holds the summaries of the latest requests, the newest first."""
    silent: tuple[str, ...] = ()
    """Names the routers that did not tell of their requests."""
    series: Series = Series()
    why_partial: str = ""
    """Says why only the readiness, and perhaps the model, are known; it is empty if all is."""

    @property
    def is_ready(self) -> bool:
        return self.readiness.get("status") == "ready"

    @property
    def has_pools(self) -> bool:
        """Returns whether the workers are of several pools."""
        return len({row.pool for row in self.of_kind("worker")}) > 1

    def of_kind(self, kind: str) -> list[MemberRow]:
        return [row for row in self.members if row.kind == kind]

    def flaw_to_refusing(self) -> dict[str, Counter[str]]:
        """Maps each reason why members refused the last change of the config to the kinds of these members, and how
        many there are of a kind."""
        found: dict[str, Counter[str]] = {}
        for kind, flaw in [("router", row.config_flaw) for row in self.routers] + [
            (row.kind, row.config_flaw) for row in self.members
        ]:
            if flaw:
                found.setdefault(flaw, Counter())[kind] += 1
        return found

    def code_to_count(self) -> dict[str, int]:
        """Maps the codes of requests that ended since the start of the routers to how many there were."""
        return {code: int(count) for code, count in self.series.by_label(REQUESTS, "code").items() if count}

    def recent_outcomes(self) -> dict[str, int]:
        """Maps the outcomes of the latest requests to how many there are; those that run do not count."""
        counts: dict[str, int] = {}
        for each in self.requests:
            if each["outcome"] != "running":
                counts[str(each["outcome"])] = counts.get(str(each["outcome"]), 0) + 1
        return counts

    def running(self) -> list[Mapping[str, Any]]:
        return [each for each in self.requests if each["outcome"] == "running"]


def read_view(client: ClusterClient, now_s: float, num_requests: int = 1000) -> ClusterView:
    """Returns what a cluster says of itself. Without the right key, only a part of it is known. Raises ConfigError or
    Unavailable if the cluster can't be asked at all."""
    view = ClusterView(now_s, client.readiness())
    try:
        view = view._replace(model=client.model())
        listed = client.json("/weft/members")
        text = client.text("/metrics")
        asked = client.json("/weft/requests", limit=num_requests, format="json")
        targets = client.json("/weft/prometheus-targets")
    except ConfigError as error:
        return view._replace(why_partial=error.message)
    series = Series(text)
    if targets and not any(map(series.has, MEMBER_PREFIXES)):
        series = Series(text, _of_targets(targets))
    return view._replace(
        version=str(listed.get("version") or "") or None,
        routers=tuple(_router_row(each, series) for each in listed.get("routers", ())),
        members=tuple(_member_row(each, series) for each in listed["members"]),
        requests=tuple(asked["requests"]),
        silent=tuple(asked["routers_without_answer"]),
        series=series,
    )


def _of_targets(targets: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the expositions of the nodes or members that Prometheus asks. One that can't be reached has none."""
    texts = []
    with httpx.Client(timeout=TARGET_TIMEOUT_S) as http:
        for address in dict.fromkeys(each for target in targets for each in target["targets"]):
            try:
                texts.append(http.get(f"http://{address}/metrics").raise_for_status().text)
            except (httpx.HTTPError, httpx.InvalidURL):
                continue
    return texts


def _router_row(member: Mapping[str, Any], series: Series) -> RouterRow:
    name = str(member["member_id"])
    in_flight = series.total(IN_FLIGHT, router=name)
    if in_flight is None:  # The only router of a cluster has no label.
        in_flight = series.total(IN_FLIGHT)
    return RouterRow(name, str(member["host"]), int(member["pid"]), in_flight, _config_flaw(member))


def _config_flaw(member: Mapping[str, Any]) -> str:
    return str(member.get("config_flaw", ""))  # A router of an earlier version does not say it.


def _member_row(member: Mapping[str, Any], series: Series) -> MemberRow:
    name, kind = str(member["member_id"]), str(member["kind"])
    metrics = WORKER_TO_METRIC if kind == "worker" else ENCODER_TO_METRIC
    figures = {field: series.total(metric, **{kind: name}) for field, metric in metrics.items()}
    if kind == "worker":
        tokens, each_s = figures.pop("queued_tokens"), figures.pop("s_per_token")
        figures["queue_s"] = None if tokens is None or each_s is None else tokens * each_s
    flaw, host, pid = _config_flaw(member), str(member["host"]), int(member["pid"])
    pool, engine = str(member.get("pool", "")), str(member.get("engine", ""))
    return MemberRow(name, kind, host, pid, **figures, config_flaw=flaw, pool=pool, engine=engine)


# ------------------------------------------------------------ rates


class Rates(NamedTuple):
    """Holds what happened between two views. Quantiles are None if nothing was observed."""

    seconds: float
    requests_per_s: float
    failures_per_s: float
    tokens_per_s: float
    first_token_p50_s: float | None
    first_token_p99_s: float | None
    between_tokens_p50_s: float | None
    member_to_done_per_s: Mapping[str, float]


def rates_between(before: ClusterView, after: ClusterView) -> Rates:
    """Returns the rates from one view to a later one. A counter that has fallen began again at zero meanwhile."""
    seconds = max(after.at_s - before.at_s, 1e-9)
    codes, earlier = after.code_to_count(), before.code_to_count()
    code_to_ended = {code: _grown(earlier.get(code, 0), count) for code, count in codes.items()}
    done = {row.member_id: row.num_done or 0.0 for row in before.members}
    member_to_done = {
        row.member_id: _grown(done.get(row.member_id, 0.0), row.num_done or 0.0) / seconds for row in after.members
    }
    tokens = sum(member_to_done[row.member_id] for row in after.of_kind("worker"))
    first, between = (_grown_buckets(name, before.series, after.series) for name in (FIRST_TOKEN, BETWEEN_TOKENS))
    return Rates(
        seconds,
        sum(code_to_ended.values()) / seconds,
        sum(count for code, count in code_to_ended.items() if code != "ok") / seconds,
        tokens,
        quantile(first, 0.5),
        quantile(first, 0.99),
        quantile(between, 0.5),
        member_to_done,
    )


def _grown(before: float, after: float) -> float:
    return after - before if after >= before else after


def _grown_buckets(name: str, before: Series, after: Series) -> dict[float, float]:
    earlier, later = before.buckets(name), after.buckets(name)
    has_begun_again = any(later.get(bound, 0.0) < count for bound, count in earlier.items())
    return later if has_begun_again else {bound: later[bound] - earlier.get(bound, 0.0) for bound in later}


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """Returns a quantile of a histogram by the rule of Prometheus' `histogram_quantile`: values are spread evenly in
    their bucket, and one in the last bucket counts as its lower bound. It is None if the histogram is empty."""
    bounds = sorted(buckets)
    count = buckets[bounds[-1]] if bounds else 0.0
    if count <= 0:
        return None
    rank, low, below = share * count, 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= rank:
            inside = buckets[bound] - below
            return low if math.isinf(bound) or not inside else low + (bound - low) * (rank - below) / inside
        low, below = bound, buckets[bound]
    return low


# ------------------------------------------------------------ readings over time


class Readings:
    """Keeps the views of the last seconds, so that rates cover a window and not one moment."""

    def __init__(self, client: ClusterClient, clock: Callable[[], float], window_s: float = 15.0) -> None:
        self._client, self._clock, self._window_s = client, clock, window_s
        self._views: list[ClusterView] = []
        self.error: WeftError | None = None
        """Says why the last reading failed; None if it did not."""

    def read(self, num_requests: int = 200) -> ClusterView | None:
        """Reads a view, or returns None and sets `error`. After a failure the window begins again, because another
        cluster may answer next."""
        try:
            view = read_view(self._client, self._clock(), num_requests)
        except WeftError as error:
            self.error, self._views = error, []
            return None
        self.error = None
        kept: Sequence[ClusterView] = [each for each in self._views if view.at_s - each.at_s <= self._window_s]
        self._views = [*kept, view]
        return view

    def rates(self) -> Rates | None:
        """Returns the rates over the window, or None while there is one view only."""
        return rates_between(self._views[0], self._views[-1]) if len(self._views) > 1 else None

"""Exports a router's metrics for Prometheus. `RouterMetrics` holds the series that the router measures at its own
requests; `MemberReports` and `PlannerSeries` export series of the cluster behind it: what members report, and how well
the planner predicts them. Each router has one registry with all of them. `ClusterMetrics` puts the series of all
routers together, so that a scrape answers the same whichever router it reaches.

The series of the cluster are computed from the last reports and the planner's sums at the moment of a scrape, so a
member that left has no series. The fields of the reports declare their metrics themselves
(`fabric.contracts.metrics_of`). The module knows nothing of how requests are served, or of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import NamedTuple, cast

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fabric.contracts import (
    EncodeCost,
    EncoderReport,
    Member,
    MemberId,
    MetricsQuestion,
    MetricsReply,
    WorkerReport,
    metrics_of,
)
from fabric.transport import Plane
from router.observe.explained_request import StageTime
from router.observe.usage_series import UsageSeries
from router.planning import ClusterState

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
MEMBER_PREFIXES = ("weft_worker_", "weft_encoder_")
REPLY_S = 1.0
"""A scrape waits this long for the other routers."""
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 4.0, 8.0)


class RouterMetrics:
    """Holds the router's own series, and those of the members."""

    def __init__(self, num_in_flight: Callable[[], int], num_bodies_bytes: Callable[[], int]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.reports = MemberReports()
        self.registry.register(self.reports)
        self._gauge("requests_in_flight", "Requests that are admitted and have not ended.", num_in_flight)
        self._gauge("bodies_bytes", "Bytes of the bodies of the requests in flight.", num_bodies_bytes)
        self._add_outcomes()
        self._add_media()
        self._add_admission()
        self._add_tokens()
        self.usage = UsageSeries(self.registry)
        self._add_times()
        self._add_predictions()

    def _add_outcomes(self) -> None:
        """Adds what became of requests, of their attempts and of the calls to members."""
        self.requests = self._counter("requests", "Requests that ended, by code (`ok` or an error's).", ["code"])
        self.attempts = self._counter(
            "attempts", "Attempts that ended, by outcome (`ok`, `degraded` or an error's code).", ["outcome"]
        )
        self.dispatch_errors = self._counter(
            "dispatch_errors",
            "Calls to members that failed, by kind (`generate`, `encode`) and error.",
            ["kind", "code"],
        )
        self.frames_dropped = self._counter("frames_dropped", "Token frames that were not used, by reason.", ["reason"])

    def _add_media(self) -> None:
        self.requests_with = self._counter(
            "requests_with_media", "Requests that had a medium of this modality.", ["modality"]
        )
        self.media = self._counter("media_items", "Items of media whose tokens were planned.", ["modality"])
        self.planned_tokens = self._counter(
            "planned_media_tokens", "Prompt tokens that were planned for media.", ["modality"]
        )
        self.probe = self._histogram(
            "probe_seconds", "Time of reading the header of one medium.", SECONDS, ["modality"]
        )
        self.fetch = self._histogram(
            "fetch_seconds",
            "Time of fetching one medium by URL, by outcome (`ok`, `cached` or an error's code).",
            SECONDS,
            ["outcome"],
        )
        self.fetched_bytes = self._counter("fetched_bytes", "Bytes of media that came by URL.", ["outcome"])
        self.degraded = self._counter(
            "degraded", "Items that the model did not get as they were sent.", ["modality", "action", "reason"]
        )

    def _add_admission(self) -> None:
        """Adds the waits and decisions of admission, and what it charges to tenants."""
        self.capacity_wait = self._histogram(
            "capacity_wait_seconds",
            "Waits at the router for members, for room in a KV cache or for a turn, by how they ended (`served`, "
            "`expired`, `left`).",
            SECONDS,
            ["outcome"],
        )
        self.gate_wait = self._histogram(
            "gate_wait_seconds",
            "The waits of `weft_router_capacity_wait_seconds`, by the class of the request (`interactive`, `batch`).",
            SECONDS,
            ["service_class"],
        )
        self.admissions = self._counter(
            "admissions",
            "Requests by tenant, class and what admission decided: `dispatched`, or the code of the error with which "
            "the request was refused before anything was spent on it.",
            ["tenant", "service_class", "outcome"],
        )
        self.tenant_tokens = self._counter(
            "tenant_tokens", "Tokens that workers computed and generated for a tenant.", ["tenant"]
        )
        self.tenant_encoder_s = self._counter(
            "tenant_encoder_seconds", "Time of encoders' forward passes for a tenant.", ["tenant"]
        )

    def _add_tokens(self) -> None:
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self.prefix_hit_tokens = self._counter("prefix_hit_tokens", "Prompt tokens that were found in a KV cache.")
        self.covered_items = self._counter(
            "covered_items", "Items that were not encoded because a KV cache covers them."
        )
        self.completion_tokens = self._counter("completion_tokens", "Generated tokens.")

    def _add_times(self) -> None:
        """Adds the times of requests, as this router measured them."""
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Time from the arrival of a request to its first token.", SECONDS
        )
        self.itl = self._histogram("inter_token_latency_seconds", "Time between two tokens of a choice.", SECONDS)
        self.e2e = self._histogram(
            "request_duration_seconds", "Time from the arrival of a request to its end.", SECONDS
        )
        self.stage = self._histogram(
            "stage_seconds",
            "Time of a request by stage: making its prompt (`prompt`), from dispatch to the end of the worker's work "
            "(`worker`), and everything outside the worker (`router`).",
            SECONDS,
            ["stage"],
        )

    def _add_predictions(self) -> None:
        """Adds how well plans predicted the time to first token, and each stage of it."""
        self.predicted_ttft = self._histogram(
            "predicted_ttft_seconds", "Time to first token that the planner predicted.", SECONDS
        )
        self.actual_ttft = self._histogram("actual_ttft_seconds", "Time from dispatch to first token.", SECONDS)
        self.ttft_ratio = self._histogram(
            "ttft_ratio", "Predicted time to first token, divided by the actual one.", RATIOS
        )
        self.overlap = self._histogram(
            "overlap_efficiency_ratio", "Lower bound of the time to first token, divided by the actual one.", RATIOS
        )
        self.ttft_ratio_by_class = self._histogram(
            "modality_ttft_ratio",
            "The same as `weft_router_ttft_ratio`, by the modality class of the request: `video`, `audio`, `image` or "
            "`text`, the first of these that the request has.",
            RATIOS,
            ["modality"],
        )
        self.overlap_by_class = self._histogram(
            "modality_overlap_efficiency_ratio",
            "The same as `weft_router_overlap_efficiency_ratio`, by the modality class of the request.",
            RATIOS,
            ["modality"],
        )
        self._stage_to_sums: dict[tuple[str, str], list[Counter]] = {}
        by_stage = ["stage", "modality"]
        self.stage_predicted = self._counter(
            "stage_predicted_seconds", "Sum of the times that plans predicted of a stage of their requests.", by_stage
        )
        self.stage_actual = self._counter(
            "stage_actual_seconds", "Sum of the times that members measured of the same stages.", by_stage
        )
        self.stage_error = self._counter(
            "stage_error_seconds",
            "Sum of the absolute differences between the predicted and the measured times of a stage.",
            by_stage,
        )

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"weft_router_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        return Histogram(f"weft_router_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, text: str, read: Callable[[], int]) -> None:
        Gauge(f"weft_router_{name}", text, registry=self.registry).set_function(read)

    def watch_prompts(self, num_tokens: Callable[[], int]) -> None:
        """Adds the gauge of prompt tokens in flight. It is called once."""
        self._gauge("prompt_tokens_in_flight", "Prompt tokens of the requests in flight.", num_tokens)

    def watch_waiting(self, num_waiting: Callable[[], int]) -> None:
        """Adds the gauge of requests that wait at the gate. It is called once."""
        self._gauge(
            "requests_waiting",
            "Requests that wait at the router for members, for room in a KV cache or for their turn.",
            num_waiting,
        )

    def watch_silent(self, num_silent: Callable[[], int]) -> None:
        """Adds the gauge of routers that did not answer the last scrape. It is called once."""
        self._gauge("num_silent", "Other routers that did not answer this router's last scrape in time.", num_silent)

    def observe_media(
        self, probes: Iterable[tuple[str, float]], items: Mapping[str, int], tokens: Mapping[str, int]
    ) -> None:
        """Records the media of a request whose prompt was made: (modality, seconds) per probe, and items and tokens by
        modality."""
        for modality, seconds in probes:
            self.probe.labels(modality).observe(seconds)
        for modality, num_items in items.items():
            self.requests_with.labels(modality).inc()
            self.media.labels(modality).inc(num_items)
        for modality, num_tokens in tokens.items():
            self.planned_tokens.labels(modality).inc(num_tokens)

    def observe_fetch(self, outcome: str, seconds: float, num_bytes: int) -> None:
        """Records a fetch that ended: `ok`, `cached` (the bytes were there already) or with the code of an error."""
        self.fetch.labels(outcome).observe(seconds)
        self.fetched_bytes.labels(outcome).inc(num_bytes)

    def observe_first_token(self, modality: str, predicted_s: float, bound_s: float, actual_s: float) -> None:
        """Records an attempt's first token: what the planner predicted against the actual time. `modality` is the class
        of the request."""
        self.predicted_ttft.observe(predicted_s)
        self.actual_ttft.observe(actual_s)
        if actual_s > 0:
            for ratios in (self.ttft_ratio, self.ttft_ratio_by_class.labels(modality)):
                ratios.observe(predicted_s / actual_s)
            for ratios in (self.overlap, self.overlap_by_class.labels(modality)):
                ratios.observe(bound_s / actual_s)

    def observe_stages(self, modality: str, stages: Iterable[StageTime]) -> None:
        """Records what a plan predicted of stages of a request of this class, and what the members measured."""
        for stage in stages:
            key = stage.stage, modality
            if key not in self._stage_to_sums:  # A look-up by labels takes longer than the sums.
                sums = self.stage_predicted, self.stage_actual, self.stage_error
                self._stage_to_sums[key] = [each.labels(*key) for each in sums]
            predicted, actual, error = self._stage_to_sums[key]
            predicted.inc(max(0.0, stage.predicted_s))
            actual.inc(max(0.0, stage.actual_s))
            error.inc(abs(stage.predicted_s - stage.actual_s))

    def observe_request(self, code: str, timing: Timing) -> None:
        """Records a request that ended."""
        self.requests.labels(code).inc()
        self.e2e.observe(timing.total_s)
        if timing.first_token_s is not None:
            self.ttft.observe(timing.first_token_s)
        self.stage.labels("prompt").observe(timing.prompt_s)
        self.stage.labels("worker").observe(timing.worker_s)
        self.stage.labels("router").observe(max(0.0, timing.total_s - timing.worker_s))

    def exposition(self, router_id: MemberId | None, has_members: bool) -> bytes:
        """Returns all series in Prometheus text format. The router's own have the label `router`, if `router_id` is
        given; those of workers and encoders are there if `has_members`."""
        return generate_latest(cast(CollectorRegistry, _LabelledSeries(self, router_id, has_members)))


class _LabelledSeries:
    """Collects the series of a registry as `RouterMetrics.exposition` describes them."""

    def __init__(self, metrics: RouterMetrics, router_id: MemberId | None, has_members: bool) -> None:
        self._metrics, self._has_members = metrics, has_members
        self._labels = {} if router_id is None else {"router": str(router_id)}

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics.registry.collect():
            if metric.name.startswith(MEMBER_PREFIXES):
                if self._has_members:
                    yield metric
                continue
            metric.samples = [sample._replace(labels=self._labels | sample.labels) for sample in metric.samples]
            yield metric


class Timing(NamedTuple):
    """A `Timing` says how one request's seconds were spent. `first_token_s` is None if there was no token."""

    total_s: float
    prompt_s: float
    """This is the time from the arrival of the request until its prompt is made and its media are planned."""
    worker_s: float
    """This is the time from dispatch to the terminal event, summed over all attempts."""
    first_token_s: float | None


# ------------------------------------------------------------ the series of the cluster


class MemberReports(Collector):
    """Holds the last report of each member that is there, and exports the metrics that the report declares."""

    def __init__(self) -> None:
        self.workers: dict[MemberId, WorkerReport] = {}
        self.encoders: dict[MemberId, EncoderReport] = {}

    def put(self, report: WorkerReport | EncoderReport) -> None:
        if isinstance(report, WorkerReport):
            self.workers[report.worker_id] = report
        else:
            self.encoders[report.encoder_id] = report

    def remove(self, member_id: MemberId) -> None:
        self.workers.pop(member_id, None)
        self.encoders.pop(member_id, None)

    def collect(self) -> Iterator[Metric]:
        workers, encoders = dict(self.workers), dict(self.encoders)
        yield from _reported(WorkerReport, ["worker"], [([name], report) for name, report in workers.items()])
        yield from _reported(EncoderReport, ["encoder"], [([name], report) for name, report in encoders.items()])
        costs = [([name, cost.modality], cost) for name, report in encoders.items() for cost in report.costs]
        yield from _reported(EncodeCost, ["encoder", "modality"], costs)


class PlannerSeries(Collector):
    """Exports sums of predicted and actual values per stage, and the state of the prefix and feature indexes. They show
    if requests no longer go to the members that already hold their data: members' events are missing from an index (a
    source out of step), or predicted hits are not found."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        stages = self._cluster.accuracy()
        for field, name, text in (
            ("num_observations", "observations", "Predictions that were compared with what happened."),
            ("predicted", "predicted", "Sum of the predicted values."),
            ("actual", "actual", "Sum of the actual values."),
            ("abs_error", "abs_error", "Sum of the absolute differences between the predicted and the actual values."),
        ):
            metric = CounterMetricFamily(f"weft_planner_{name}", text, labels=["stage"])
            for stage, error in stages.items():
                metric.add_metric([stage], getattr(error, field))
            yield metric
        indexes = {"prefix": self._cluster.prefix_stats(), "feature": self._cluster.feature_stats()}
        for field, name, text in (
            ("num_keys", "keys", "Keys in the index."),
            ("num_out_of_step", "sources_out_of_step", "Members whose events are missing from the index."),
            ("num_bytes", "bytes", "Memory of the index in bytes."),
        ):
            gauge = GaugeMetricFamily(f"weft_index_{name}", text, labels=["index"])
            for index, stats in indexes.items():
                gauge.add_metric([index], getattr(stats, field))
            yield gauge
        for field, name, text in (
            ("num_refused", "refused_keys", "Keys that were not recorded, because the key ahead of them was evicted."),
            ("num_evicted", "evicted_keys", "Keys that were evicted to make room for others."),
        ):
            counter = CounterMetricFamily(f"weft_index_{name}", text, labels=["index"])
            for index, stats in indexes.items():
                counter.add_metric([index], getattr(stats, field))
            yield counter


class ClusterMetrics:
    """Answers a scrape with the series of every router of the cluster. It asks the other routers over the message plane
    and belongs to the event loop of its router."""

    def __init__(self, member_id: MemberId, plane: Plane, metrics: RouterMetrics, has_members: bool) -> None:
        self._member_id, self._plane, self._metrics, self._has_members = member_id, plane, metrics, has_members
        self._peers: dict[MemberId, str] = {}
        self._questions: dict[int, asyncio.Future[bytes]] = {}
        self._num_asked = 0
        self._num_silent = 0
        metrics.watch_silent(lambda: self._num_silent)

    def update_members(self, members: Iterable[Member]) -> None:
        """Takes the directory's list of members, of which only the other routers matter here."""
        routers = (member for member in members if member.kind == "router" and member.member_id != self._member_id)
        self._peers = {member.member_id: member.address for member in routers}

    def handle(self, message: MetricsQuestion | MetricsReply) -> None:
        """Answers another router's question, or takes its reply."""
        if isinstance(message, MetricsQuestion):
            text = self._metrics.exposition(self._member_id, has_members=False)
            self._plane.send(message.address, MetricsReply(self._member_id, message.number, text))
        elif (question := self._questions.get(message.number)) is not None and not question.done():
            question.set_result(message.text)

    async def exposition(self) -> bytes:
        """Returns the series of all routers in Prometheus text format, with the label `router` if there are several. A
        router that does not answer within `REPLY_S` is missing and counted (`weft_router_num_silent`)."""
        numbers = []
        for address in self._peers.values():
            self._num_asked += 1
            numbers.append(self._num_asked)
            self._questions[self._num_asked] = asyncio.get_running_loop().create_future()
            self._plane.send(address, MetricsQuestion(self._member_id, self._plane.address, self._num_asked))
        try:
            questions = [self._questions[number] for number in numbers]
            if questions:
                await asyncio.wait(questions, timeout=REPLY_S)
            texts = [question.result() for question in questions if question.done()]
        finally:
            for number in numbers:
                del self._questions[number]
        self._num_silent = len(numbers) - len(texts)
        own_label = self._member_id if self._peers else None
        return merged([self._metrics.exposition(own_label, self._has_members), *texts])


def merged(texts: Sequence[bytes]) -> bytes:
    """Puts expositions together: the samples of one metric stand together, as the text format demands, with the help
    text of the first exposition that has it."""
    name_to_parts: dict[bytes, list[bytes]] = {}
    for text in texts:
        for block in text.split(b"# HELP ")[1:]:
            name = block.split(b" ", 1)[0]
            if name not in name_to_parts:
                name_to_parts[name] = [b"# HELP ", block]
            else:
                lines = block.splitlines(keepends=True)
                name_to_parts[name] += [line for line in lines[1:] if not line.startswith(b"#")]
    return b"".join(part for parts in name_to_parts.values() for part in parts)


def report_exposition(report: WorkerReport | EncoderReport) -> bytes:
    """Returns the series of one worker or encoder in Prometheus text format, as the member itself shows them."""
    registry, reports = CollectorRegistry(auto_describe=False), MemberReports()
    reports.put(report)
    registry.register(reports)
    prefix = "weft_worker_" if isinstance(report, WorkerReport) else "weft_encoder_"
    own = [metric for metric in registry.collect() if metric.name.startswith(prefix)]
    return generate_latest(cast(CollectorRegistry, SimpleNamespace(collect=lambda: own)))


KIND_TO_FAMILY = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}


def _reported(
    struct: type[msgspec.Struct], labels: Sequence[str], rows: Iterable[tuple[Sequence[str], msgspec.Struct]]
) -> Iterator[Metric]:
    """Yields every metric that the struct declares. A row holds the values of the labels, and the struct with the
    numbers."""
    rows = list(rows)
    for path, declared in metrics_of(struct):
        read = attrgetter(path)
        metric = KIND_TO_FAMILY[declared.kind](declared.name, declared.text, labels=labels)
        for values, numbers in rows:
            metric.add_metric(values, read(numbers))
        yield metric

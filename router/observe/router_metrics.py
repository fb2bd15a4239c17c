"""Exports a router's metrics for Prometheus. `RouterMetrics` holds the series that the router measures at its own
requests, and the registry at which the series of the cluster behind it are registered too (`cluster_series`).

The values of all labels are bounded: they are codes, kinds, routes and modalities, or names from the config; the names
of tenants and of keys are cut off (`BoundedNames`). The module knows nothing of how requests are served, or of HTTP.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from types import SimpleNamespace
from typing import NamedTuple, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from fabric.contracts import CODE_TO_ERROR, MemberId, WeftError
from router.observe.explained_request import ITEM_STAGES, TEXT, WORKER_STAGES, StageTime
from router.observe.scaling_series import ScalingSeries
from router.observe.speech_series import SpeechSeries
from router.observe.usage_series import BoundedNames, UsageSeries

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
MEMBER_PREFIXES = ("weft_worker_", "weft_encoder_", "weft_stage_")
REQUEST_STAGES = ("prompt", "worker", "router")
PROCESS_PREFIX = "weft_process_"
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 4.0, 8.0)


class RouterMetrics:
    """Holds the router's own series, and those of the members."""

    def __init__(self, num_in_flight: Callable[[], int], num_bodies_bytes: Callable[[], int]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._tenants = BoundedNames()
        self.scaling = ScalingSeries()
        self.registry.register(self.scaling)
        self._gauge("requests_in_flight", "Requests that are admitted and have not ended.", num_in_flight)
        self._gauge("bodies_bytes", "Bytes of the bodies of the requests in flight.", num_bodies_bytes)
        build = ["version", "python", "model"]
        self._build = Gauge("weft_build_info", "Is always 1; its labels say what runs.", build, registry=self.registry)
        self._add_outcomes()
        self._add_media()
        self._add_admission()
        self._add_tokens()
        self.usage = UsageSeries(self.registry)
        self.speech = SpeechSeries(self.registry)
        self._add_times()
        self._add_predictions()

    def _add_outcomes(self) -> None:
        """Adds what became of requests, of their attempts and of the calls to members."""
        self.requests = self._counter("requests", "Requests that ended, by code (`ok` or an error's).", ["code"])
        self.http_requests = self._counter(
            "http_requests",
            "HTTP exchanges that ended, by the route of the API (`other` for paths that it does not have) and by "
            "status. 499 means that the client has left.",
            ["endpoint", "status"],
        )
        self.attempts = self._counter(
            "attempts", "Attempts that ended, by outcome (`ok`, `degraded` or an error's code).", ["outcome"]
        )
        self.dispatch_errors = self._counter(
            "dispatch_errors",
            "Calls to members that failed, by kind (`generate`, `encode`, or the name of a stage) and error.",
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
        by_class = ["modality"]
        self.ttft = self._histogram(
            "time_to_first_token_seconds",
            "Time from the arrival of a request to its first token, by the modality class of the request: `video`, "
            "`audio`, `image` or `text`, the first of these that the request has.",
            SECONDS,
            by_class,
        )
        self.itl = self._histogram("inter_token_latency_seconds", "Time between two tokens of a choice.", SECONDS)
        self.tpot = self._histogram(
            "time_per_output_token_seconds",
            "Mean time between two tokens of a request, by the modality class of the request. A request that gave no "
            "two tokens of a choice is not there.",
            SECONDS,
            by_class,
        )
        self.e2e = self._histogram(
            "request_duration_seconds",
            "Time from the arrival of a request to its end, by the modality class of the request.",
            SECONDS,
            by_class,
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
            "The same as `weft_router_ttft_ratio`, by the modality class of the request.",
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

    def observe_request(self, code: str, modality: str, timing: Timing) -> None:
        """Records a request of this class that ended."""
        self.requests.labels(code).inc()
        self.e2e.labels(modality).observe(timing.total_s)
        if timing.first_token_s is not None:
            self.ttft.labels(modality).observe(timing.first_token_s)
        if timing.each_token_s is not None:
            self.tpot.labels(modality).observe(timing.each_token_s)
        router_s = max(0.0, timing.total_s - timing.worker_s)
        for stage, seconds in zip(REQUEST_STAGES, (timing.prompt_s, timing.worker_s, router_s), strict=True):
            self.stage.labels(stage).observe(seconds)

    def begin(self, model: str, modalities: Iterable[str]) -> None:
        """Says which model is served, and shows the series of these modalities and of all codes from now on, with 0. A
        counter that appears with its first event has no rate there, so that nobody would see the first failures. It is
        called once."""
        for code in ("ok", WeftError.code, *CODE_TO_ERROR):
            self.requests.labels(code)
        for modality in modalities:
            for each in (self.requests_with, self.media, self.planned_tokens, self.probe):
                each.labels(modality)
        for stage in REQUEST_STAGES:
            self.stage.labels(stage)
        for modality in (*modalities, TEXT):
            for stage in (*WORKER_STAGES, *(ITEM_STAGES if modality != TEXT else ())):
                for sums in (self.stage_predicted, self.stage_actual, self.stage_error):
                    sums.labels(stage, modality)
            for histogram in (self.ttft, self.tpot, self.e2e, self.ttft_ratio_by_class, self.overlap_by_class):
                histogram.labels(modality)
        self._build.labels(metadata.version("weft"), platform.python_version(), model).set(1)

    def observe_admission(self, tenant: str, service_class: str, outcome: str) -> None:
        """Records what admission decided on a request."""
        self.admissions.labels(self._tenants.of(tenant), service_class, outcome).inc()

    def observe_charge(self, tenant: str, num_tokens: int, encoder_s: float) -> None:
        """Records what an attempt used of the tenant's share."""
        name = self._tenants.of(tenant)
        self.tenant_tokens.labels(name).inc(num_tokens)
        self.tenant_encoder_s.labels(name).inc(encoder_s)

    def exposition(self, router_id: MemberId | None, has_members: bool) -> bytes:
        """Returns all series in Prometheus text format. The router's own have the label `router`, if `router_id` is
        given; those of workers and encoders are there if `has_members`."""
        return written(list(self.families(router_id, has_members)))

    def families(self, router_id: MemberId | None, has_members: bool) -> Iterator[Metric]:
        """Yields the metrics of `exposition` with their present values, which no later event changes."""
        labels = {} if router_id is None else {"router": str(router_id)}
        for metric in self.registry.collect():
            # Prometheus sees from its scrapes when a counter began; `_created` would be one more series for each.
            samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            if metric.name.startswith(MEMBER_PREFIXES):
                if not has_members:
                    continue
            elif metric.name.startswith(PROCESS_PREFIX):
                if not has_members:
                    samples = [sample for sample in samples if sample.labels["kind"] == "router"]
            else:
                samples = [sample._replace(labels=labels | sample.labels) for sample in samples]
            metric.samples = samples
            yield metric


def written(families: Sequence[Metric]) -> bytes:
    """Returns metrics in Prometheus text format. It takes some 15 ms for 200 members, and may run in any thread."""
    return generate_latest(cast(CollectorRegistry, SimpleNamespace(collect=lambda: families)))


class Timing(NamedTuple):
    """A `Timing` says how one request's seconds were spent. `first_token_s` is None if there was no token."""

    total_s: float
    prompt_s: float
    """This is the time from the arrival of the request until its prompt is made and its media are planned."""
    worker_s: float
    """This is the time from dispatch to the terminal event, summed over all attempts."""
    first_token_s: float | None
    each_token_s: float | None = None
    """This is the mean time between two tokens of a choice; None if no choice had two."""

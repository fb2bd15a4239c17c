"""What the router measures and what its members report, for Prometheus. A registry of its own per router.

Gauges of members are read from their last reports when they are asked for, so a member that left has no series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fabric.ids import MemberId
from fabric.messages import EncoderReport, WorkerReport

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 4.0, 8.0)

WORKER_GAUGES = {
    "num_running": "num_running",
    "num_waiting": "num_waiting",
    "num_at_doorstep": "num_at_doorstep",
    "queued_tokens": "queued_tokens",
    "num_decoding": "num_decoding",
    "kv_blocks_used": "kv_blocks_used",
    "kv_blocks_total": "kv_blocks_total",
    "inbox_bytes_used": "inbox_bytes_used",
    "inbox_bytes_total": "inbox_bytes_total",
    "num_features": "num_features",
    "num_quarantined": "num_quarantined",
    "prefill_s_per_token": "prefill_seconds_per_token",
    "step_overhead_s": "step_overhead_seconds",
}
WORKER_COUNTERS = {
    "steps": "steps",
    "tokens_generated": "tokens_generated",
    "prompt_tokens_computed": "prompt_tokens_computed",
    "prefix_hit_tokens": "prefix_hit_tokens",
    "prefix_query_tokens": "prefix_query_tokens",
    "num_preemptions": "preemptions",
}
ENCODER_GAUGES = {
    "num_queued": "num_queued",
    "queued_cost": "queue_cost",
    "num_encoding": "num_encoding",
    "arena_bytes_used": "arena_bytes_used",
    "arena_bytes_cached": "arena_bytes_cached",
    "arena_bytes_total": "arena_bytes_total",
    "num_leases": "num_leases",
    "encode_s_per_cost": "encode_seconds_per_cost",
    "batch_overhead_s": "batch_overhead_seconds",
}
ENCODER_COUNTERS = {"items_encoded": "items_encoded", "batches": "batches", "cache_hits": "cache_hits"}
"""Fields of the reports -> names of the series, without `weft_worker_` or `weft_encoder_`."""


class Timing(NamedTuple):
    """Where one request's seconds went. `first_token_s` is None if there was none."""

    total_s: float
    intake_s: float
    worker_s: float
    """From dispatch to terminal event, over all attempts."""
    first_token_s: float | None


class MemberReports(Collector):
    """The last report of each member that is there."""

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
        for kind, reports, gauges, counters in (
            ("worker", dict(self.workers), WORKER_GAUGES, WORKER_COUNTERS),
            ("encoder", dict(self.encoders), ENCODER_GAUGES, ENCODER_COUNTERS),
        ):
            families = [(field, GaugeMetricFamily, name) for field, name in gauges.items()]
            families += [(field, CounterMetricFamily, name) for field, name in counters.items()]
            for field, family, name in families:
                metric = family(f"weft_{kind}_{name}", f"`{field}` of the {kind}'s last report.", labels=[kind])
                for member_id, report in reports.items():
                    metric.add_metric([member_id], getattr(report, field))
                yield metric


class RouterMetrics:
    """The router's own series, and the members'."""

    def __init__(self, num_in_flight: Callable[[], int], num_bodies_bytes: Callable[[], int]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.reports = MemberReports()
        self.registry.register(self.reports)
        own = {"registry": self.registry}
        Gauge("weft_router_requests_in_flight", "Requests admitted and not ended.", **own).set_function(num_in_flight)
        Gauge("weft_router_bodies_bytes", "Bytes of their bodies.", **own).set_function(num_bodies_bytes)
        self.requests = Counter(
            "weft_router_requests", "Requests that ended, by code (`ok` or an error's).", ["code"], **own
        )
        self.attempts = Counter("weft_router_attempts", "Attempts, by how they ended.", ["outcome"], **own)
        self.dispatch_errors = Counter("weft_router_dispatch_errors", "Calls that failed.", ["kind", "code"], **own)
        self.frames_dropped = Counter("weft_router_frames_dropped", "Token frames not used.", ["reason"], **own)
        self.ttft = Histogram("weft_router_ttft_seconds", "Arrival to first token.", buckets=SECONDS, **own)
        self.itl = Histogram("weft_router_itl_seconds", "Between tokens of a choice.", buckets=SECONDS, **own)
        self.e2e = Histogram("weft_router_e2e_seconds", "Arrival to terminal event.", buckets=SECONDS, **own)
        self.stage = Histogram("weft_router_stage_seconds", "Where time went.", ["stage"], buckets=SECONDS, **own)
        self.prompt_tokens = Counter("weft_router_prompt_tokens", "Prompt tokens.", **own)
        self.prefix_hit_tokens = Counter("weft_router_prefix_hit_tokens", "Prompt tokens found in a KV cache.", **own)
        self.covered_items = Counter("weft_router_covered_items", "Media that were not encoded: KV covers them.", **own)
        self.completion_tokens = Counter("weft_router_completion_tokens", "Generated tokens.", **own)
        self.predicted_ttft = Histogram(
            "weft_router_predicted_ttft_seconds", "The planner's word.", buckets=SECONDS, **own
        )
        self.actual_ttft = Histogram(
            "weft_router_actual_ttft_seconds", "Dispatch to first token.", buckets=SECONDS, **own
        )
        self.ttft_ratio = Histogram("weft_router_ttft_ratio", "Predicted / actual.", buckets=RATIOS, **own)
        self.overlap = Histogram("weft_router_overlap_efficiency", "Lower bound / actual TTFT.", buckets=RATIOS, **own)

    def observe_first_token(self, predicted_s: float, bound_s: float, actual_s: float) -> None:
        """Of an attempt's first token: what the planner said against what came."""
        self.predicted_ttft.observe(predicted_s)
        self.actual_ttft.observe(actual_s)
        if actual_s > 0:
            self.ttft_ratio.observe(predicted_s / actual_s)
            self.overlap.observe(bound_s / actual_s)

    def observe_request(self, code: str, timing: Timing) -> None:
        """Of a request that ended."""
        self.requests.labels(code).inc()
        self.e2e.observe(timing.total_s)
        if timing.first_token_s is not None:
            self.ttft.observe(timing.first_token_s)
        self.stage.labels("intake").observe(timing.intake_s)
        self.stage.labels("worker").observe(timing.worker_s)
        self.stage.labels("router").observe(max(0.0, timing.total_s - timing.worker_s))

    def exposition(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)

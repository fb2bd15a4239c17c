"""Exports metric series of the cluster behind the router: what members report, and how well the planner predicts them.

The series are computed from the last reports and the planner's sums at the moment of a scrape, so a member that left
has no series. The module knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fabric.ids import MemberId
from fabric.messages import EncoderReport, WorkerReport
from router.planning.cluster import ClusterState

WORKER_GAUGES = {
    "num_running": "num_running",
    "num_waiting": "num_waiting",
    "num_at_doorstep": "num_waiting_for_features",
    "queued_tokens": "queued_tokens",
    "num_decoding": "num_decoding",
    "kv_blocks_used": "kv_blocks_used",
    "kv_blocks_total": "kv_blocks_total",
    "inbox_bytes_used": "inbox_bytes_used",
    "inbox_bytes_total": "inbox_bytes_total",
    "num_features": "num_features",
    "num_quarantined": "num_quarantined",
    "kept_bytes_used": "kept_bytes_used",
    "prefill_s_per_token": "prefill_seconds_per_token",
    "step_overhead_s": "step_overhead_seconds",
    "decode_s_per_sequence": "decode_seconds_per_sequence",
    "queued_flat_tokens": "queued_flat_tokens",
    "residence_s": "residence_seconds",
    "max_step_tokens": "max_step_tokens",
    "max_sequences": "max_sequences",
}
WORKER_COUNTERS = {
    "steps": "steps",
    "tokens_generated": "tokens_generated",
    "prompt_tokens_computed": "prompt_tokens_computed",
    "prefix_hit_tokens": "prefix_hit_tokens",
    "prefix_query_tokens": "prefix_query_tokens",
    "num_preemptions": "preemptions",
    "num_kept_hits": "kept_hits",
    "drafts_proposed": "drafts_proposed",
    "drafts_accepted": "drafts_accepted",
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
    "num_items_queued": "num_items_queued",
    "queued_s": "queue_seconds",
    "num_items_pending": "num_items_pending",
    "num_in_flight": "num_in_flight",
    "max_in_flight": "max_in_flight",
    "num_decoding": "num_decoding",
    "busy_fraction": "busy_fraction",
    "num_features_encoding": "num_features_encoding",
    "num_features_cached": "num_features_cached",
    "num_features_staged": "num_features_staged",
    "arena_bytes_encoding": "arena_bytes_encoding",
}
ENCODER_COUNTERS = {
    "items_encoded": "items_encoded",
    "batches": "batches",
    "cache_hits": "cache_hits",
    "items_received": "items_received",
    "items_failed": "items_failed",
    "items_decoded": "items_decoded",
    "decode_s": "decode_seconds",
    "forward_s": "forward_seconds",
    "batch_units": "batch_units",
    "batch_cost": "batch_cost",
    "transfers": "transfers",
    "transfer_s": "transfer_seconds",
    "cache_hit_bytes": "cache_hit_bytes",
    "evictions": "evictions",
    "evicted_bytes": "evicted_bytes",
    "preprocess_s": "preprocess_seconds",
}
"""These four tables map fields of the reports to names of the series, without `weft_worker_` or `weft_encoder_`."""


class MemberReports(Collector):
    """Holds the last report of each member that is there, and exports it."""

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
        yield from _of_members("worker", dict(self.workers), WORKER_GAUGES, WORKER_COUNTERS)
        yield from _of_members("encoder", dict(self.encoders), ENCODER_GAUGES, ENCODER_COUNTERS)
        yield from _modality_costs(dict(self.encoders))


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
            ("num_refused", "refused", "Keys that the index refused because it was full."),
        ):
            gauge = GaugeMetricFamily(f"weft_index_{name}", text, labels=["index"])
            for index, stats in indexes.items():
                gauge.add_metric([index], getattr(stats, field))
            yield gauge


def _modality_costs(reports: Mapping[MemberId, EncoderReport]) -> Iterator[Metric]:
    for field, name, text in (
        ("seconds_per_cost", "seconds_per_cost", "Time of a forward pass for each unit of cost, by modality."),
        ("overhead_s", "overhead_seconds", "Time of a forward pass that does not depend on its cost, by modality."),
    ):
        metric = GaugeMetricFamily(f"weft_encoder_modality_{name}", text, labels=["encoder", "modality"])
        for member_id, report in reports.items():
            for cost in report.costs:
                metric.add_metric([member_id, cost.modality], getattr(cost, field))
        yield metric


def _of_members(
    kind: str, reports: Mapping[MemberId, object], gauges: Mapping[str, str], counters: Mapping[str, str]
) -> Iterator[Metric]:
    for family, names in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for field, name in names.items():
            metric = family(f"weft_{kind}_{name}", f"`{field}` of the {kind}'s last report.", labels=[kind])
            for member_id, report in reports.items():
                metric.add_metric([member_id], getattr(report, field))
            yield metric

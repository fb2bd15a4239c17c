"""Exports the newest decisions about the sizes of the pools. The policy that decides answers no scrape, so every router
exports what it has heard from it, with the same values.

The module knows nothing of how a decision is made, or of how it travels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fabric.contracts import ScalingReport, metrics_of


class ScalingSeries(Collector):
    """A `ScalingSeries` holds the newest report of each pool that is scaled."""

    def __init__(self) -> None:
        self._reports: Sequence[ScalingReport] = ()

    def take(self, reports: Sequence[ScalingReport]) -> None:
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        reports = self._reports
        for field, declared in metrics_of(ScalingReport):
            gauge = GaugeMetricFamily(declared.name, declared.text, labels=["pool"])
            for report in reports:
                gauge.add_metric([report.pool], getattr(report, field))
            yield gauge
        counter = CounterMetricFamily(
            "weft_autoscaling_decisions", "Decisions about the size of the pool, by reason.", labels=["pool", "reason"]
        )
        for report in reports:
            for reason, count in report.reason_to_count.items():
                counter.add_metric([report.pool, reason], count)
        yield counter

"""Sends gauges and cache events to the routers that the encoder listens to.

`EncoderReporter` sends the messages, in the event loop. `encoder_report` builds one report of the encoder's state from
its parts, the pipeline and the feature table. The service passes what the second returns to the first.

The module knows nothing of what routers do with the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

from encoder_pool.pipeline import Pipeline
from encoder_pool.planning import CostEstimate, FeatureLog, FeatureTable
from fabric.contracts import AttemptId, EncodeCost, EncoderReport, MemberId
from fabric.transport import Plane, RouterTable


class EncoderReporter:
    """Sends one encoder's reports, and the changes of its cache, to all routers that it knows. It knows nothing of what
    the numbers mean; the service passes them in."""

    def __init__(self, plane: Plane, log: FeatureLog, routers: RouterTable) -> None:
        self._plane = plane
        self._log = log
        self._routers = routers
        self._ended: list[AttemptId] = []
        self.seq = 0
        """Holds the sequence number of the last report that was sent."""

    def attempt_ended(self, attempt_id: AttemptId) -> None:
        """Makes the next report acknowledge the attempt once more: its work is then included in the numbers, whether it
        succeeded or not."""
        self._ended.append(attempt_id)

    def acknowledged(self, live: Iterable[AttemptId]) -> tuple[AttemptId, ...]:
        return tuple(dict.fromkeys([*live, *self._ended]))

    def send_snapshot(self, address: str) -> None:
        """Sends everything that is cached now, after the events that led to it."""
        self.publish_events()
        self._plane.send(address, self._log.snapshot())

    def publish_events(self) -> None:
        """Sends what the cache has gained and lost since the last call."""
        for message in self._log.drain():
            self._routers.broadcast(message)

    def publish_report(self, report: EncoderReport) -> None:
        self._ended.clear()
        self.seq = report.seq
        self._routers.broadcast(report)


def encoder_report(
    encoder_id: MemberId,
    epoch: int,
    seq: int,
    acknowledged: tuple[AttemptId, ...],
    pipeline: Pipeline,
    table: FeatureTable,
    max_in_flight: int,
) -> EncoderReport:
    """Returns the report and changes nothing. Its sums cover the whole life of the parts."""
    jobs, device = pipeline.jobs, pipeline.device_queue
    costs, mixed = pipeline.costs, pipeline.costs.mixed()
    items = copy(pipeline.stats)
    items.preprocess_s += device.preprocess_s
    return EncoderReport(
        encoder_id=encoder_id,
        epoch=epoch,
        seq=seq,
        acknowledged=acknowledged,
        items=items,
        device=copy(device.stats),
        arena=table.usage(),
        num_queued=jobs.totals.num_units_queued,
        queued_cost=jobs.totals.queued_cost,
        num_encoding=pipeline.num_encoding,
        encode_s_per_cost=mixed.seconds_per_cost,
        batch_overhead_s=mixed.overhead_s,
        costs=tuple(_encode_cost(modality, costs.estimate(modality)) for modality in costs.modalities),
        num_items_queued=jobs.totals.num_items_queued,
        queued_s=jobs.queued_s,
        num_items_pending=pipeline.num_pending,
        num_in_flight=jobs.totals.num_in_flight,
        max_in_flight=max_in_flight,
        num_decoding=pipeline.num_decoding,
        busy_fraction=device.busy.fraction,
    )


def _encode_cost(modality: str, estimate: CostEstimate) -> EncodeCost:
    return EncodeCost(modality, estimate.seconds_per_cost, estimate.overhead_s)

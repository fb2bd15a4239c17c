"""Sends gauges and cache events to the routers that the encoder listens to.

`EncoderReporter` sends the messages, in the event loop. `encoder_report` builds one report of the encoder's state from
its parts, the pipeline and the feature table. The service passes what the second returns to the first.

The module knows nothing of what routers do with the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

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
    usage, jobs = table.usage(), pipeline.jobs
    items, device = pipeline.tally, pipeline.device_queue.tally
    costs, mixed = pipeline.costs, pipeline.costs.mixed()
    return EncoderReport(
        encoder_id=encoder_id,
        epoch=epoch,
        seq=seq,
        acknowledged=acknowledged,
        num_queued=jobs.totals.num_units_queued,
        queued_cost=jobs.totals.queued_cost,
        num_encoding=pipeline.num_encoding,
        arena_bytes_used=usage.used_bytes,
        arena_bytes_cached=usage.cached_bytes,
        arena_bytes_total=usage.total_bytes,
        num_leases=usage.num_leases,
        items_encoded=items.num_items_encoded,
        batches=device.num_batches,
        cache_hits=items.num_cache_hits,
        encode_s_per_cost=mixed.seconds_per_cost,
        batch_overhead_s=mixed.overhead_s,
        costs=tuple(_encode_cost(modality, costs.estimate(modality)) for modality in costs.modalities),
        num_items_queued=jobs.totals.num_items_queued,
        queued_s=jobs.queued_s,
        num_items_pending=pipeline.num_pending,
        num_in_flight=jobs.totals.num_in_flight,
        max_in_flight=max_in_flight,
        num_decoding=pipeline.num_decoding,
        busy_fraction=pipeline.device_queue.busy.fraction,
        num_features_encoding=usage.num_encoding,
        num_features_cached=usage.num_cached,
        num_features_staged=usage.num_staged,
        arena_bytes_encoding=usage.encoding_bytes,
        items_received=items.num_items,
        items_failed=items.num_items_failed,
        items_decoded=items.num_decoded,
        decode_s=items.decode_s,
        forward_s=device.forward_s,
        batch_units=device.num_units,
        batch_cost=device.encoded_cost,
        transfers=table.sums.num_transfers,
        transfer_s=table.sums.transfer_s,
        cache_hit_bytes=items.cache_hit_bytes,
        evictions=table.sums.num_evictions,
        evicted_bytes=table.sums.evicted_bytes,
        preprocess_s=items.preprocess_s + device.preprocess_s,
    )


def _encode_cost(modality: str, estimate: CostEstimate) -> EncodeCost:
    return EncodeCost(modality, estimate.seconds_per_cost, estimate.overhead_s)

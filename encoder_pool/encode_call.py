"""Keeps one encode call while it is open, and announces its units to the worker that waits for them.

A `Call` holds the call's waiters (the items that wait for their units), its results and its trace. An `Announcer` tells
the worker of a waiter that a unit can be pulled: it takes a lease, makes a ticket and sends one message. Together they
are the two outputs of an encode call, the answer to the router and the announcements to the worker.

The module knows nothing of how items are encoded, of queues or of models.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from encoder_pool.planning import EncodeWaiter, FeatureSpec, FeatureTable, LeaseKey
from fabric.contracts import (
    AttemptId,
    CallTurn,
    EncodeRequest,
    EncodeResult,
    ErrorInfo,
    ItemResult,
    MediaItem,
    MemberId,
    StageTimes,
    TraceEvent,
    UnitKey,
    UnitReady,
    WeftError,
)
from fabric.transport import FeatureSource, Plane

PROMISED_SHARE = 0.9
"""The lease that a worker is promised lasts this share of the encoder's own lease. The worker counts from receipt, so
the promised lease must end before the encoder's lease does."""


@dataclass(slots=True, eq=False)
class Call:
    """A `Call` is an open encode call. `done` is set when every item has its result. An item that occurs twice in one
    request is encoded once."""

    turn: CallTurn
    request: EncodeRequest
    done: asyncio.Future[None]
    waiters: list[EncodeWaiter] = field(default_factory=list)
    trace: list[TraceEvent] = field(default_factory=list)
    _index_to_result: dict[int, ItemResult] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.turn.call

    @property
    def num_open(self) -> int:
        """Counts the items without a result."""
        return len(self.request.items) - len(self._index_to_result)

    @property
    def attempt_id(self) -> AttemptId:
        return AttemptId(self.request.request_id, self.request.attempt)

    def is_open(self, waiter: EncodeWaiter) -> bool:
        return waiter.item.index not in self._index_to_result

    def succeed(self, waiter: EncodeWaiter, now_s: float, *, is_cache_hit: bool) -> None:
        """Records the result of the waiter's item after all its units were announced."""
        times = StageTimes(
            queue_s=waiter.waits.idle_s,
            decode_s=waiter.decode_s,
            preprocess_s=waiter.preprocess_s,
            encode_s=waiter.encode_s,
            batch_items=waiter.batch_items,
            batch_cost=waiter.batch_cost,
            is_cache_hit=is_cache_hit,
            device_prepare_s=waiter.device_prepare_s,
            decode_wait_s=waiter.waits.decode_s,
            device_wait_s=waiter.waits.device_s,
            device_prepare_cost=waiter.device_prepare_cost,
            num_passes=waiter.num_passes,
            is_shared=waiter.is_shared,
            total_s=now_s - waiter.received_s,
        )
        for item in self._same(waiter.item):
            is_first = item.index == waiter.item.index
            self._note(ItemResult(item.index, times if is_first else StageTimes(is_cache_hit=True)))

    def fail(self, item: MediaItem, error: WeftError) -> None:
        """Records that the item can't be encoded; the other items go on. The error names the item's own part of its
        request."""
        for same in self._same(item):
            message = error.message
            if error.param:  # if the failure is shared, this names a part of another request
                message = message.replace(error.param, same.part, 1)
            info = ErrorInfo(error.code, message, same.part, error.retry_after_s)
            self._note(ItemResult(same.index, StageTimes(), info))

    def result(self, encoder_id: MemberId) -> EncodeResult:
        items = tuple(self._index_to_result[index] for index in sorted(self._index_to_result))
        return EncodeResult(encoder_id, items, tuple(self.trace))

    def _same(self, item: MediaItem) -> list[MediaItem]:
        return [other for other in self.request.items if other.mm_hash == item.mm_hash]

    def _note(self, result: ItemResult) -> None:
        self._index_to_result[result.index] = result
        if len(self._index_to_result) == len(self.request.items) and not self.done.done():
            self.done.set_result(None)


class Announcer:
    """Announces to a worker that a unit can be pulled, with a lease, a ticket and one message."""

    def __init__(
        self, encoder_id: MemberId, plane: Plane, source: FeatureSource, table: FeatureTable, lease_s: float
    ) -> None:
        self._encoder_id = encoder_id
        self._plane = plane
        self._source = source
        self._table = table
        self._promised_s = lease_s * PROMISED_SHARE

    def announce(self, waiter: EncodeWaiter, unit: UnitKey, spec: FeatureSpec) -> bool:
        """Leases a ready unit to the worker of `waiter`, an item that waits for the unit, and sends `UnitReady`.
        Returns False if the message could not be queued; then nothing stays leased."""
        worker_id, address = waiter.destination.worker_id, waiter.destination.address
        key = LeaseKey(worker_id, waiter.attempt_id, unit)
        slot = self._table.lease(key, waiter.router_id)
        shape = spec.shape(waiter.item.unit_tokens[unit.unit], waiter.item.num_levels)
        ticket = self._source.ticket(slot, shape, spec.dtype, self._promised_s)
        request_id, attempt = waiter.attempt_id
        message = UnitReady(self._encoder_id, self._plane.address, request_id, attempt, unit, ticket)
        if self._plane.send(address, message):
            return True
        self._table.release(key, slot.generation)
        return False

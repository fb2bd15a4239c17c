"""Announces to a worker that a unit can be pulled, with a lease, a ticket and one message. It knows nothing of queues
or models.
"""

from __future__ import annotations

from encoder_pool.planning.encode_job import EncodeWaiter
from encoder_pool.planning.features import FeatureSpec, FeatureTable
from encoder_pool.planning.lease_book import LeaseKey
from fabric.channel import FeatureSource
from fabric.ids import MemberId, UnitKey
from fabric.messages import UnitReady
from fabric.plane import Plane

PROMISED_SHARE = 0.9
"""The lease that a worker is promised lasts this share of the encoder's own lease. The worker counts from receipt, so
the promised lease must end before the encoder's lease does."""


class Announcer:
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

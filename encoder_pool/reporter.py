"""Keeps routers informed: sends gauges and cache events to every router that has sent a heartbeat. It lives in the
event loop.

It knows nothing of what the numbers mean; the service passes them in.
"""

from __future__ import annotations

from collections.abc import Iterable

from encoder_pool.planning.feature_log import FeatureLog
from fabric.clock import Clock
from fabric.ids import AttemptId, MemberId
from fabric.leases import LeaseTable
from fabric.messages import EncoderReport, PlaneMessage, RouterHeartbeat
from fabric.plane import Plane


class EncoderReporter:
    def __init__(self, plane: Plane, log: FeatureLog, clock: Clock) -> None:
        self._plane = plane
        self._log = log
        self._router_to_address: dict[MemberId, str] = {}
        self._leases: LeaseTable[MemberId] = LeaseTable(clock)
        self._ended: list[AttemptId] = []
        self.seq = 0
        """Holds the sequence number of the last report that was sent."""

    def heartbeat(self, message: RouterHeartbeat) -> bool:
        """Renews a router's lease. Returns True for a new router, which is then subscribed and receives a snapshot of
        the cache."""
        self._leases.renew(message.router_id, message.lease_s)
        if self._router_to_address.get(message.router_id) == message.address:
            return False
        self._router_to_address[message.router_id] = message.address
        self.send_snapshot(message.address)
        return True

    def expired_routers(self) -> list[MemberId]:
        """Removes the routers whose lease has run out from the subscriptions, and returns them."""
        expired = self._leases.expired()
        for router_id in expired:
            self._router_to_address.pop(router_id, None)
        return expired

    def forget(self, router_id: MemberId) -> None:
        self._leases.drop(router_id)
        self._router_to_address.pop(router_id, None)

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
            self._send_all(message)

    def publish_report(self, report: EncoderReport) -> None:
        self._ended.clear()
        self.seq = report.seq
        self._send_all(report)

    def _send_all(self, message: PlaneMessage) -> None:
        for address in self._router_to_address.values():
            self._plane.send(address, message)

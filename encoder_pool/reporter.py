"""Sends gauges and cache events to the routers that the encoder listens to. It lives in the event loop.

It knows nothing of what the numbers mean; the service passes them in.
"""

from __future__ import annotations

from collections.abc import Iterable

from encoder_pool.planning.feature_log import FeatureLog
from fabric.ids import AttemptId
from fabric.messages import EncoderReport
from fabric.plane import Plane
from fabric.router_table import RouterTable


class EncoderReporter:
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

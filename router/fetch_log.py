"""Counts and records what is fetched for a request. The module knows nothing of how a file is fetched."""

from __future__ import annotations

from fabric.contracts import Clock
from router.fetch import FetchedFile
from router.observe import RequestTrace, RouterMetrics
from router.run import Ticket


class FetchLog:
    """A `FetchLog` counts what is fetched for a request in the budget for bodies, and records the fetches in its
    trace and in the metrics (a `FetchAccount`). No URL is recorded, because it may contain a secret."""

    def __init__(self, ticket: Ticket, tenant: str, trace: RequestTrace, clock: Clock, metrics: RouterMetrics) -> None:
        self.take = ticket.grow
        self.tenant = tenant
        self.now = clock.now
        self._trace = trace
        self._metrics = metrics

    def ended(self, part: str, began_s: float, file: FetchedFile | None, code: str) -> None:
        num_bytes, is_cached = (0, False) if file is None else (len(file.data), file.is_cached)
        self._trace.add("fetched", from_s=began_s, part=part, num_bytes=num_bytes, is_cached=is_cached, code=code)
        self._metrics.observe_fetch("cached" if is_cached else code, self.now() - began_s, num_bytes)

"""Chooses for each link how bytes reach a device: directly, or staged in pinned memory of the host.

A transport may be able to write into a device's memory and still be slow at it, and it says so nowhere: UCX reads over
TCP where a pair of devices has no NVLink, or where memory came from an allocator that maps it piece by piece (0.3 GB/s
instead of 200 in NIXL's issue 1754). So a sink *measures* a link at its first contact: it reads the same bytes on both
routes, each once to warm it up and once by the clock, and then takes the faster route. A link is a source together with
the kind of memory in which its payload lies.

The module is pure: the caller reads, and passes sizes and times in. It knows nothing of memory or transports.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from fabric.contracts import MemoryKind

PROBE_BYTES = 4 << 20
"""A measurement reads at most this much: at 0.3 GB/s, the slowest seen, four reads of it take 60 ms."""
SIZE_RATIO = 4
"""A measurement with fewer bytes than PROBE_BYTES holds for payloads of at most this many times its size: with small
ones the time to begin decides, and with large ones the bandwidth."""
STAGED_GAIN = 1.1
"""The staged route must be faster by this factor, because it also takes host memory and bandwidth."""

SLOW_BYTES_PER_S = 1e9
SLOW_FROM_BYTES = 1 << 20
"""A link to a device that reads a payload of this size at less than this rate is slow on either route: host memory is
read faster between two processes (8 MiB in 1 ms), and over the networks for which devices are bought."""


class Route(enum.Enum):
    DIRECT = enum.auto()
    """The transport writes into the memory where the payload shall lie."""
    STAGED = enum.auto()
    """The transport writes into pinned memory of the host, and a copy brings the bytes to the device."""


class LinkKey(NamedTuple):
    source: str
    kind: MemoryKind
    """Names the kind of the source's memory."""


class Probe(NamedTuple):
    """A `Probe` is one read of a measurement."""

    route: Route
    nbytes: int
    is_timed: bool


@dataclass(slots=True)
class _Link:
    measured_bytes: int = 0
    is_being_measured: bool = False
    route_to_rate: dict[Route, float] = field(default_factory=dict)
    """Maps each route that was tried to its bytes per second, which are 0 if it failed."""

    def serves(self, nbytes: int) -> bool:
        """Returns whether the measurement holds for payloads of that size."""
        return self.measured_bytes >= PROBE_BYTES or nbytes <= SIZE_RATIO * self.measured_bytes


class LinkRoutes:
    """Keeps what was measured of each link of one sink. It is not thread-safe."""

    def __init__(self, *, has_staging: bool) -> None:
        """Creates it without measurements. Without staging, every route is direct and nothing is measured."""
        self._has_staging = has_staging
        self._links: dict[LinkKey, _Link] = {}

    def begin(self, key: LinkKey, nbytes: int) -> list[Probe] | None:
        """Returns what to read before a payload of `nbytes`: nothing, or the probes of a measurement, which the caller
        ends by `end_measurement`. Returns None while another payload measures the link, because reads at the same time
        would spoil the measurement."""
        if not self._has_staging:
            return []
        link = self._links.setdefault(key, _Link())
        if link.is_being_measured:
            return None
        if link.serves(nbytes):
            return []
        link.is_being_measured, link.measured_bytes = True, 0
        link.route_to_rate.clear()
        size = min(nbytes, PROBE_BYTES)
        return [Probe(route, size, is_timed) for route in Route for is_timed in (False, True)]

    def note(self, key: LinkKey, probe: Probe, seconds: float) -> None:
        """Records that a probe was read."""
        link = self._links.get(key)
        if link is not None and probe.is_timed and link.route_to_rate.get(probe.route) != 0.0:
            link.route_to_rate[probe.route] = probe.nbytes / max(seconds, 1e-9)
            link.measured_bytes = probe.nbytes

    def note_failure(self, key: LinkKey, route: Route) -> None:
        """Records that a probe failed, so its route is not taken if there is another one."""
        if key in self._links:
            self._links[key].route_to_rate[route] = 0.0

    def end_measurement(self, key: LinkKey) -> None:
        """Lets other payloads begin. A measurement that tried one route alone (because its pull was given up) counts as
        none. It does nothing for a link that is not being measured."""
        link = self._links.get(key)
        if link is None or not link.is_being_measured:
            return
        link.is_being_measured = False
        if len(link.route_to_rate) < len(Route):
            link.measured_bytes = 0
            link.route_to_rate.clear()

    def route(self, key: LinkKey) -> Route:
        """Returns the route to take now."""
        rates = self._links[key].route_to_rate if key in self._links else {}
        is_staged = rates.get(Route.STAGED, 0.0) > STAGED_GAIN * rates.get(Route.DIRECT, 0.0)
        return Route.STAGED if is_staged else Route.DIRECT

    def rates(self, key: LinkKey) -> dict[Route, float]:
        """Returns the measured bytes per second of each route."""
        return dict(self._links[key].route_to_rate) if key in self._links else {}

    def is_slow(self, key: LinkKey) -> bool:
        """Returns whether the faster route was measured to be slow."""
        link = self._links.get(key, _Link())
        fastest = max(link.route_to_rate.values(), default=0.0)
        return link.measured_bytes >= SLOW_FROM_BYTES and fastest < SLOW_BYTES_PER_S

    def forget(self, source: str) -> None:
        """Forgets a source's links: when it comes back, it may be elsewhere."""
        self._links = {key: link for key, link in self._links.items() if key.source != source}

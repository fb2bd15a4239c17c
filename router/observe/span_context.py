"""Reads and writes the W3C's trace context, and decides which requests are sampled.

A client that traces its own requests sends `traceparent`; the spans of its request then belong to its trace. The
decision depends on the trace's id alone, so that all routers, and other services with the same ratio, take the same
traces. The module reads no clock of its own, and knows nothing of what a span contains.

Source: W3C Trace Context, level 1 (https://www.w3.org/TR/trace-context-1), and the TraceIdRatioBased sampler of
OpenTelemetry's specification.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_FORBIDDEN_VERSION = "ff"
_SAMPLED = 1
_RATIO_BITS = 64


@dataclass(frozen=True, slots=True)
class SpanContext:
    """A `SpanContext` names the span of a request: the trace that it belongs to, and the span above it."""

    trace_id: int
    """Holds 128 bits, not all zero."""
    span_id: int
    """Holds 64 bits, not all zero."""
    is_sampled: bool
    parent_id: int | None = None
    """Names the client's span; None if the client sent none."""

    @property
    def trace_hex(self) -> str:
        return f"{self.trace_id:032x}"

    def header(self) -> str:
        """Returns the value of `traceparent` or `traceresponse` for this span."""
        return f"00-{self.trace_hex}-{self.span_id:016x}-{int(self.is_sampled):02x}"


def read_traceparent(header: str | None) -> SpanContext | None:
    """Returns the client's span. An invalid header counts as none, as the recommendation demands. A later version may
    have more parts, which are ignored."""
    found = _TRACEPARENT.fullmatch(header.strip()) if header and len(header) <= 512 else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == _FORBIDDEN_VERSION or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return SpanContext(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))


def beside(span: SpanContext | None) -> SpanContext | None:
    """Returns another span of the same trace with the same parent, for a further request of one exchange."""
    return None if span is None else replace(span, span_id=new_span_id())


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """Says where spans go, and how many."""

    endpoint: str | None = None
    """Names the URL that takes OTLP over HTTP; None turns tracing off."""
    sample_ratio: float = 0.1
    """Holds the share of the requests without a client's span that are sampled."""
    follows_clients: bool = True
    """Says whether a request with a client's span is sampled exactly if the client samples it. If not, the ratio
    decides; its spans still belong to the client's trace."""
    max_requests_per_s: float = 50.0
    """Limits the sampled requests of each router, so that no client can make it export all of them."""
    headers: tuple[tuple[str, str], ...] = ()
    """Holds the headers that the collector asks for, such as a key."""
    timeout_s: float = 10.0
    """Limits the time of one call to the collector."""


class Sampler:
    """Gives each request its span, and decides whether it is exported."""

    def __init__(self, settings: TracingSettings, now: Callable[[], float]) -> None:
        self._settings = settings
        self._now = now
        self._burst = max(settings.max_requests_per_s, 1.0)
        self._left = self._burst
        self._filled_at_s = now()

    def begin(self, client: SpanContext | None) -> SpanContext:
        """Returns the span of a request. A client's span is its parent, and its trace that of the request."""
        trace_id = client.trace_id if client is not None else secrets.randbits(127) + 1
        if client is not None and self._settings.follows_clients:
            is_wanted = client.is_sampled
        else:
            is_wanted = (trace_id & (2**_RATIO_BITS - 1)) < round(self._settings.sample_ratio * 2**_RATIO_BITS)
        return SpanContext(
            trace_id, new_span_id(), is_wanted and self._has_room(), None if client is None else client.span_id
        )

    def _has_room(self) -> bool:
        now_s = self._now()
        self._left = min(self._burst, self._left + (now_s - self._filled_at_s) * self._settings.max_requests_per_s)
        self._filled_at_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def new_span_id() -> int:
    """Returns a random id of a span."""
    return secrets.randbits(63) + 1

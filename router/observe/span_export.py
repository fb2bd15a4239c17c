"""Sends the spans of sampled requests to a collector, as OTLP over HTTP.

A `SpanExport` takes the record of a request when it has ended, and does everything else in a thread of its own: it
waits a moment for late answers of members, makes spans of the record (`record_spans`), and sends them in batches. The
event loop pays an append for a sampled request, and nothing for another. What the collector does not take in time is
dropped and counted, and no request waits for it.

OpenTelemetry's SDK, which Ray brings along, writes the protocol and repeats failed calls. It is imported when the first
spans are sent. The module knows nothing of how a request runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.observe.record_spans import RecordSpan, record_spans
from router.observe.span_context import Sampler, SpanContext, TracingSettings, new_span_id

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

_LOG = logging.getLogger(__name__)
MAX_WAITING = 2048
"""This many records wait at most; a record takes some tens of kilobytes."""
SETTLE_S = 1.0
"""A record waits this long, because an encoder's answer may come after the end of its request."""
SPAN_THREAD = "weft-spans"
"""Names the thread that makes spans and sends them."""
MAX_BATCH_SPANS = 512
IDLE_S = 1.0
"""This much time is between two batches, because a call to the collector takes as much processor time as the spans of
five requests."""
MAX_RESOURCES = 4096
"""The resources of this many members are kept; members come and go."""


class EndedRecord(Protocol):
    """An `EndedRecord` is the record of a request, with the span that it was given."""

    @property
    def span(self) -> SpanContext | None: ...

    def for_spans(self) -> dict[str, object]: ...


class ExportCounts(NamedTuple):
    """Holds what became of sampled requests and their spans since the start."""

    num_spans_sent: int = 0
    num_spans_failed: int = 0
    """Counts the spans that the collector did not take."""
    num_requests_dropped: int = 0
    """Counts the requests whose records came faster than they could be sent."""


class SpanExport(Collector):
    """Samples requests, and exports the spans of those that are sampled. Without an endpoint it does nothing. It also
    tells Prometheus what became of them."""

    def __init__(
        self,
        settings: TracingSettings,
        facts: Mapping[str, str],
        now: Callable[[], float] = time.monotonic,
        make_exporter: Callable[[TracingSettings], SpanExporter] | None = None,
    ) -> None:
        """Takes `facts`, which the resource of every span has, and a function that makes the SDK's exporter, which
        tests replace."""
        self._settings = settings
        self._facts = dict(facts)
        self._now = now
        self._make_exporter = make_exporter or _otlp_exporter
        self._sampler = Sampler(settings, now)
        self._waiting: deque[tuple[float, EndedRecord]] = deque()
        self._thread: threading.Thread | None = None
        self._otel: OtelSpans | None = None
        """Is made when the first spans are sent."""
        self._closing = threading.Event()
        self._num_dropped = self._num_sent = self._num_failed = 0

    @property
    def is_on(self) -> bool:
        return self._settings.endpoint is not None

    @property
    def counts(self) -> ExportCounts:
        return ExportCounts(self._num_sent, self._num_failed, self._num_dropped)

    def collect(self) -> Iterator[Metric]:
        spans = CounterMetricFamily(
            "weft_router_spans", "Spans that were sent to the collector, or that it did not take.", labels=["outcome"]
        )
        spans.add_metric(["sent"], self._num_sent)
        spans.add_metric(["failed"], self._num_failed)
        yield spans
        yield CounterMetricFamily(
            "weft_router_sampled_requests_dropped",
            "Sampled requests of which no span was sent, because they ended faster than spans are sent.",
            self._num_dropped,
        )

    def reconfigure(self, settings: TracingSettings) -> None:
        """Takes other settings. Records that wait are sent with these."""
        if settings != self._settings:
            self._settings, self._sampler = settings, Sampler(settings, self._now)

    def begin(self, client: SpanContext | None) -> SpanContext | None:
        """Returns the span of a request that begins, or None if tracing is off."""
        return self._sampler.begin(client) if self.is_on else None

    def end(self, record: EndedRecord) -> None:
        """Takes the record of a request that has ended. It is called in the event loop, and does not block."""
        if record.span is None or not record.span.is_sampled or self._closing.is_set():
            return
        if len(self._waiting) >= MAX_WAITING:
            self._num_dropped += 1
            return
        self._waiting.append((self._now(), record))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=SPAN_THREAD, daemon=True)
            self._thread.start()

    def close(self, limit_s: float = 5.0) -> None:
        """Sends what waits, for at most `limit_s`, and ends the thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(limit_s)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        exporter, used = None, self._settings
        while True:
            is_last = self._closing.wait(IDLE_S)
            records, settings = self._settled(take_all=is_last), self._settings
            if exporter is None or used is not settings:
                if exporter is not None:
                    exporter.shutdown()
                exporter, used = self._make_exporter(settings), settings
            if settings.endpoint is not None:
                self._send(exporter, records)
            if is_last:
                exporter.shutdown()
                return

    def _settled(self, *, take_all: bool) -> list[EndedRecord]:
        taken: list[EndedRecord] = []
        while self._waiting and (take_all or self._waiting[0][0] + SETTLE_S <= self._now()):
            taken.append(self._waiting.popleft()[1])
        return taken

    def _send(self, exporter: SpanExporter, records: Sequence[EndedRecord]) -> None:
        batch: list[ReadableSpan] = []
        for record in records:
            batch += self._spans_of(record)
            if len(batch) >= MAX_BATCH_SPANS:
                self._export(exporter, batch)
                batch = []
        if batch:
            self._export(exporter, batch)

    def _spans_of(self, record: EndedRecord) -> list[ReadableSpan]:
        assert record.span is not None
        if self._otel is None:
            self._otel = OtelSpans(self._facts)
        try:
            return self._otel.of(record_spans(record.for_spans()), record.span)
        except Exception:  # It must not end the thread, and the records of other requests are fine.
            _LOG.exception("no spans can be made of a request of the trace %s", record.span.trace_hex)
            return []

    def _export(self, exporter: SpanExporter, batch: Sequence[ReadableSpan]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        if exporter.export(batch) is SpanExportResult.SUCCESS:
            self._num_sent += len(batch)
        else:
            self._num_failed += len(batch)


def _otlp_exporter(settings: TracingSettings) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(
        endpoint=settings.endpoint, headers=dict(settings.headers) or None, timeout=settings.timeout_s
    )


class OtelSpans:
    """Makes spans as the SDK has them. Each has the service `weft-router`, `weft-encoder` or `weft-worker`, and the
    member's id as its instance.

    It keeps the resource of each member, with its hash: the SDK groups spans by resource, and would write each one as
    JSON to hash it, for every span."""

    def __init__(self, facts: Mapping[str, str]) -> None:
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._facts = dict(facts)
        self._scope = InstrumentationScope("weft", facts.get("service.version"))
        self._resource_type = _hashed_resource_type()
        self._resources: dict[tuple[str, str], Resource] = {}

    def of(self, spans: Sequence[RecordSpan], root: SpanContext) -> list[ReadableSpan]:
        """Returns the spans of one request. The first one is the request's, with the ids of `root`."""
        from opentelemetry import trace
        from opentelemetry.sdk.trace import Event, ReadableSpan

        def context(span_id: int) -> trace.SpanContext:
            return trace.SpanContext(root.trace_id, span_id, False, sampled)

        sampled, fine = trace.TraceFlags(trace.TraceFlags.SAMPLED), trace.Status()
        contexts = {id(span): context(root.span_id if span.parent is None else new_span_id()) for span in spans}
        client = None if root.parent_id is None else context(root.parent_id)
        return [
            ReadableSpan(
                span.name,
                contexts[id(span)],
                client if span.parent is None else contexts[id(span.parent)],
                self._resource(span.kind, span.member_id),
                span.attributes | ({"error.type": span.error} if span.error else {}),
                [Event(name, event_attributes, _ns(at_s)) for name, at_s, event_attributes in span.events],
                kind=trace.SpanKind.SERVER if span.parent is None else trace.SpanKind.INTERNAL,
                status=trace.Status(trace.StatusCode.ERROR, span.error) if span.error else fine,
                start_time=_ns(span.begin_s),
                end_time=_ns(span.end_s),
                instrumentation_scope=self._scope,
            )
            for span in spans
        ]

    def _resource(self, kind: str, member_id: str) -> Resource:
        found = self._resources.get((kind, member_id))
        if found is None:
            if len(self._resources) >= MAX_RESOURCES:
                self._resources.clear()
            own = {"service.name": f"weft-{kind}", "service.instance.id": member_id}
            found = self._resources[kind, member_id] = self._resource_type({**self._facts, **own})
        return found


def _hashed_resource_type() -> type[Resource]:
    """Returns the SDK's resource with a hash that is computed once."""
    from opentelemetry.sdk.resources import Resource

    class HashedResource(Resource):
        """A `HashedResource` keeps its hash, since its attributes can't change."""

        _kept: int | None = None

        def __hash__(self) -> int:
            if self._kept is None:
                self._kept = super().__hash__()
            return self._kept

    return HashedResource


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)

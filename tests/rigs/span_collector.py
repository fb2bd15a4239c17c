"""Is a collector of spans: it takes OTLP over HTTP on the loopback, as an OpenTelemetry collector does, and keeps what
it gets."""

from __future__ import annotations

import contextlib
import gzip
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class SpanCollector:
    url: str = ""
    spans: list[tuple[dict[str, str], Any]] = field(default_factory=list)
    """Holds (attributes of the resource, span)."""
    headers: list[dict[str, str]] = field(default_factory=list)

    def of_trace(self, trace_id: str) -> list[tuple[dict[str, str], Any]]:
        return [each for each in list(self.spans) if each[1].trace_id.hex() == trace_id]

    def wait(self, is_there: Callable[[], bool], limit_s: float = 30.0) -> None:
        deadline_s = time.monotonic() + limit_s
        while not is_there():
            assert time.monotonic() < deadline_s, f"{len(self.spans)} spans have come"
            time.sleep(0.05)


@contextlib.contextmanager
def span_collector() -> Iterator[SpanCollector]:
    collector = SpanCollector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.headers.append(dict(self.headers))
            message = ExportTraceServiceRequest.FromString(body)
            for resource in message.resource_spans:
                attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
                collector.spans += [(attributes, span) for scope in resource.scope_spans for span in scope.spans]
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()

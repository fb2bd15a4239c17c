"""Guards the HTTP parser of a router's server: `GuardedProtocol` is uvicorn's protocol on httptools, with limits on
what a client's bytes may cost, and `ConnectionGuard` keeps the connections of one server within their number and their
time.

The parser (llhttp, which Node.js uses too) is strict about the syntax of HTTP. It has no limits of its own, so this
module counts headers, chunks and bytes while it parses. A request that breaks a limit or the syntax is answered by this
module, in OpenAI's format, and never reaches the app; if its body breaks them, the app learns that its client has left.
"""

from __future__ import annotations

import asyncio
import resource
from operator import itemgetter
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from deploy.http_limits import ConnectionPace, HttpLimits, Lateness, ReadPhase
from fabric.contracts import mint_request_id
from router.api import envelope

BYTES_PER_CHUNK = 16
"""Limits the bytes that a chunk has besides its data: the line of its size, and its end."""
MAX_DROPPED_BYTES = 2**20
"""Limits what a refused client may still send."""
KEPT_FILES = 256
"""Counts the open files that stay free for other uses than connections."""
UPGRADE_HEADERS = (b"upgrade", b"http2-settings")
STATUS_TO_CODE = {
    400: "invalid_request",
    408: "request_timeout",
    414: "path_too_long",
    431: "headers_too_large",
    505: "http_version_not_supported",
}
Refusal = tuple[int, str]
"""Holds a status and a message."""
LATENESS_TO_REFUSAL: dict[Lateness, Refusal] = {
    Lateness.HEAD: (408, "the headers of the request took too long"),
    Lateness.BODY: (408, "the body of the request took too long"),
}


class ConnectionGuard:
    """A `ConnectionGuard` holds the open connections of one server, and ends those that are too slow."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.connections: dict[GuardedProtocol, None] = {}
        self._silent: dict[GuardedProtocol, None] = {}
        """Holds the connections that have sent no request yet, the oldest first."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        kept = min(KEPT_FILES, files // 2)
        self._most = limits.max_connections if files < 0 else min(limits.max_connections, files - kept)
        times = limits.header_timeout_s, limits.body_timeout_s, limits.write_timeout_s, limits.linger_s
        self._interval_s = min(1.0, min(times) / 4)

    def admit(self, connection: GuardedProtocol) -> bool:
        """Adds a connection and returns True, or returns False if there are too many. A full server first closes the
        connection that has been there longest without a request: it is the one that nobody misses."""
        if len(self.connections) >= self._most:
            oldest = next(iter(self._silent), None)
            if oldest is None:
                return False
            self.remove(oldest)
            oldest.transport.abort()
        self.connections[connection] = None
        self._silent[connection] = None
        return True

    def heard(self, connection: GuardedProtocol) -> None:
        """Notes that a connection has sent a request."""
        self._silent.pop(connection, None)

    def remove(self, connection: GuardedProtocol) -> None:
        """Removes a connection; repeating it is harmless."""
        self.connections.pop(connection, None)
        self._silent.pop(connection, None)

    async def run(self) -> None:
        """Ends slow connections until it is cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            self.check(asyncio.get_running_loop().time())

    def check(self, now: float) -> None:
        """Ends the connections that are too slow at the time `now` of the event loop, and those for which most waits
        if too much waits for all together."""
        for connection in list(self.connections):
            connection.check(now)
        waiting = [(connection.num_unsent, connection) for connection in self.connections]
        excess = sum(num_unsent for num_unsent, _ in waiting) - self.limits.max_unsent_bytes
        for num_unsent, connection in sorted(waiting, key=itemgetter(0), reverse=True):
            if excess <= 0:
                break
            excess -= num_unsent
            connection.transport.abort()


class GuardedProtocol(HttpToolsProtocol):
    """A `GuardedProtocol` is one connection of a client."""

    def __init__(self, *args: Any, guard: ConnectionGuard, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=False)
        self._guard, self._limits = guard, guard.limits
        self._pace = ConnectionPace(self.loop.time())
        self._refusal: Refusal = (400, "the request is not valid HTTP")
        self._num_wire_bytes = 0
        """Counts what came of the part that is being read, the headers or the body. Where a part begins in the middle
        of a read, the rest of that read is not counted."""
        self._is_new = True
        """Says that no message has begun in this read, and that none was open before it."""
        self._num_head_bytes = self._num_headers = 0
        self._num_body_bytes = self._num_chunks = 0
        self._is_upgrade = self._is_chunked = False
        self._running: RequestResponseCycle | None = None
        """Holds the exchange that the app has; `cycle` is the latest one that was read."""

    # ------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if not self._guard.admit(self):
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.remove(self)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        pace = self._pace
        pace.took(len(data))
        self._num_wire_bytes += len(data)
        if pace.phase is ReadPhase.REFUSED:
            if self._num_wire_bytes > MAX_DROPPED_BYTES:
                self.transport.abort()
            return
        try:
            self._feed(data)
            self._check_sizes()
        except httptools.HttpParserError:
            self._refuse(self._refusal)

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._is_new = self._is_new or self._pace.phase is ReadPhase.IDLE
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._is_upgrade = False
            self._feed(self._head_without_upgrade() + data[upgrade.args[0] :])
        if self._pace.phase is ReadPhase.IDLE:
            # Empty lines may stand before a request; the client has no longer for them than for a request.
            self._pace.enter(ReadPhase.HEAD, self.loop.time())

    def _check_sizes(self) -> None:
        """Raises HttpParserError if the message that is being read has too many bytes, which no callback sees."""
        phase, limits = self._pace.phase, self._limits
        if phase is ReadPhase.HEAD and self._num_wire_bytes > limits.max_header_bytes:
            raise self._broken(431, f"the headers have more than {limits.max_header_bytes} bytes")
        if phase is ReadPhase.BODY and self._is_chunked:
            own = self._num_body_bytes + BYTES_PER_CHUNK * self._num_chunks
            if self._num_wire_bytes - own > limits.max_extra_bytes:
                raise self._broken(400, "the body has too long extensions of its chunks or trailers")

    def _head_without_upgrade(self) -> bytes:
        """Returns the head of a request that asks for another protocol, without this wish: a server may ignore it, and
        the parser would take the body for that of the other protocol."""
        kept = []
        for name, value in self.headers:
            if name == b"connection":
                tokens = (token.strip() for token in value.split(b","))
                value = b", ".join(token for token in tokens if token.lower() not in UPGRADE_HEADERS)
            if name not in UPGRADE_HEADERS:
                kept.append(b"%s: %s\r\n" % (name, value))
        version = self.parser.get_http_version().encode()
        method, url = self.parser.get_method(), self.url
        self.parser = httptools.HttpRequestParser(self)
        return b"%s %s HTTP/%s\r\n%s\r\n" % (method, url, version, b"".join(kept))

    # ------------------------------------------------------------ what the parser finds

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._is_new:
            self._num_wire_bytes = 0
        self._is_new = False
        self._num_head_bytes = self._num_headers = 0
        self._num_body_bytes = self._num_chunks = 0
        if self._pace.phase is not ReadPhase.HEAD:
            self._pace.enter(ReadPhase.HEAD, self.loop.time())
            self._pace.took(1)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._num_head_bytes += len(url)
        if len(self.url) > self._limits.max_target_bytes:
            raise self._broken(414, f"the path has more than {self._limits.max_target_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header, and drops a trailer: the app already has the headers."""
        limits = self._limits
        self._num_headers += 1
        self._num_head_bytes += len(name) + len(value) + 4
        if self._num_headers > limits.max_headers:
            raise self._broken(431, f"the request has more than {limits.max_headers} headers")
        if self._num_head_bytes > limits.max_header_bytes:
            raise self._broken(431, f"the headers have more than {limits.max_header_bytes} bytes")
        if self._pace.phase is ReadPhase.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise self._broken(505, "the server speaks HTTP/1.1 and HTTP/1.0")
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (not num_hosts and version == "1.1"):
            raise self._broken(400, f"a request must have one Host header, not {num_hosts}")
        if self.parser.get_method() == b"CONNECT":
            raise self._broken(400, "the server is no proxy")
        if self.parser.should_upgrade():
            self._is_upgrade = True
            return
        if len(self.pipeline) >= self._limits.max_pipelined:
            raise self._broken(400, "too many requests wait for the answer to an earlier one")
        self._is_chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        super().on_headers_complete()
        self._guard.heard(self)
        self._num_headers = self._num_head_bytes = self._num_wire_bytes = 0
        self._pace.enter(ReadPhase.BODY, self.loop.time())
        # A connection that is not read would not show that its client has left.
        self.flow.resume_reading()

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        limits = self._limits
        if self._num_chunks > limits.max_small_chunks + self._num_body_bytes // limits.large_chunk_bytes:
            raise self._broken(400, "the body has too many small chunks")

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_upgrade:
            self._pace.enter(ReadPhase.ANSWER, self.loop.time())
            super().on_message_complete()
            if self.cycle.response_complete and not self.pipeline:
                self._pace.enter(ReadPhase.IDLE, self.loop.time())

    def on_response_complete(self) -> None:
        if self._pace.phase is ReadPhase.ANSWER and not self.pipeline:
            self._pace.enter(ReadPhase.IDLE, self.loop.time())
        super().on_response_complete()

    # ------------------------------------------------------------ refusals

    @property
    def num_unsent(self) -> int:
        """Counts the bytes that wait for the client."""
        return int(self.transport.get_write_buffer_size())

    def check(self, now: float) -> None:
        """Ends the connection if its client is too slow at the time `now`."""
        is_whole = self.cycle is not None and self.cycle.response_complete
        is_stalled = self.flow.write_paused or is_whole or self._pace.phase is ReadPhase.REFUSED
        num_unsent = self.num_unsent if is_stalled else 0
        late = self._pace.lateness(self._limits, now, self.flow.read_paused, num_unsent, is_whole)
        if late in (Lateness.READING, Lateness.REFUSED):
            self.transport.abort()
        elif late is Lateness.SILENT:
            self.transport.close()
        elif late is not None:
            self._refuse(LATENESS_TO_REFUSAL[late])

    def _broken(self, status: int, message: str) -> httptools.HttpParserError:
        """Returns the error that ends the parsing, and keeps what the client is told."""
        self._refusal = status, message
        return httptools.HttpParserError(message)

    def _refuse(self, refusal: Refusal) -> None:
        """Answers a request that is not to be read any further, and closes the connection. If the answer to an earlier
        request is still being made, the client gets that one, and the connection closes after it. If the app has
        received the request already, its client has disconnected for it."""
        is_in_body = self._pace.phase is ReadPhase.BODY
        self._pace.enter(ReadPhase.REFUSED, self.loop.time())
        self._num_wire_bytes = 0
        cycle = self.cycle
        is_busy = cycle is not None and not cycle.response_complete
        if is_busy and not is_in_body:
            cycle.keep_alive = False
            self._pace.enter(ReadPhase.ANSWER, self.loop.time())
            self.flow.pause_reading()
            return
        can_answer = not is_busy or not (cycle.response_started or self.pipeline)
        if is_busy:
            cycle.disconnected = True
            cycle.message_event.set()
        if not can_answer:
            self.transport.close()
            return
        self._send_refusal(*refusal)

    def _send_refusal(self, status: int, message: str) -> None:
        body = envelope(message, status, STATUS_TO_CODE[status])
        head = (
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"x-request-id: {mint_request_id()}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(STATUS_LINE[status] + head.encode() + body)
        if self.transport.can_write_eof():
            self.flow.resume_reading()
            self.transport.write_eof()
        else:
            self.transport.close()

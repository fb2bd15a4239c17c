"""Implements the HTTP server of a router replica: uvicorn inside the replica's event loop, on a socket that this module
binds.

The replica does not use Ray Serve's proxy (docs/adr/0001-front-end.md), because the proxy reads whole bodies before
this server can apply its limit, and has no back-pressure for slow readers. SO_REUSEPORT lets several router replicas of
one host share the port.

The parser runs in the event loop, so this server limits what a client's bytes may cost it: the size of headers, and the
number of chunks of a body. `MetricsServer` is what encoders and workers serve. The module knows nothing of a router's
app.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Generator
from typing import Any

import h11
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from deploy.config import ClusterConfig
from deploy.tls import TlsFiles, TlsRenewal
from fabric.contracts import ConfigError, EncoderReport, WorkerReport
from router.observe import report_exposition

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CLOSE_S = 2
"""Open connections may take this many seconds to close once every request has ended or was ended. Without this limit, a
client that reads nothing would delay the stop for ever."""
MAX_HEADER_BYTES = 64 * 1024
"""Limits the size of the request line and the headers together."""
HEADER_FRAME_BYTES = 4
"""Counts the colon, the space and the end of the line of a header."""
MAX_SMALL_CHUNKS = 4096
"""Limits the number of chunks of a body. Each chunk takes the parser about five microseconds, so a body of 32 MiB in
chunks of a single byte would take it minutes."""
RENEWAL_S = 5.0
"""The server looks this often whether its certificate was renewed."""
LARGE_CHUNK_BYTES = 256
"""A body may have one chunk beyond `MAX_SMALL_CHUNKS` per this many bytes."""


def bind(host: str, port: int) -> socket.socket:
    """Returns a bound TCP socket; port 0 picks a free one. Raises ConfigError if the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"the server can't listen on {host}:{port}: {error.strerror}") from error
    return sock


def check_port(host: str, port: int) -> None:
    """Raises ConfigError if another program listens on the port, so that the user learns it before models load. `bind`
    can't tell: SO_REUSEPORT lets a second cluster share the port, and clients would then reach either. Port 0 is always
    free."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"the server can't listen on {host}:{port}: {error.strerror}; choose another port with --port"
            ) from error


class _Connection(h11.Connection):
    """Refuses a body in very many small chunks as a violation of the protocol."""

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._max_header_bytes = max_header_bytes
        self._num_chunks = self._num_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            # h11 limits headers only as long as they are incomplete; these may have come in one piece.
            size = len(event.target) + sum(len(name) + len(value) + HEADER_FRAME_BYTES for name, value in event.headers)
            if size > self._max_header_bytes:
                raise h11.RemoteProtocolError("the headers are too large")
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > MAX_SMALL_CHUNKS + self._num_bytes // LARGE_CHUNK_BYTES:
                raise h11.RemoteProtocolError("the body has too many small chunks")
        return event


class _Protocol(H11Protocol):
    max_header_bytes = MAX_HEADER_BYTES

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Connection(self.max_header_bytes)

    def send_400_response(self, msg: str) -> None:
        """Answers 400 to bytes that are not HTTP; if an answer has begun, it closes the connection instead. If the app
        has received the request already, this method signals to the app that its client has disconnected, and what the
        app still sends is dropped."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()


def _protocol_with(limit_bytes: int) -> type[_Protocol]:
    """Returns the protocol with another limit of headers; uvicorn creates protocols from their class alone."""

    class _LimitedProtocol(_Protocol):
        max_header_bytes = limit_bytes

    return _LimitedProtocol


class _Server(uvicorn.Server):
    """Installs no signal handlers, because signals belong to the code that owns the process, not to one of its
    tasks."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """Serves an ASGI app until `stop` is called."""

    def __init__(
        self, app: ASGIApp, host: str, port: int, tls: TlsFiles | None = None, max_header_bytes: int = MAX_HEADER_BYTES
    ) -> None:
        """Binds the port. Raises ConfigError if it is taken, or if the files of `tls` can't be used."""
        self._renewal = None if tls is None else TlsRenewal(tls)
        self._renewing: asyncio.Task[None] | None = None
        self._socket = bind(host, port)
        config = uvicorn.Config(
            app,
            # The process has its own configuration, see `logs`.
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            http=_protocol_with(max_header_bytes),  # uvicorn's other parser takes headers of any size
            ws="none",
            timeout_graceful_shutdown=CLOSE_S,
            ssl_context_factory=None if self._renewal is None else self._context,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="weft-http")
        while not self._server.started:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.01)
        if self._renewal is not None:
            self._renewing = asyncio.create_task(self._renew(self._renewal), name="weft-tls")

    def _context(self, _config: uvicorn.Config, _default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        assert self._renewal is not None
        return self._renewal.context

    async def _renew(self, renewal: TlsRenewal) -> None:
        while True:
            await asyncio.sleep(RENEWAL_S)
            renewal.refresh()

    async def stop(self) -> None:
        """Stops accepting connections, gives open ones `CLOSE_S` seconds to write what they hold, and closes the
        socket. The caller must end the router's requests before this call."""
        if self._renewing is not None:
            self._renewing.cancel()
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


def router_server(app: ASGIApp, config: ClusterConfig) -> HttpServer:
    """Returns the server of a router's app, as the config describes it. Raises ConfigError as `HttpServer` does."""
    server = config.server
    return HttpServer(app, server.host, server.port, TlsFiles.of(server), config.limits.max_header_bytes)


class MetricsServer:
    """Answers `GET /metrics` of a worker or an encoder, on a free port of its own, in the member's event loop."""

    def __init__(self, report: Callable[[], WorkerReport | EncoderReport], host: str) -> None:
        """Takes `report`, which returns the member's present numbers, and `host`, at which it listens."""
        self._report, self._host = report, host
        self._http = HttpServer(self, host, 0)

    async def start(self) -> str:
        """Starts to listen. Returns host and port."""
        await self._http.start()
        return f"{self._host}:{self._http.port}"

    async def stop(self) -> None:
        await self._http.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/metrics":
            response = Response("this member answers only GET /metrics\n", 404)
        elif scope["method"] != "GET":
            response = Response("this member answers only GET /metrics\n", 405)
        else:
            response = Response(report_exposition(self._report()), media_type=METRICS_TYPE)
        await response(scope, receive, send)

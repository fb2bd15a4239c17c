"""Implements the HTTP server of a router replica: uvicorn inside the replica's event loop, on a socket that this module
binds.

The replica does not use Ray Serve's proxy (docs/adr/0001-front-end.md), because the proxy reads whole bodies before
this server can apply its limit, and has no back-pressure for slow readers. SO_REUSEPORT lets several router replicas of
one host share the port.

The parser runs in the event loop, so `http_protocol` limits what a client's bytes may cost it, and how slow a client
may be. `node_metrics` serves the metrics of members with the same server. The module knows nothing of a router's app.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Generator
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from deploy.compose import http_limits
from deploy.config import ClusterConfig
from deploy.http_limits import HttpLimits
from deploy.http_protocol import ConnectionGuard, GuardedProtocol
from deploy.tls import TlsFiles, TlsRenewal
from fabric.contracts import ConfigError

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DEFAULT_LIMITS = HttpLimits()
CLOSE_S = 2
"""Open connections may take this many seconds to close once every request has ended or was ended. Without this limit, a
client that reads nothing would delay the stop for ever."""
RENEWAL_S = 5.0
"""The server looks this often whether its certificate was renewed."""


def bind(host: str, port: int) -> socket.socket:
    """Returns a bound TCP socket; port 0 picks a free one. Raises ConfigError if the address is not available.

    The protocol is named, because asyncio switches Nagle's algorithm off only for sockets that say that they speak TCP.
    With it, each part of an answer would wait until the client has confirmed the one before, 40 ms under Linux.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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


class _Server(uvicorn.Server):
    """Installs no signal handlers, because signals belong to the code that owns the process, not to one of its
    tasks."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """Serves an ASGI app until `stop` is called."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        limits: HttpLimits = DEFAULT_LIMITS,
        tls: TlsFiles | None = None,
        sock: socket.socket | None = None,
    ) -> None:
        """Binds the port, or takes the socket `sock`, which is bound already. Raises ConfigError if the port is taken,
        or if the files of `tls` can't be used."""
        self._renewal = None if tls is None else TlsRenewal(tls)
        self._renewing: asyncio.Task[None] | None = None
        self._socket = bind(host, port) if sock is None else sock
        self._guard = ConnectionGuard(limits)
        config = uvicorn.Config(
            app,
            # The process has its own configuration, see `logs`.
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            http=cast(type[asyncio.Protocol], partial(GuardedProtocol, guard=self._guard)),
            ws="none",
            timeout_graceful_shutdown=CLOSE_S,
            ssl_context_factory=None if self._renewal is None else self._context,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None
        self._guarding: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def num_connections(self) -> int:
        """Counts the open connections."""
        return len(self._guard.connections)

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="weft-http")
        while not self._server.started:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.01)
        if self._renewal is not None:
            self._renewing = asyncio.create_task(self._renew(self._renewal), name="weft-tls")
        self._guarding = asyncio.create_task(self._guard.run(), name="weft-http-guard")

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
        if self._guarding is not None:
            self._guarding.cancel()
        self._socket.close()


def router_server(app: ASGIApp, config: ClusterConfig) -> HttpServer:
    """Returns the server of a router's app, as the config describes it. Raises ConfigError as `HttpServer` does."""
    server = config.server
    return HttpServer(app, server.host, server.port, http_limits(config), TlsFiles.of(server))

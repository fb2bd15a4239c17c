"""The router replica's own HTTP server: uvicorn inside the replica's event loop, on a socket that we bind.

Serve's proxy is not in front (docs/adr/0001-front-end.md): it takes whole bodies before our limit and has no
back-pressure for slow readers. SO_REUSEPORT lets several router replicas of one host share the port.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

import uvicorn
from starlette.types import ASGIApp

from fabric.errors import ConfigError

CLOSE_S = 2
"""How long open connections may take to close once every request has ended or was ended: a reader that takes nothing
would hold up the end for ever."""
MAX_HEADER_BYTES = 64 * 1024
"""Request line and headers together."""


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket; port 0 picks a free one. Raises ConfigError if the address can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sock


class _Server(uvicorn.Server):
    """Signals belong to whoever owns the process, not to one of its tasks."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


class HttpServer:
    """Serves an ASGI app until stopped."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self._socket = bind(host, port)
        config = uvicorn.Config(
            app,
            log_config=None,  # the process's own, see `logs`
            log_level="warning",
            access_log=False,
            lifespan="off",
            http="h11",  # the other parser takes headers of any size
            timeout_graceful_shutdown=CLOSE_S,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
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

    async def stop(self) -> None:
        """Stops accepting, lets open connections write what they hold for `CLOSE_S`, closes. Requests are the
        router's to end before this."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()

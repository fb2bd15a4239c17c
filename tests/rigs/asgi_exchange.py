"""Runs one HTTP exchange with an ASGI app, message by message.

Tests use it as a client that disconnects, is slow or never stops sending. It knows nothing of Weft.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import ASGIApp


class Exchange:
    """Starts the app on a request. `feed` sends pieces of the body and `leave` disconnects. `sent` collects the app's
    messages."""

    def __init__(self, app: ASGIApp, method: str, path: str, headers: Mapping[str, str] | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self.num_received = 0
        self.can_write = asyncio.Event()
        """While this event is cleared, the socket is full and the app's sends wait."""
        self.can_write.set()
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._changed = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    def feed(self, piece: bytes, is_last: bool = True) -> Exchange:
        self._incoming.put_nowait({"type": "http.request", "body": piece, "more_body": not is_last})
        return self

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until the condition holds. It checks the condition after each message of the app."""
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def ended(self) -> Exchange:
        async with asyncio.timeout(10):
            await self.task
        return self

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    async def _receive(self) -> dict[str, Any]:
        message = await self._incoming.get()
        self.num_received += 1
        return message

    async def _send(self, message: dict[str, Any]) -> None:
        await self.can_write.wait()
        self.sent.append(message)
        self._changed.set()

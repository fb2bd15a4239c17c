"""Handles the client's end of one HTTP exchange: it reads the body up to a limit, and watches whether the client is
still there.

It uses ASGI only, and knows nothing of the meaning of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fabric.errors import Aborted, BodyTooLarge, InvalidRequest

T = TypeVar("T")
MAX_LENGTH_DIGITS = 19
"""Limits the digits of a Content-Length; a number with this many digits is larger than any memory."""
LINGER_S = 10.0
LINGER_BYTES = 64 * 2**20
"""`LINGER_S` and `LINGER_BYTES` limit how much of a refused body is still read. It is read so that its sender gets the
refusal instead of a connection reset."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int, reserve: Callable[[int], None]) -> bytes:
    """Reads and returns the whole body. Calls `reserve` with the size of every piece before it keeps the piece. Raises
    BodyTooLarge by Content-Length before it reads a byte, or as soon as a body without a Content-Length exceeds the
    limit; Aborted if the client leaves; InvalidRequest for an impossible length; and the errors that `reserve`
    raises."""
    declared = _content_length(scope)
    if declared is not None and declared > max_bytes:
        raise BodyTooLarge(f"the body has {declared} bytes, the limit is {max_bytes}")
    body = bytearray()  # A list of small pieces would take many times the memory of their bytes.
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Aborted("the client left while it sent its request")
        piece = message.get("body", b"")
        if len(body) + len(piece) > max_bytes:
            raise BodyTooLarge(f"the body has more than {max_bytes} bytes")
        reserve(len(piece))
        body += piece
        if not message.get("more_body", False):
            return bytes(body)


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            if not value.isdigit() or len(value) > MAX_LENGTH_DIGITS:
                raise InvalidRequest("Content-Length is not a number")
            return int(value)
    return None


class LingeringResponse(Response):
    """A `LingeringResponse` is a refusal that is sent while the client may still be sending. It goes out at once. Then
    it drops the rest of the body for a limited time, and the connection closes."""

    def __init__(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        super().__init__(body, status, headers | {"connection": "close"}, "application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(LINGER_S):
                await _drop_body(receive)
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop_body(receive: Receive) -> None:
    num_bytes = 0
    while num_bytes <= LINGER_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return


class ClientWatch:
    """Waits for the client to leave while the request's work is running. The body must have been read: from then on
    only the disconnect can arrive, and only this object may receive it."""

    def __init__(self, receive: Receive) -> None:
        self._gone = asyncio.ensure_future(_until_disconnect(receive))

    async def race(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` and returns its result. Raises Aborted, and cancels `work`, if the client leaves first."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Aborted("the client left")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    def close(self) -> None:
        self._gone.cancel()


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

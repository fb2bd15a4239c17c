"""The client's end of one HTTP exchange: its body, read up to a limit, and whether it is still there.

ASGI only; knows nothing of requests' meaning.
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
"""Of a Content-Length: more than any memory has."""
LINGER_S = 10.0
LINGER_BYTES = 64 * 2**20
"""What is still read of a refused body, so that its sender gets to read the refusal instead of a reset."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int, reserve: Callable[[int], None]) -> bytes:
    """The whole body. `reserve` is called for every piece before it is kept. Raises BodyTooLarge by Content-Length
    before a byte is read, or as soon as a body without one passes the limit; Aborted if the client leaves;
    InvalidRequest for an impossible length; what `reserve` raises."""
    declared = _content_length(scope)
    if declared is not None and declared > max_bytes:
        raise BodyTooLarge(f"the body has {declared} bytes, the limit is {max_bytes}")
    body = bytearray()  # a list of pieces takes many times their bytes, if they are small
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
    """A refusal sent while the client may still be sending. It goes out at once; then what comes is dropped for a
    while, and the connection closes."""

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
    """Waits for the client's leaving beside the work that is done for it. The body must have been read: from then
    on all that can come is the disconnect, and this object alone may receive it."""

    def __init__(self, receive: Receive) -> None:
        self._gone = asyncio.ensure_future(_until_disconnect(receive))

    async def race(self, work: Coroutine[Any, Any, T]) -> T:
        """The outcome of `work`. Raises Aborted, with `work` cancelled, when the client leaves first."""
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

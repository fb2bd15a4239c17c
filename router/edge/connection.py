"""Handles the client's end of one HTTP exchange, with ASGI only. `read_body` reads the body up to a limit,
`LingeringResponse` refuses a body that is still arriving, and `ClientWatch` notices when the client leaves. `AccessLog`
counts what is sent, says in each answer how long it took, and writes the router's log about requests: one line for each
exchange, and one for each failure by its kind (`note_failure`).

Each of these wraps ASGI's `receive` or `send`, or leaves facts in its scope. The module knows nothing of the meaning of
requests, or of planning, workers and encoders.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fabric.contracts import (
    Aborted,
    BodyTooLarge,
    Busy,
    Draining,
    InvalidRequest,
    RequestRefused,
    Unavailable,
    WeftError,
    enter_request,
)
from router.api import shown, status_of
from router.run import JoinedStreams

T = TypeVar("T")


# ------------------------------------------------------------ the client's end

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
        raise BodyTooLarge(f"the body has {declared} bytes, but the limit is {max_bytes}")
    body = bytearray()  # A list of small pieces would take many times the memory of their bytes.
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Aborted("the client left while it sent its request")
        piece = message.get("body", b"")
        if len(body) + len(piece) > max_bytes:
            raise BodyTooLarge(f"the body has more than {max_bytes} bytes, which is the limit")
        reserve(len(piece))
        body += piece
        if not message.get("more_body", False):
            return bytes(body)


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            if not value.isdigit() or len(value) > MAX_LENGTH_DIGITS:
                text = shown(value.decode("ascii", "backslashreplace"))
                raise InvalidRequest(
                    f"Content-Length must be a number of at most {MAX_LENGTH_DIGITS} digits, not {text}"
                )
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
        """Runs `work` in the calling task and returns its result. Raises Aborted, and cancels `work`, if the client
        leaves first."""
        task = asyncio.current_task()
        assert task is not None, "the work runs in a task"
        is_over = has_left = False

        def leave(_: object) -> None:
            nonlocal has_left
            if not is_over:
                has_left = True
                task.cancel()

        self._gone.add_done_callback(leave)
        try:
            return await work
        except asyncio.CancelledError:
            is_over = True
            if has_left and not task.uncancel():
                raise Aborted("the client left") from None
            raise
        finally:
            if has_left and not is_over:
                task.uncancel()
            is_over = True
            self._gone.remove_done_callback(leave)

    def close(self) -> None:
        self._gone.cancel()


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# ------------------------------------------------------------ the access log

logger = logging.getLogger("router.access_log")
_FACTS = "weft.facts"
MAX_PATH_CHARS = 256
QUIET_PATHS = ("/health", "/health/live", "/health/ready", "/metrics")
"""Machines ask for these paths every few seconds, so their exchanges are logged at debug."""
CLIENT_LEFT_STATUS = 499


class AccessLog:
    """An `AccessLog` is ASGI middleware that logs one line at the end of each exchange, however the exchange ended.
    Each answer gets the header `openai-processing-ms`, the time from the arrival of the request's headers to the
    beginning of the answer. `on_failure` answers for an exchange whose handler failed before its answer began, and
    `on_end` is told the path and the status of each exchange.

    Lines carry ids, counts and times. No line holds a body, a header or a query string, because prompts, media and keys
    travel in them."""

    def __init__(
        self,
        app: ASGIApp,
        on_failure: Callable[[Request, Exception], Awaitable[Response]],
        on_end: Callable[[str, int], None] = lambda path, status: None,
    ) -> None:
        self._app = app
        self._on_failure = on_failure
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        facts: dict[str, Any] = {"status": CLIENT_LEFT_STATUS, "num_bytes_sent": 0}
        scope[_FACTS] = facts
        started_s = asyncio.get_running_loop().time()
        is_started = False

        def counted(message: Message) -> Awaitable[None]:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                facts["status"] = message["status"]
                took_ms = round((asyncio.get_running_loop().time() - started_s) * 1000)
                took = (b"openai-processing-ms", str(took_ms).encode())
                message = {**message, "headers": [*message.get("headers", ()), took]}
            else:
                facts["num_bytes_sent"] += len(message.get("body", b""))
            return send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception as error:  # This is the top of an HTTP exchange; the server's loop logs the error.
            if not is_started:
                response = await self._on_failure(Request(scope, receive, send), error)
                await response(scope, receive, counted)
            facts["status"] = 500
            raise
        finally:
            facts["duration_ms"] = round((asyncio.get_running_loop().time() - started_s) * 1000, 1)
            _write(scope, facts)
            self._on_end(scope["path"], facts["status"])


def _write(scope: Scope, facts: dict[str, Any]) -> None:
    path = scope.get("raw_path", scope["path"].encode()).decode("ascii", "backslashreplace")[:MAX_PATH_CHARS]
    client = (scope.get("client") or ("",))[0]
    level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
    outcome = f" {facts['code']}" if "code" in facts else ""
    line = f"{scope['method']} {path} {facts['status']}{outcome} in {facts['duration_ms']:g} ms"
    logger.log(level, "%s", line, extra={"method": scope["method"], "path": path, "client": client} | facts)


def begin_request(scope: Scope, request_id: str, label: str | None) -> None:
    """Ties the exchange to a request: later log lines carry the request's id, and the access line also carries `label`,
    the client's own name for the request."""
    enter_request(request_id)
    if label is not None:
        _note(scope, label=label)


def note_failure(scope: Scope, error: WeftError) -> None:
    """Adds the error's code to the access line and logs a line of its own, at a level that depends on whose fault the
    failure is. The client's faults are logged at info, without the message, because it quotes values of the request and
    logs hold no content. A lack of room or of a part of the cluster is a warning. Failures of the server are errors and
    carry their trace."""
    _note(scope, code=error.code)
    status = status_of(error)
    if isinstance(error, RequestRefused | Aborted | Draining):
        logger.info("the request ended with status %d, code %s, param %s", status, error.code, error.param or "none")
    elif isinstance(error, Busy | Unavailable):
        logger.warning("the request was refused with status %d, code %s: %s", status, error.code, error.message)
    else:
        logger.error(
            "the request failed with status %d, code %s: %s", status, error.code, error.message, exc_info=error
        )


def note_answer(scope: Scope, stream: JoinedStreams) -> None:
    """Adds the token counts of the answer to the access line."""
    if stream.usage is not None:
        usage = stream.usage
        _note(
            scope,
            code="ok",
            prompt_tokens=usage.num_prompt_tokens,
            cached_tokens=usage.num_cached_tokens,
            completion_tokens=usage.num_completion_tokens,
        )


def _note(scope: Scope, **facts: object) -> None:
    scope.get(_FACTS, {}).update(facts)

"""What the router's log says of requests: one line for each HTTP exchange, and one for each failure by its kind.

Lines carry ids, counts and times. Bodies, headers and query strings, where prompts, media and keys travel, are in none.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fabric.errors import Aborted, Busy, Draining, RequestRefused, Unavailable, WeftError
from fabric.log_context import enter_request
from router.api.errors import status_of
from router.streams import RequestStream

logger = logging.getLogger(__name__)
_FACTS = "weft.facts"
MAX_PATH_CHARS = 256
QUIET_PATHS = ("/health", "/health/live", "/health/ready", "/metrics")
"""Asked for every few seconds by machines: logged at debug."""
CLIENT_LEFT_STATUS = 499


class AccessLog:
    """ASGI middleware: a line at the end of each exchange, whatever ended it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        facts: dict[str, Any] = {"status": CLIENT_LEFT_STATUS, "num_bytes_sent": 0}
        scope[_FACTS] = facts
        started_s = asyncio.get_running_loop().time()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts["status"] = message["status"]
            facts["num_bytes_sent"] += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            facts["status"] = 500
            raise
        finally:
            facts["duration_ms"] = round((asyncio.get_running_loop().time() - started_s) * 1000, 1)
            _write(scope, facts)


def _write(scope: Scope, facts: dict[str, Any]) -> None:
    path = scope.get("raw_path", scope["path"].encode()).decode("ascii", "backslashreplace")[:MAX_PATH_CHARS]
    client = (scope.get("client") or ("",))[0]
    level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
    outcome = f" {facts['code']}" if "code" in facts else ""
    line = f"{scope['method']} {path} {facts['status']}{outcome} in {facts['duration_ms']:g} ms"
    logger.log(level, "%s", line, extra={"method": scope["method"], "path": path, "client": client} | facts)


def begin_request(scope: Scope, request_id: str, label: str | None) -> None:
    """The exchange is this request's: lines from now on carry its id, the access line its client's own name too."""
    enter_request(request_id)
    if label is not None:
        _note(scope, label=label)


def note_failure(scope: Scope, error: WeftError) -> None:
    """The code into the access line, and a line of its own by whose fault it is: the client's at info (without the
    message, which may quote the request), a lack of room or of a part as a warning, ours with its trace."""
    _note(scope, code=error.code)
    status = status_of(error)
    if isinstance(error, RequestRefused | Aborted | Draining):
        logger.info("refused with %d %s at %s", status, error.code, error.param or "no part in particular")
        logger.debug("%s", error.message)
    elif isinstance(error, Busy | Unavailable):
        logger.warning("refused with %d %s: %s", status, error.code, error.message)
    else:
        logger.error("failed with %d %s: %s", status, error.code, error.message, exc_info=error)


def note_answer(scope: Scope, stream: RequestStream) -> None:
    """What the answer took, into the access line."""
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

"""Writes the router's log about requests: one line for each HTTP exchange, and one for each failure by its kind.

Lines carry ids, counts and times. No line holds a body, a header or a query string, because prompts, media and keys
travel in them. The module knows nothing of planning, workers or encoders.
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
"""Machines ask for these paths every few seconds, so their exchanges are logged at debug."""
CLIENT_LEFT_STATUS = 499


class AccessLog:
    """An `AccessLog` is ASGI middleware that logs one line at the end of each exchange, however the exchange ended."""

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
        except Exception:  # This is the top of an HTTP exchange; the server's loop logs the error and answers it.
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
    """Ties the exchange to a request: later log lines carry the request's id, and the access line also carries `label`,
    the client's own name for the request."""
    enter_request(request_id)
    if label is not None:
        _note(scope, label=label)


def note_failure(scope: Scope, error: WeftError) -> None:
    """Adds the error's code to the access line and logs a line of its own, at a level that depends on whose fault the
    failure is. The client's faults are logged at info, without the message, which may quote the request. A lack of room
    or of a part of the cluster is a warning. Failures of the server are errors and carry their trace."""
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

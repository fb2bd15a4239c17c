"""Writes the short answers that all parts of the HTTP edge give: a JSON value, and a refusal, each with the id of the
exchange.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fabric.contracts import WeftError
from router.api import http_error
from router.edge.access import request_label
from router.edge.connection import note_failure


def echo(request: Request) -> dict[str, str]:
    """Returns the header that repeats the client's own id of the exchange, or gives it a new one."""
    return {"x-request-id": request_label(request.scope)}


def answer_json(request: Request, content: object, status: int = 200) -> Response:
    """Returns an answer with a JSON value."""
    return Response(msgspec.json.encode(content), status, media_type="application/json", headers=echo(request))


def refused(request: Request, error: WeftError) -> Response:
    """Returns the answer to an exchange without a body that can't be answered, and notes the error for the log."""
    answer = http_error(error)
    note_failure(request.scope, error)
    return Response(answer.body, answer.status, media_type="application/json", headers=echo(request) | answer.headers)

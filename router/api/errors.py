"""From the error tree to HTTP: the one table, and OpenAI's error envelope.

Knows nothing of who raised what. A status is looked up by class, so a new leaf without a row fails a test.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from fabric import errors
from fabric.errors import WeftError


class HttpError(NamedTuple):
    """An answer that is an error. `body` is JSON."""

    status: int
    body: bytes
    headers: dict[str, str]


ERROR_TO_STATUS: dict[type[WeftError], int] = {
    errors.InvalidRequest: 400,
    errors.InvalidMedia: 400,
    errors.UnsupportedModality: 400,
    errors.ContextLengthExceeded: 400,
    errors.BodyTooLarge: 413,
    errors.ModelNotFound: 404,
    errors.Unauthorized: 401,
    errors.Overloaded: 429,
    errors.MachineBusy: 503,
    errors.WorkerBackedUp: 503,
    errors.NoCapacity: 503,
    errors.Draining: 503,
    errors.TargetGone: 503,
    errors.WorkerLost: 503,
    errors.EncoderLost: 503,
    errors.DeadlineExceeded: 504,
    errors.EncodeFailed: 500,
    errors.EngineFailed: 500,
    errors.FeatureMismatch: 500,
    errors.Aborted: 499,
    errors.LeaseLost: 503,
    errors.TransferFailed: 503,
    errors.ArenaFull: 503,
    errors.UnitTooLarge: 400,
    errors.ProtocolError: 500,
    errors.ConfigError: 500,
}
"""499 (the client left) is for logs. A transfer error is handled inside; its row is for the case that none could."""

INTERNAL_STATUS = 500
MAX_RETRY_AFTER_S = 60
"""Clients stop retrying above 120 s."""


def status_of(error: WeftError) -> int:
    """500 for an error that is no leaf of the tree (`internal_error`)."""
    return ERROR_TO_STATUS.get(type(error), INTERNAL_STATUS)


def error_type(status: int) -> str:
    """OpenAI's `type`, which is coarser than the code."""
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def error_object(error: WeftError) -> dict[str, object]:
    """What stands under `error`, in an answer and in a stream."""
    return {"message": error.message, "type": error_type(status_of(error)), "param": error.param, "code": error.code}


def envelope(message: str, status: int, code: str, param: str | None = None) -> bytes:
    """For answers that no WeftError describes: unknown routes and methods."""
    detail = {"message": message, "type": error_type(status), "param": param, "code": code}
    return msgspec.json.encode({"error": detail})


def http_error(error: WeftError, default_retry_after_s: float = 1.0) -> HttpError:
    """The whole answer. 429 and 503 say when to come back; a 5xx that would only break again says not to, or a
    client would break three replicas with one request."""
    status = status_of(error)
    headers: dict[str, str] = {}
    if status in (429, 503):
        wait_s = default_retry_after_s if error.retry_after_s is None else error.retry_after_s
        headers["retry-after"] = str(min(MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s))))
    elif status >= 500 and not error.retryable:
        headers["x-should-retry"] = "false"
    return HttpError(status, msgspec.json.encode({"error": error_object(error)}), headers)

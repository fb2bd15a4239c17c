"""Turns errors of the error tree into HTTP answers: it holds the one table of statuses, and OpenAI's error envelope.

It knows nothing of where an error was raised. A status is looked up by class, so a new leaf class without a row fails a
test.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from fabric.contracts import (
    Aborted,
    ArenaFull,
    BodyTooLarge,
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    DeadlineOutOfReach,
    Draining,
    EncodeFailed,
    EncoderLost,
    EngineFailed,
    FeatureMismatch,
    Forbidden,
    InvalidMedia,
    InvalidRequest,
    LeaseLost,
    MachineBusy,
    MediaUnreachable,
    ModelNotFound,
    NoCapacity,
    Overloaded,
    ProtocolError,
    RateLimited,
    StageStalled,
    TargetGone,
    TransferFailed,
    Unauthorized,
    UnitTooLarge,
    UnsupportedContentType,
    UnsupportedModality,
    UrlRefused,
    WeftError,
    WorkerBackedUp,
    WorkerLeaving,
    WorkerLost,
)


class HttpError(NamedTuple):
    """An `HttpError` is an answer that reports an error. `body` is JSON."""

    status: int
    body: bytes
    headers: dict[str, str]


ERROR_TO_STATUS: dict[type[WeftError], int] = {
    InvalidRequest: 400,
    InvalidMedia: 400,
    UrlRefused: 400,
    MediaUnreachable: 422,
    UnsupportedModality: 400,
    ContextLengthExceeded: 400,
    BodyTooLarge: 413,
    UnsupportedContentType: 415,
    ModelNotFound: 404,
    Unauthorized: 401,
    Forbidden: 403,
    Overloaded: 429,
    RateLimited: 429,
    DeadlineOutOfReach: 429,
    MachineBusy: 503,
    WorkerBackedUp: 503,
    NoCapacity: 503,
    Draining: 503,
    TargetGone: 503,
    WorkerLost: 503,
    StageStalled: 503,
    WorkerLeaving: 503,
    EncoderLost: 503,
    DeadlineExceeded: 504,
    EncodeFailed: 500,
    EngineFailed: 500,
    FeatureMismatch: 500,
    Aborted: 499,
    LeaseLost: 503,
    TransferFailed: 503,
    ArenaFull: 503,
    UnitTooLarge: 400,
    ProtocolError: 500,
    ConfigError: 500,
}
"""Status 499 (the client left) appears in logs only. A transfer error is handled inside the cluster; its row is for the
case that it could not be handled."""

INTERNAL_STATUS = 500
MAX_RETRY_AFTER_S = 60
"""Limits Retry-After, because clients stop retrying above 120 s."""


def status_of(error: WeftError) -> int:
    """Returns the HTTP status of an error; it is 500 for an error that is no leaf of the tree (`internal_error`)."""
    return ERROR_TO_STATUS.get(type(error), INTERNAL_STATUS)


def error_type(status: int) -> str:
    """Returns OpenAI's `type`, which is coarser than the code."""
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def error_object(error: WeftError) -> dict[str, object]:
    """Returns the object under `error`, for an answer and for a stream."""
    return {"message": error.message, "type": error_type(status_of(error)), "param": error.param, "code": error.code}


def envelope(message: str, status: int, code: str, param: str | None = None) -> bytes:
    """Returns the error envelope for answers that no WeftError describes: unknown routes and methods."""
    detail = {"message": message, "type": error_type(status), "param": param, "code": code}
    return msgspec.json.encode({"error": detail})


def http_error(error: WeftError, default_retry_after_s: float = 1.0) -> HttpError:
    """Returns the whole answer. 429 and 503 say when to come back. A 5xx for a request that would only fail again says
    not to retry; otherwise a client would break three replicas with one request. So does the answer to a request whose
    deadline is out of reach: whether a later answer is of use is for the program to say, and not for its library, which
    would repeat the request at once."""
    status = status_of(error)
    headers: dict[str, str] = {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status in (429, 503):
        wait_s = default_retry_after_s if error.retry_after_s is None else error.retry_after_s
        if not isinstance(error, RateLimited):  # Its time is no prediction.
            wait_s = min(MAX_RETRY_AFTER_S, wait_s)
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(wait_s * 1000)))
    if isinstance(error, DeadlineOutOfReach) or (status >= 500 and status != 503 and not error.retryable):
        headers["x-should-retry"] = "false"
    return HttpError(status, msgspec.json.encode({"error": error_object(error)}), headers)

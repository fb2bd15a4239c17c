"""Says with which statuses the operations of the API refuse a request. The statuses come from the table of errors
(`router.api`), so an error that gets another status changes the document too.

An operation names groups of errors. Each answer has OpenAI's envelope, and the document lists the codes that a status
may carry. The module knows nothing of where an error is raised.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fabric.contracts import (
    Aborted,
    BodyTooLarge,
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    Forbidden,
    InvalidMedia,
    InvalidRequest,
    MachineBusy,
    MediaUnreachable,
    ModelNotFound,
    NoCapacity,
    Overloaded,
    RateLimited,
    Unauthorized,
    UnsupportedContentType,
    UnsupportedModality,
    UrlRefused,
    WeftError,
)
from router.api import ERROR_TO_STATUS
from router.api_document.request_schemas import Schema, ref

Errors = tuple[type[WeftError], ...]
KEY: Errors = (Unauthorized, Forbidden)
"""Asks for any key; without keys, pages of other sites are refused."""
OPERATOR: Errors = (Unauthorized, Forbidden)
"""Asks for the key of an operator."""
BODY: Errors = (
    InvalidRequest,
    BodyTooLarge,
    UnsupportedContentType,
    Unauthorized,
    Forbidden,
    Overloaded,
    RateLimited,
    Draining,
)
"""Takes a place among the requests in flight, and reads a body."""
PROMPT: Errors = (
    *BODY,
    ModelNotFound,
    InvalidMedia,
    UrlRefused,
    MediaUnreachable,
    UnsupportedModality,
    ContextLengthExceeded,
    MachineBusy,
    NoCapacity,
    DeadlineExceeded,
)
"""Makes a prompt, with its media."""
GENERATION: Errors = tuple(error for error in ERROR_TO_STATUS if error is not Aborted)
"""Uses the cluster, so that every error may come; `aborted` has no answer, because its client has left."""
INTERNAL = WeftError
"""Stands for a defect of the server, which any operation may have."""
STATUS_TO_SUMMARY = {
    400: "The request can't be served as it is.",
    401: "The API key is missing or unknown.",
    403: "The API key may not do this.",
    404: "There is nothing of this name.",
    413: "The body is larger than the server takes.",
    415: "The body is of another type than the route takes.",
    422: "A medium could not be fetched from its URL.",
    429: "A limit is reached; the same request may succeed later.",
    500: "The server has failed.",
    503: "A part of the cluster is missing or busy; the same request may succeed later.",
    504: "The request took longer than it may take.",
}
EVERY_ANSWER = ("x-request-id", "openai-processing-ms")
"""Names the headers of all answers."""
RETRY_HEADERS = ("retry-after", "retry-after-ms")


def refusals(errors: Sequence[type[WeftError]], headers: Sequence[str] = ()) -> dict[str, Schema]:
    """Returns the responses of an operation that may raise these errors, by status. `headers` name those that all of
    its answers have."""
    status_to_codes: defaultdict[int, set[str]] = defaultdict(set)
    every: list[type[WeftError]] = [*errors, INTERNAL]
    for error in every:
        status_to_codes[ERROR_TO_STATUS.get(error, 500)].add(error.code)
    return {str(status): refusal(status, sorted(codes), headers) for status, codes in sorted(status_to_codes.items())}


def refusal(status: int, codes: Sequence[str], headers: Sequence[str] = ()) -> Schema:
    """Returns the response for one status."""
    listed = " or ".join(f"`{code}`" for code in codes)
    return {
        "description": f"{STATUS_TO_SUMMARY[status]} The code is {listed}.",
        "headers": header_refs([*EVERY_ANSWER, *headers, *_headers_of(status)]),
        "content": {"application/json": {"schema": ref("ErrorAnswer")}},
    }


def _headers_of(status: int) -> tuple[str, ...]:
    if status == 401:
        return ("www-authenticate",)
    if status == 429:
        return (*RETRY_HEADERS, "x-should-retry")
    if status == 503:
        return RETRY_HEADERS
    return ("x-should-retry",) if status >= 500 else ()


# ------------------------------------------------------------ headers


def header_refs(names: Sequence[str]) -> dict[str, Schema]:
    """Returns references to the named headers."""
    return {name: {"$ref": f"#/components/headers/{name}"} for name in dict.fromkeys(names)}


def _header(description: str, kind: str = "string", is_required: bool = False, **schema: Any) -> Schema:
    return {"description": description, "required": is_required, "schema": {"type": kind, **schema}}


RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{quota}"
    for quota in ("requests", "tokens", "media-seconds")
    for what in ("limit", "remaining", "reset")
)
_RATE_TO_DESCRIPTION = {
    "limit": "What the quota gives per minute.",
    "remaining": "What is left of the quota now.",
    "reset": "The time until the quota is full again, such as `6m0s`.",
}
HEADERS: dict[str, Schema] = {
    "x-request-id": _header("The client's own `x-request-id`, or else the id of the request.", is_required=True),
    "x-weft-request-id": _header(
        "The id under which `/weft/requests` finds the request, if it had a prompt or asked for an answer."
    ),
    "openai-processing-ms": _header(
        "The time from the arrival of the request to its answer.", pattern="^[0-9]+$", is_required=True
    ),
    "retry-after": _header("Come back after this many seconds.", pattern="^[0-9]+$", is_required=True),
    "retry-after-ms": _header("Come back after this many milliseconds.", pattern="^[0-9]+$", is_required=True),
    "x-should-retry": _header("Is `false` if the same request would fail again.", enum=["false"]),
    "www-authenticate": _header("Says which kind of key is asked for.", is_required=True),
    **{name: _header(f"{_RATE_TO_DESCRIPTION[name.split('-')[2]]} Sent if there is a quota.") for name in RATE_HEADERS},
}
"""Maps the names of headers to their descriptions."""

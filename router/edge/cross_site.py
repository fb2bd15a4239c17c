"""Keeps web pages of other sites from using a cluster through a browser that can reach it.

`check_site` is for clusters that ask for no key. Any page may have a browser send a request to any server, and a site
whose name suddenly leads to this machine (DNS rebinding) may even read the answer. `check_content_type` holds for all
clusters: browsers ask before they send JSON to another site, and send other types of bodies without a question.
`shared_with_sites` lets pages of chosen sites read answers.

Programs other than browsers notice little: they send no `Origin`. The rules for origins are those of Go's
`http.CrossOriginProtection`, and the check of names is like Ollama's and Jupyter's. The module knows nothing of routes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Literal

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from fabric.contracts import Forbidden, UnsupportedContentType
from router.api import shown

BodyType = Literal["json", "form"]
READING = ("GET", "HEAD", "OPTIONS")
"""These methods change nothing, and browsers keep their answers from pages of other sites."""
LOOPBACK_NAMES = ("localhost", "*.localhost")
CURL_TYPE = "application/x-www-form-urlencoded"
MAX_SHOWN_CHARS = 64
PREFLIGHT_S = 600
"""A browser may remember for this time what it may send."""
EXPOSED_HEADERS = (
    "x-request-id",
    "x-weft-request-id",
    "openai-processing-ms",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    *(
        f"x-ratelimit-{part}-{unit}"
        for part in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens", "media-seconds")
    ),
)
"""Lists the headers of answers that a page may read, besides those that the Fetch standard always permits."""


def check_content_type(scope: Scope, wanted: BodyType) -> None:
    """Raises UnsupportedContentType if the body is not of the wanted type, or if it is compressed. A body without a
    type counts as JSON, as simple clients send it."""
    codings = [each.strip() for value in _values(scope, b"content-encoding") for each in value.split(",")]
    unknown = next((each for each in codings if each.lower() not in ("", "identity")), None)
    if unknown is not None:
        message = "the body must be sent as it is, without the header `Content-Encoding`"
        raise UnsupportedContentType(f"{message}, not as {shown(unknown[:MAX_SHOWN_CHARS])}")
    for value in _values(scope, b"content-type"):
        kind = value.partition(";")[0].strip().lower()
        if wanted == "form":
            if kind != "multipart/form-data":
                message = "the body must be a form, with the header `Content-Type: multipart/form-data`"
                raise UnsupportedContentType(f"{message}, not {shown(kind[:MAX_SHOWN_CHARS])}")
        elif kind and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            message = "the body must be JSON, with the header `Content-Type: application/json`"
            hint = "; with curl, add -H 'Content-Type: application/json'" if kind == CURL_TYPE else ""
            raise UnsupportedContentType(f"{message}, not {shown(kind[:MAX_SHOWN_CHARS])}{hint}")


def check_site(scope: Scope, allowed_hosts: Sequence[str] | None, allowed_origins: Sequence[str]) -> None:
    """Raises Forbidden if the request comes from a page of another site, or under a name that is not the server's.
    With `allowed_hosts` None, the server has any name."""
    host = next(iter(_values(scope, b"host")), "").lower()
    if allowed_hosts is not None and host and not _is_allowed(host, allowed_hosts):
        raise Forbidden(
            f"this server has no name {shown(host[:MAX_SHOWN_CHARS])}; the operator can add it to"
            " `access.allowed_hosts`, or set keys"
        )
    if scope["method"] in READING:
        return
    origin = next(iter(_values(scope, b"origin")), None)
    if origin is not None and ("*" in allowed_origins or origin.lower() in allowed_origins):
        return
    site = next(iter(_values(scope, b"sec-fetch-site")), None)  # Only browsers send it, and pages can't set it.
    if site in ("same-origin", "none"):
        return
    if site is None and (origin is None or origin.lower().partition("://")[2] == host):
        return
    raise Forbidden(
        f"a page of another site, {shown((origin or 'null')[:MAX_SHOWN_CHARS])}, sent this request; the operator can"
        " add the site to `access.allowed_origins`, or set keys"
    )


def shared_with_sites(app: ASGIApp, allowed_origins: Sequence[str]) -> ASGIApp:
    """Returns the app with the answers that let browsers show its own to pages of these sites (the CORS protocol of the
    Fetch standard). Browsers ask before they send JSON, and without a key. The app itself is returned if there is no
    such site: then browsers keep every answer from pages of others."""
    if not allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=EXPOSED_HEADERS,
        max_age=PREFLIGHT_S,
    )


def _is_allowed(host: str, patterns: Iterable[str]) -> bool:
    """Tells whether `host`, which may have a port, is an address, a name of this machine's loopback, or matches a
    pattern. No site can get an address for its name."""
    name = host.rpartition("]")[0][1:] if host.startswith("[") else host.partition(":")[0].removesuffix(".")
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        return any(
            pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:]))
            for pattern in (*LOOPBACK_NAMES, *patterns)
        )


def _values(scope: Scope, wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]

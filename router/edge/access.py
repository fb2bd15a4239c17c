"""Decides who may use which route: `AccessControl` is ASGI middleware around the whole app, so that no route can
forget to ask for a key.

Paths of health and the files of the console need no key, `/metrics` and everything below `/weft` need an operator's,
and every other path (also one that does not exist) needs any key. The key is checked before a byte of the body is read.
A cluster without keys refuses what browsers send for pages of other sites instead. The answers to callers with quotas
get their `x-ratelimit-*` headers here. The module knows nothing of what a route does.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fabric.contracts import Forbidden, InvalidRequest, Unauthorized, WeftError, mint_request_id
from router.api import http_error
from router.edge.connection import LingeringResponse, note_failure
from router.edge.cross_site import check_site
from router.run import Caller, check_operator, rate_headers
from router.service import RouterService

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
"""These paths need no key, because the system that runs the process must be able to ask whether it lives."""
DOCUMENT_PATHS = frozenset({"/openapi.json", "/docs"})
"""These paths describe the API to people, for any key."""
CONSOLE_PATH = re.compile(r"/console(?:/[^/]*)?")
"""Matches the files of the console, which are the same for everybody and say nothing of the cluster. They need no key,
because a browser can't send one with the address that a person types."""
OPERATOR_PATH = re.compile(r"/(?:metrics|weft)(?:/.*)?", re.DOTALL)
"""Matches the paths that show what other tenants do."""
CLIENT_LABEL = re.compile(r"[A-Za-z0-9_.:@/+=-]{1,128}")
"""Matches a client's `x-request-id` that may be echoed: it has no spaces and no control characters."""
CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
"""Matches what no path has. Routers of requests may overlook a line break at the end of a path, which then would be
another path here than there."""
_CALLER = "weft.caller"
Headers = Iterable[tuple[bytes, bytes]]


class AccessControl:
    """An `AccessControl` answers 401 to exchanges without a known key and 403 to those whose key may not do this. For
    all others it leaves the caller in the scope, where `caller_of` finds it."""

    def __init__(self, app: ASGIApp, service: RouterService) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # No route speaks another protocol.
            return
        is_open = scope["path"] in OPEN_PATHS
        caller: Caller | None = None
        try:
            if CONTROL_CHARACTER.search(scope["path"]):
                raise InvalidRequest("the path has a control character")
            if not is_open:
                if not self._service.keys.asks_for_keys:
                    config = self._service.config
                    check_site(scope, config.allowed_hosts, config.allowed_origins)
                if not CONSOLE_PATH.fullmatch(scope["path"]):
                    caller = self._service.keys.find(sent_key(scope))
                if OPERATOR_PATH.fullmatch(scope["path"]):
                    assert caller is not None, "an operator's path is no file of the console"
                    check_operator(caller)
        except WeftError as error:
            if scope["method"] == "POST":
                self._service.count_refusal(caller, error)
            await self._refusal(scope, error)(scope, receive, send)
            return
        scope[_CALLER] = caller
        is_counted = scope["method"] == "POST" and caller is not None
        await self._app(scope, receive, self._with_rates(caller, send) if is_counted and caller is not None else send)

    def _with_rates(self, caller: Caller, send: Send) -> Send:
        """Returns a `send` that adds what is left of the caller's quotas to the headers of the answer."""

        async def send_with_rates(message: Message) -> None:
            if message["type"] == "http.response.start":
                rates = rate_headers(self._service.admission.rates.states(caller))
                added = [(name.encode(), value.encode()) for name, value in rates.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        return send_with_rates

    def _refusal(self, scope: Scope, error: WeftError) -> Response:
        answer = http_error(error, self._service.config.retry_after_s)
        note_failure(scope, error)
        headers = answer.headers | {"x-request-id": request_label(scope)}
        if isinstance(error, Unauthorized) and is_page(scope):
            whose = "an operator" if OPERATOR_PATH.fullmatch(scope["path"]) else "an API"
            headers["www-authenticate"] = f'Basic realm="Weft: {whose} key as the password", charset="UTF-8"'
        return LingeringResponse(answer.status, answer.body, headers)


def request_label(scope: Scope) -> str:
    """Returns the client's own `x-request-id` if it is fit to be repeated, or else a new id."""
    label = header(scope["headers"], b"x-request-id")
    return label if CLIENT_LABEL.fullmatch(label) else mint_request_id()


def caller_of(scope: Scope) -> Caller:
    """Returns the caller of an exchange that `AccessControl` let through. Raises Forbidden if there is none: a path of
    health asks for no key, so nothing may be done there in a tenant's name."""
    caller = scope.get(_CALLER)
    if not isinstance(caller, Caller):
        raise Forbidden("this path takes no requests of tenants")
    return caller


def sent_key(scope: Scope) -> str | None:
    """Returns the key that the client sent as `Authorization: Bearer KEY`, or None if it sent none. For pages that
    people read, a browser may send it as the password of Basic authentication; elsewhere this does not count, because
    browsers send it by themselves, also with requests that another site has caused."""
    scheme, _, value = header(scope["headers"], b"authorization").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip() or None
    if scheme.lower() == "basic" and is_page(scope):
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2] or None
        except (binascii.Error, ValueError):
            return None
    return None


def is_page(scope: Scope) -> bool:
    """Tells whether the exchange reads what people open in a browser: the description of the API, or what is for
    operators."""
    path = scope["path"]
    return scope["method"] == "GET" and (path in DOCUMENT_PATHS or OPERATOR_PATH.fullmatch(path) is not None)


def header(headers: Headers, wanted: bytes) -> str:
    """Returns the value of a header, or an empty string if it is missing or stands there twice. Of two keys no part of
    the way may use one and another part the other."""
    found = [value for name, value in headers if name == wanted]
    return found[0].decode("latin-1") if len(found) == 1 else ""

"""Serves the files of the console. They are the same for everybody and say nothing of the cluster, so they need no key;
what the page shows, it asks for with the key of the person who uses it.

The module knows nothing of what the page does.
"""

from __future__ import annotations

from functools import cached_property

from starlette.requests import Request
from starlette.responses import Response

from router.api import envelope
from router.console import ConsoleFile, read_console
from router.edge.plain_answers import echo
from router.service import RouterService

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:;"
        " media-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "permissions-policy": "camera=(self)",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""The page runs its own files and speaks with its own server, whatever a model answers or a request is called."""


class ConsoleEdge:
    """A `ConsoleEdge` holds the handlers of the console of one app."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    @cached_property
    def _files(self) -> dict[str, ConsoleFile]:
        return dict(read_console())

    async def page(self, request: Request) -> Response:
        """Returns the page, or 404 if the operator has turned the console off."""
        return self._answer(request, "index.html")

    async def part(self, request: Request) -> Response:
        """Returns one of the other files of the page."""
        return self._answer(request, str(request.path_params["name"]))

    def _answer(self, request: Request, name: str) -> Response:
        is_on = self._service.config.has_console
        found = self._files.get(name) if is_on else None
        if found is None:
            message = f"the console has no file `{name[:64]}`" if is_on else "the operator has turned the console off"
            body = envelope(message, 404, "not_found")
            return Response(body, 404, media_type="application/json", headers=echo(request))
        headers = HEADERS | {"etag": found.tag} | echo(request)
        if request.headers.get("if-none-match") == found.tag:
            return Response(status_code=304, headers=headers)
        return Response(found.content, media_type=found.media_type, headers=headers)

"""Finds the handler of an HTTP exchange by its method and path, past the layers of the framework.

A path without parameters is looked up in a dictionary; the others, and what is unknown, go through FastAPI, whose
layers more than double what a short exchange costs before its handler (docs/adr/0080-endpoints-that-generate.md). The
module knows nothing of what the handlers do.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

OTHER = "other"
"""Stands for every path that the API does not have."""


class RouteTable:
    """A `RouteTable` is an ASGI app in front of a FastAPI app, whose routes it serves."""

    def __init__(self, api: FastAPI) -> None:
        self._api = api
        routes = [route for route in api.routes if isinstance(route, Route) and "{" not in route.path]
        self._plain = {
            (method, route.path): route.endpoint
            for route in routes
            for method in route.methods or ()
            if method != "HEAD"
        }

        self._patterns = [route for route in api.routes if isinstance(route, Route) and "{" in route.path]

    def route_of(self, path: str) -> str:
        """Returns the route of the API that a path belongs to, with whatever method, or `other`. There are no more than
        the API has, whatever clients ask for."""
        if any(path == plain for _, plain in self._plain):
            return path
        return next((route.path for route in self._patterns if route.path_regex.match(path)), OTHER)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._plain.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if handler is None:
            await self._api(scope, receive, send)
            return
        response = await handler(Request(scope, receive, send))
        await response(scope, receive, send)

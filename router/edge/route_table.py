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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._plain.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if handler is None:
            await self._api(scope, receive, send)
            return
        response = await handler(Request(scope, receive, send))
        await response(scope, receive, send)

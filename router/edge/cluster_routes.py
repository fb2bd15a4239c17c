"""Answers what operators and their systems ask about the cluster: whether it serves, who its members are, what they do,
what became of requests, and the metrics.

The module makes no decisions, and knows nothing of requests that generate.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fabric.contracts import InvalidRequest, WeftError
from router.api import envelope
from router.edge.plain_answers import answer_json, echo, refused
from router.edge.request_pages import PAGE_HEADERS, request_page, requests_page
from router.observe import Found, RequestFilter, chrome_trace
from router.service import RouterService

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_LISTED = 1000
MAX_SECONDS = 3600


class ClusterEdge:
    """A `ClusterEdge` holds the handlers of one app that tell of the cluster."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    async def live(self, request: Request) -> Response:
        """Reports whether the process can serve; answers 503 if it should be replaced."""
        try:
            self._service.check_health()
        except WeftError as error:
            return answer_json(request, {"status": "dead", "message": error.message}, 503)
        return answer_json(request, {"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Reports whether requests can be served; answers 503 while a worker or a needed encoder is missing."""
        is_ready, state = self._service.readiness()
        return answer_json(request, state, 200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        text = await self._service.metrics_exposition()
        return Response(text, media_type=METRICS_TYPE, headers=echo(request))

    async def prometheus_targets(self, request: Request) -> Response:
        """Lists the members for Prometheus' HTTP service discovery."""
        return answer_json(request, self._service.prometheus_targets())

    async def picture(self, request: Request) -> Response:
        """Returns what each member does at this moment, as far as this router knows."""
        return answer_json(request, self._service.picture())

    async def members(self, request: Request) -> Response:
        """Lists the workers and encoders that this router plans with, all routers, and the version of this one."""
        service = self._service
        known = {"version": service.config.version, "members": service.members(), "routers": service.routers()}
        return answer_json(request, known)

    async def requests(self, request: Request) -> Response:
        """Lists the latest requests of all routers, the newest first, as JSON or as a page."""
        try:
            wanted = wanted_requests(request)
            is_page = wants_page(request)
        except WeftError as error:
            return refused(request, error)
        found = await self._service.search.latest(wanted)
        if is_page:
            return answer_page(request, requests_page(found.records, msgspec.to_builtins(wanted), found.silent))
        return answer_json(request, {"requests": found.records, "routers_without_answer": found.silent})

    async def trace(self, request: Request) -> Response:
        """Returns the record of a recent request, whichever router ran it, by the request's id or by the id of its
        completion, as JSON or as a page."""
        name = str(request.path_params["request_id"])
        is_named_page = name.endswith(".html")
        name = bare_id(name.removesuffix(".html"))
        try:
            is_page = is_named_page or wants_page(request)
        except WeftError as error:
            return refused(request, error)
        found = await self._service.search.find(name)
        if not found.records:
            body = envelope(self._not_found(name, found), 404, "not_found", "request_id")
            return Response(body, 404, media_type="application/json", headers=echo(request))
        return (
            answer_page(request, request_page(found.records[0])) if is_page else answer_json(request, found.records[0])
        )

    async def spans(self, request: Request) -> Response:
        """Returns what all parts of the cluster did for the requests that came within the last seconds, as spans in
        the form that Perfetto opens."""
        try:
            wanted = wanted_requests(request)
            seconds = wanted_seconds(request)
        except WeftError as error:
            return refused(request, error)
        service = self._service
        if named := request.query_params.get("request_id"):
            found = await service.search.find(bare_id(named))
            if not found.records:
                body = envelope(self._not_found(named, found), 404, "not_found", "request_id")
                return Response(body, 404, media_type="application/json", headers=echo(request))
            return answer_json(request, chrome_trace(found.records[:1]))
        since_s = service.wall_time() - seconds
        records: list[dict[str, Any]] = []
        for summary in (await service.search.latest(wanted)).records:
            received_at = summary["received_at"]
            if isinstance(received_at, float) and received_at >= since_s:
                records += (await service.search.find(str(summary["request_id"]))).records
                await asyncio.sleep(0)  # Other requests go on between two records.
        content = await service.write(lambda: msgspec.json.encode(chrome_trace(records)))
        return Response(content, media_type="application/json", headers=echo(request))

    def _not_found(self, name: str, found: Found) -> str:
        who = f"none of the {len(found.asked) + 1} routers has a" if found.asked else "this router has no"
        silent = f"; no answer came from {', '.join(found.silent)}" if found.silent else ""
        return (
            f"{who} record of the request `{name[:128]}`; a router keeps those of its latest "
            f"{self._service.traces.max_traces} requests{silent}"
        )


def wanted_requests(request: Request) -> RequestFilter:
    """Returns the filter of a list of requests. Raises InvalidRequest for a limit that is not a number in its range."""
    given = request.query_params
    limit = given.get("limit") or "50"
    is_number = limit.isascii() and limit.isdigit() and len(limit) <= len(str(MAX_LISTED))
    if not is_number or not 1 <= int(limit) <= MAX_LISTED:
        raise InvalidRequest(f"`limit` must be a number from 1 to {MAX_LISTED}, not {limit[:64]!r}", param="limit")
    return RequestFilter(int(limit), given.get("outcome", "")[:64], given.get("modality", "")[:64])


def wants_page(request: Request) -> bool:
    """Tells whether the client wants a page for people: the parameter `format` decides, or else whether the client
    accepts HTML (browsers do, and clients of an API do not). Raises InvalidRequest for another format."""
    wanted = request.query_params.get("format")
    if wanted not in (None, "html", "json"):
        raise InvalidRequest(f"`format` must be `html` or `json`, not {wanted[:64]!r}", param="format")
    return wanted == "html" or (wanted is None and "text/html" in request.headers.get("accept", ""))


def bare_id(name: str) -> str:
    """Returns the id of a request whose completion has this id."""
    return name.removeprefix("chatcmpl-").removeprefix("cmpl-").removeprefix("resp_")


def wanted_seconds(request: Request) -> float:
    """Returns how far back spans go; a minute by default. Raises InvalidRequest for another number."""
    text = request.query_params.get("seconds", "60")
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= MAX_SECONDS:
        raise InvalidRequest(f"`seconds` must be a number from 1 to {MAX_SECONDS}, not {text[:64]!r}", param="seconds")
    return float(text)


def answer_page(request: Request, page: str) -> Response:
    return Response(page, headers=PAGE_HEADERS | echo(request))

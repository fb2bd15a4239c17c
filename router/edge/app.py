"""Puts the router service behind HTTP: `create_app` connects routes to the handlers of `HttpEdge`, which answer in
OpenAI's formats, whole or as an `EventStream`. A whole answer and a streamed one stand together because they differ
only after the service has opened the request: up to there, both share the ticket, the watch on the client, the headers
and the refusals.

The headers of a streamed answer wait for the first token or failure, so that an earlier failure gets its true status.
The module makes no decisions, and knows nothing of workers or attempts.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fabric.contracts import Aborted, InvalidRequest, WeftError, mint_request_id
from router.api import (
    DONE,
    ChoiceText,
    ChunkWriter,
    Head,
    completion,
    envelope,
    error_event,
    http_error,
    model_not_found,
    model_object,
)
from router.edge.connection import (
    AccessLog,
    ClientWatch,
    LingeringResponse,
    begin_request,
    note_answer,
    note_failure,
    read_body,
)
from router.edge.request_pages import PAGE_HEADERS, request_page, requests_page
from router.observe import Found, RequestFilter
from router.router_config import Tenant
from router.run import RequestStream, Ticket, TokenDetails
from router.service import RouterService

CLIENT_LABEL = re.compile(r"[A-Za-z0-9_.:@/+=-]{1,128}")
"""Matches a client's `x-request-id` that may be echoed: it has no spaces and no control characters."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ROUTE_CODES = {404: "not_found", 405: "method_not_allowed"}


def create_app(service: RouterService) -> FastAPI:
    """Returns the ASGI app of one router. It starts nothing: the owner of the service starts and stops it."""
    edge = HttpEdge(service)
    app = FastAPI(title="Weft", openapi_url=None, docs_url=None, redoc_url=None)
    routes: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
        ("POST", "/v1/chat/completions", edge.chat_completions),
        ("GET", "/v1/models", edge.models),
        ("GET", "/v1/models/{model_id:path}", edge.model),
        ("GET", "/health", edge.live),
        ("GET", "/health/live", edge.live),
        ("GET", "/health/ready", edge.ready),
        ("GET", "/metrics", edge.metrics),
        ("GET", "/weft/members", edge.members),
        ("GET", "/weft/prometheus-targets", edge.prometheus_targets),
        ("GET", "/weft/requests", edge.requests),
        ("GET", "/weft/requests/{request_id}", edge.trace),
    ]
    for method, path, handler in routes:
        app.add_route(path, handler, methods=[method])
    app.add_exception_handler(HTTPException, route_error)
    app.add_exception_handler(Exception, internal_error)
    app.add_middleware(AccessLog)
    return app


async def route_error(request: Request, error: Exception) -> Response:
    """Answers unknown paths and methods in OpenAI's error envelope."""
    assert isinstance(error, HTTPException)
    code = ROUTE_CODES.get(error.status_code, "invalid_request")
    message = f"{error.detail}: {request.method} {request.url.path[:256]}"
    headers = dict(error.headers or {}) | echo(request)
    body = envelope(message, error.status_code, code)
    return Response(body, error.status_code, media_type="application/json", headers=headers)


async def internal_error(request: Request, error: Exception) -> Response:
    """Answers for a handler that failed. The server logs the trace; the client gets only the class of the error."""
    answer = http_error(WeftError(f"an internal error occurred ({type(error).__name__})"))
    headers = answer.headers | echo(request)
    return Response(answer.body, answer.status, media_type="application/json", headers=headers)


class HttpEdge:
    """An `HttpEdge` holds the handlers of one app."""

    def __init__(self, service: RouterService) -> None:
        self._service = service
        self._created = int(service.wall_time())

    # ------------------------------------------------------------ chat completions

    async def chat_completions(self, request: Request) -> Response:
        """Handles an exchange from the client's bytes to its answer. The ticket is returned however the exchange
        ends."""
        service, arrived_s = self._service, asyncio.get_running_loop().time()
        label = client_label(request)
        tenant: Tenant | None = None
        try:
            tenant = service.tenants.find(api_key(request))
            ticket = service.admission.admit(tenant)
        except WeftError as error:
            service.count_refusal(tenant, error)
            return self._refusal(request, error, {"x-request-id": label or mint_request_id()}, is_body_unread=True)
        begin_request(request.scope, ticket.request_id, label)
        headers = {"x-request-id": label or ticket.request_id, "x-weft-request-id": ticket.request_id}
        with ExitStack() as undo:
            undo.callback(ticket.release)
            try:
                body = await read_body(request.scope, request.receive, service.config.max_body_bytes, ticket.grow)
            except WeftError as error:
                service.count_refusal(tenant, error)
                return self._refusal(request, error, headers, is_body_unread=True)
            undo.pop_all()
        return await self._answer(request, body, ticket, headers, label, arrived_s)

    async def _answer(
        self,
        request: Request,
        body: bytes,
        ticket: Ticket,
        headers: dict[str, str],
        label: str | None,
        arrived_s: float,
    ) -> Response:
        """Answers a request with a complete body. If the answer is streamed, the event stream takes over the ticket and
        the watch; otherwise both end here."""
        watch = ClientWatch(request.receive)
        stream: RequestStream | None = None
        is_handed_on = False
        try:
            chat = await self._service.parse(body)
            stream = await watch.race(self._service.open(chat, ticket, label))
            head = Head(completion_id(stream), int(self._service.wall_time()), self._service.config.model_name)
            details = TokenDetails(stream, chat, self._service.token_bytes)
            if chat.stream:
                await watch.race(stream.started())
                headers["openai-processing-ms"] = elapsed_ms(arrived_s)
                is_handed_on = True
                writer = ChunkWriter(head, chat.wants_usage_chunk)
                limit_s = self._service.config.write_timeout_s
                return EventStream(stream, writer, details, headers, watch, ticket, limit_s)
            content = await watch.race(collect(stream, head, details))
            headers["openai-processing-ms"] = elapsed_ms(arrived_s)
            note_answer(request.scope, stream)
            return Response(content, media_type="application/json", headers=headers)
        except WeftError as error:
            headers["openai-processing-ms"] = elapsed_ms(arrived_s)
            return self._refusal(request, error, headers)
        finally:
            if not is_handed_on:
                if stream is not None:
                    stream.close()
                watch.close()
                ticket.release()

    def _refusal(
        self, request: Request, error: WeftError, headers: dict[str, str], is_body_unread: bool = False
    ) -> Response:
        answer = http_error(error, self._service.config.retry_after_s)
        note_failure(request.scope, error)
        merged = headers | answer.headers
        if is_body_unread and not isinstance(error, Aborted):
            return LingeringResponse(answer.status, answer.body, merged)
        return Response(answer.body, answer.status, media_type="application/json", headers=merged)

    # ------------------------------------------------------------ other routes

    async def models(self, request: Request) -> Response:
        return answer_json(request, {"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model_id"]
        if name != self._service.config.model_name:
            error = model_not_found(name, self._service.config.model_name)
            return self._refusal(request, error, echo(request))
        return answer_json(request, self._model())

    def _model(self) -> dict[str, object]:
        return model_object(self._service.config.model_name, self._created, self._service.family.shape.max_model_len)

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

    async def members(self, request: Request) -> Response:
        """Lists the workers and encoders that this router plans with."""
        return answer_json(request, {"members": self._service.members()})

    async def requests(self, request: Request) -> Response:
        """Lists the latest requests of all routers, the newest first, as JSON or as a page."""
        try:
            wanted = wanted_requests(request)
            is_page = wants_page(request)
        except WeftError as error:
            return self._refusal(request, error, echo(request))
        found = await self._service.search.latest(wanted)
        if is_page:
            return answer_page(request, requests_page(found.records, msgspec.to_builtins(wanted), found.silent))
        return answer_json(request, {"requests": found.records, "routers_without_answer": found.silent})

    async def trace(self, request: Request) -> Response:
        """Returns the record of a recent request, whichever router ran it, by the request's id or by the id of its
        completion, as JSON or as a page."""
        name = str(request.path_params["request_id"])
        is_named_page = name.endswith(".html")
        name = name.removesuffix(".html").removeprefix("chatcmpl-")
        try:
            is_page = is_named_page or wants_page(request)
        except WeftError as error:
            return self._refusal(request, error, echo(request))
        found = await self._service.search.find(name)
        if not found.records:
            body = envelope(self._not_found(name, found), 404, "not_found", "request_id")
            return Response(body, 404, media_type="application/json", headers=echo(request))
        return (
            answer_page(request, request_page(found.records[0])) if is_page else answer_json(request, found.records[0])
        )

    def _not_found(self, name: str, found: Found) -> str:
        who = f"none of the {len(found.asked) + 1} routers has a" if found.asked else "this router has no"
        silent = f"; no answer came from {', '.join(found.silent)}" if found.silent else ""
        return (
            f"{who} record of the request `{name[:128]}`; a router keeps those of its latest "
            f"{self._service.traces.max_traces} requests{silent}"
        )


MAX_LISTED = 1000


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


def answer_page(request: Request, page: str) -> Response:
    return Response(page, headers=PAGE_HEADERS | echo(request))


async def collect(stream: RequestStream, head: Head, details: TokenDetails) -> bytes:
    """Returns a whole answer as JSON, with the details that the client asked for. Raises the error that ended the
    request."""
    texts: list[list[str]] = [[] for _ in stream.choices]
    reasons = [""] * len(texts)
    async for deltas in stream:
        for delta in deltas:
            texts[delta.choice].append(delta.text)
            reasons[delta.choice] = delta.finish_reason or reasons[delta.choice]
    assert stream.usage is not None
    choices = [ChoiceText(at, "".join(pieces), reasons[at], details.fresh(at)) for at, pieces in enumerate(texts)]
    degraded = [step.to_json() for step in stream.degraded]
    return completion(head, choices, stream.usage, details.prompt_token_ids, degraded, details.explanation)


def completion_id(stream: RequestStream) -> str:
    return f"chatcmpl-{stream.request_id}"


def client_label(request: Request) -> str | None:
    """Returns the client's own `x-request-id`, if it is fit to be repeated. It is never an internal id."""
    label = request.headers.get("x-request-id", "")
    return label if CLIENT_LABEL.fullmatch(label) else None


def api_key(request: Request) -> str | None:
    """Returns the key that the client sent, or None if it sent none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def echo(request: Request) -> dict[str, str]:
    return {"x-request-id": client_label(request) or mint_request_id()}


def answer_json(request: Request, content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json", headers=echo(request))


def elapsed_ms(since_s: float) -> str:
    return str(max(0, round((asyncio.get_running_loop().time() - since_s) * 1000)))


# ------------------------------------------------------------ a streamed answer

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
"""The header `x-accel-buffering` keeps proxies (nginx) from collecting the stream."""


class EventStream(Response):
    """Sends a streamed answer as server-sent events: role, content, finish, usage if the client asked for it, `[DONE]`.
    A slow reader delays only its own stream: while the socket is full, nothing is taken from the request's buffer.

    It owns the request's stream, its ticket and the client watch, and closes all of them when the response ends,
    however it ends."""

    def __init__(
        self,
        stream: RequestStream,
        writer: ChunkWriter,
        details: TokenDetails,
        headers: dict[str, str],
        watch: ClientWatch,
        ticket: Ticket,
        write_timeout_s: float,
    ) -> None:
        super().__init__(headers=None)
        self._stream = stream
        self._writer = writer
        self._details = details
        self._sent_headers = HEADERS | headers
        self._watch = watch
        self._ticket = ticket
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            failure = await self._watch.race(self._write_all(send))
        except (Aborted, OSError):
            note_failure(scope, Aborted("the client left"))
        else:
            if failure is None:
                note_answer(scope, self._stream)
            else:
                note_failure(scope, failure)
        finally:
            self._stream.close()
            self._watch.close()
            self._ticket.release()

    async def _write_all(self, send: Send) -> WeftError | None:
        """Writes the whole answer. Returns the error that ended the stream early, after sending it to the client, or
        None."""
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._sent_headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        writer, details = self._writer, self._details
        choices = range(len(self._stream.choices))
        await self._write(send, b"".join(writer.role(choice, details.prompt_token_ids) for choice in choices))
        degraded = [step.to_json() for step in self._stream.degraded]
        try:
            async for deltas in self._stream:
                events: list[bytes] = []
                for delta in deltas:
                    if delta.text:
                        events.append(writer.text(delta.choice, delta.text, details.fresh(delta.choice)))
                    if delta.finish_reason is not None:
                        fresh = details.fresh(delta.choice)
                        events.append(writer.finish(delta.choice, delta.finish_reason, fresh, degraded))
                await self._write(send, b"".join(events))
        except WeftError as error:
            await self._write(send, error_event(error), is_last=True)
            return error
        assert self._stream.usage is not None
        last = writer.last(self._stream.usage, degraded, details.explanation)
        await self._write(send, last + DONE, is_last=True)
        return None

    async def _write(self, send: Send, data: bytes, is_last: bool = False) -> None:
        """Sends `data`, and waits while the socket is full. Raises Aborted if the client takes nothing for too long."""
        if not data and not is_last:
            return
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await send({"type": "http.response.body", "body": data, "more_body": not is_last})
        except TimeoutError:
            raise Aborted(f"the client has read nothing for {self._write_timeout_s:g} s") from None

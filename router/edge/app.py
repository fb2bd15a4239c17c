"""Puts the router service behind HTTP: `create_app` connects routes to the handlers of `HttpEdge`, which answer in
OpenAI's formats, whole or as an `EventStream`. All endpoints that generate share one path (`HttpEdge._generate`): the
ticket, the watch on the client, the headers and the refusals. What differs between them is an `Endpoint`.

The headers of a streamed answer wait for the first token or failure, so that an earlier failure gets its true status.
The module makes no decisions, and knows nothing of workers or attempts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from fabric.contracts import Aborted, InvalidRequest, ModelNotFound, RateLimited, WeftError, mint_request_id
from router.api import (
    Head,
    Usage,
    adapter_origin,
    check_dimensions,
    check_model,
    embedding_place,
    embeddings_answer,
    envelope,
    http_error,
    model_not_found,
    model_object,
    parse_detokenize,
    parse_embedding,
    parse_tokenize,
    text_answer,
    tokens_answer,
)
from router.edge.access import CLIENT_LABEL, AccessControl, caller_of
from router.edge.answers import AnswerTools, AnswerWriter
from router.edge.cluster_routes import ClusterEdge
from router.edge.connection import (
    AccessLog,
    ClientWatch,
    LingeringResponse,
    begin_request,
    note_answer,
    note_failure,
    read_body,
)
from router.edge.console_routes import ConsoleEdge
from router.edge.cross_site import BodyType, check_content_type, shared_with_sites
from router.edge.document_routes import DocumentEdge
from router.edge.endpoints import CHAT, COMPLETIONS, RESPONSES, SPEECH, TRANSCRIPTIONS, Asked, BodyTerms, Endpoint
from router.edge.event_stream import EventStream
from router.edge.plain_answers import answer_json, echo
from router.edge.route_table import RouteTable
from router.edge.tickets import Tickets
from router.edge.whole_answer import WholeAnswer
from router.observe import beside, read_traceparent
from router.prompt import PromptRequest
from router.run import JoinedStreams, RequestStream, Ticket, check_tenant
from router.service import RouterService

EMBEDDED_AT_ONCE = 16
"""A request for many embeddings has this many of them computed at once, so that it leaves places to others."""
SCORES_IN_LOOP = 512
"""An answer of at most this many log-probabilities is written in the event loop, which takes it some milliseconds."""
EMBEDDINGS_IN_LOOP_BYTES = 16 * 1024
"""The same holds for embeddings that take so many bytes."""
ROUTE_CODES = {404: "not_found", 405: "method_not_allowed"}


def create_api(service: RouterService) -> FastAPI:
    """Returns the routes of one router and their handlers."""
    edge, cluster = HttpEdge(service), ClusterEdge(service)
    console, document = ConsoleEdge(service), DocumentEdge(service)
    api = FastAPI(title="Weft", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    routes: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
        ("POST", "/v1/chat/completions", edge.chat_completions),
        ("POST", "/v1/completions", edge.completions),
        ("POST", "/v1/responses", edge.responses),
        ("POST", "/v1/audio/transcriptions", edge.transcriptions),
        ("POST", "/v1/audio/speech", edge.speech),
        ("POST", "/v1/embeddings", edge.embeddings),
        ("POST", "/tokenize", edge.tokenize),
        ("POST", "/detokenize", edge.detokenize),
        ("GET", "/v1/models", edge.models),
        ("GET", "/v1/models/{model_id:path}", edge.model),
        ("GET", "/health", cluster.live),
        ("GET", "/health/live", cluster.live),
        ("GET", "/health/ready", cluster.ready),
        ("GET", "/metrics", cluster.metrics),
        ("GET", "/weft/cluster", cluster.picture),
        ("GET", "/weft/members", cluster.members),
        ("GET", "/weft/prometheus-targets", cluster.prometheus_targets),
        ("GET", "/weft/requests", cluster.requests),
        ("GET", "/weft/requests/{request_id}", cluster.trace),
        ("GET", "/weft/spans", cluster.spans),
        ("GET", "/openapi.json", document.as_json),
        ("GET", "/docs", document.as_page),
        ("GET", "/console", console.page),
        ("GET", "/console/{name}", console.part),
    ]
    for method, path, handler in routes:
        api.add_route(path, handler, methods=[method])
    api.add_exception_handler(HTTPException, route_error)
    api.add_exception_handler(Exception, internal_error)
    return api


def create_app(service: RouterService) -> ASGIApp:
    """Returns the ASGI app of one router: its API behind the check of keys and the access log. It starts nothing: the
    owner of the service starts and stops it."""
    table, counter = RouteTable(create_api(service)), service.metrics.http_requests

    def count(path: str, status: int) -> None:
        counter.labels(table.route_of(path), str(status)).inc()

    guarded = AccessControl(table, service)
    return AccessLog(shared_with_sites(guarded, service.config.allowed_origins), internal_error, count)


async def route_error(request: Request, error: Exception) -> Response:
    """Answers unknown paths and methods in OpenAI's error envelope."""
    assert isinstance(error, HTTPException)
    code = ROUTE_CODES.get(error.status_code, "invalid_request")
    headers = dict(error.headers or {}) | echo(request)
    body = envelope(route_message(request, error), error.status_code, code)
    return Response(body, error.status_code, media_type="application/json", headers=headers)


def route_message(request: Request, error: HTTPException) -> str:
    """Returns what to say to a client that asked for an unknown path, or with a method that the path does not take."""
    path = request.url.path
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        taken = sorted((error.headers or {}).get("Allow", "another method").split(", "))
        return f"`{path[:256]}` takes {', '.join(taken)}, not {request.method}"
    bare = path.rstrip("/")
    others = (each for each in (bare, f"/v1{bare}", bare.removeprefix("/v1")) if each != path)
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    meant = next((each for each in others if any(route.path_regex.match(each) for route in routes)), None)
    hint = "/docs lists what it has" if meant is None else f"the path is {meant[:256]}"
    return f"this server has no `{request.method} {path[:256]}`; {hint}"


async def internal_error(request: Request, error: Exception) -> Response:
    """Answers for a handler that failed. The server logs the trace; the client gets only the class of the error."""
    answer = http_error(WeftError(f"an internal error occurred ({type(error).__name__})"))
    headers = answer.headers | echo(request)
    return Response(answer.body, answer.status, media_type="application/json", headers=headers)


class Opened(NamedTuple):
    """An `Opened` is an exchange whose body was read."""

    body: bytes
    tickets: Tickets
    headers: dict[str, str]
    """Holds the headers of every answer to it."""


class HttpEdge:
    """An `HttpEdge` holds the handlers of one app."""

    def __init__(self, service: RouterService) -> None:
        self._service = service
        self._created = int(service.wall_time())

    # ------------------------------------------------------------ endpoints that generate

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, CHAT)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, COMPLETIONS)

    async def responses(self, request: Request) -> Response:
        return await self._generate(request, RESPONSES)

    async def transcriptions(self, request: Request) -> Response:
        return await self._generate(request, TRANSCRIPTIONS)

    async def speech(self, request: Request) -> Response:
        return await self._generate(request, SPEECH)

    async def _generate(self, request: Request, endpoint: Endpoint) -> Response:
        async def answer(opened: Opened) -> Response:
            return await self._answer(request, endpoint, opened)

        return await self._exchange(request, answer, endpoint.body_type)

    async def _exchange(
        self, request: Request, answer: Callable[[Opened], Awaitable[Response]], body_type: BodyType = "json"
    ) -> Response:
        """Handles an exchange from the client's bytes to its answer: finds the tenant, takes a place among the requests
        in flight, reads the body, and leaves the rest to `answer`. A response that writes an answer returns the tickets
        when it is written; otherwise they are returned here."""
        service, label = self._service, client_label(request)
        caller = caller_of(request.scope)
        try:
            check_tenant(caller)
            check_content_type(request.scope, body_type)
            ticket = service.admission.admit(caller)
        except WeftError as error:
            service.count_refusal(caller, error)
            return self._refusal(request, error, {"x-request-id": label or mint_request_id()}, is_body_unread=True)
        begin_request(request.scope, ticket.request_id, label)
        headers = {"x-request-id": label or ticket.request_id, "x-weft-request-id": ticket.request_id}
        ticket.span = service.spans.begin(read_traceparent(request.headers.get("traceparent")))
        if ticket.span is not None:
            headers["traceresponse"] = ticket.span.header()
        with ExitStack() as undo:
            undo.callback(ticket.release)
            try:
                body = await read_body(request.scope, request.receive, service.config.max_body_bytes, ticket.grow)
            except WeftError as error:
                service.count_refusal(caller, error)
                return self._refusal(request, error, headers, is_body_unread=True)
            tickets = Tickets(ticket)
            undo.callback(tickets.release)
            response = await answer(Opened(body, tickets, headers))
            if isinstance(response, EventStream | WholeAnswer):
                undo.pop_all()
        return response

    async def _answer(self, request: Request, endpoint: Endpoint, opened: Opened) -> Response:
        """Answers a request with a complete body. If the answer is streamed, the event stream takes over the stream
        and the watch; otherwise both end here."""
        service, watch = self._service, ClientWatch(request.receive)
        tickets, headers = opened.tickets, opened.headers
        stream: JoinedStreams | None = None
        asked: Asked | None = None
        is_handed_on = False
        try:
            terms = BodyTerms(request.headers.get("content-type", ""), service.config)
            asked = await self._asked(request, lambda body: endpoint.read(body, terms), opened.body)
            stream = await watch.race(self._open(asked, tickets, client_label(request)))
            head = Head(
                endpoint.id_prefix + stream.request_id,
                int(service.wall_time()),
                asked.requests[0].model,
                service.config.system_fingerprint,
            )
            assert asked.writer is not None
            writer = asked.writer(stream, head, AnswerTools(service.token_bytes, service.decode))
            if asked.is_streamed:
                await watch.race(stream.started())
                is_handed_on = True
                if asked.stream_type:
                    headers = headers | {"content-type": asked.stream_type}
                return EventStream(stream, writer, headers, watch, tickets, service.config.write_timeout_s)
            content = await watch.race(self._written(stream, writer))
            note_answer(request.scope, stream)
            return self._whole(content, asked.media_type, opened)
        except WeftError as error:
            return self._refusal(request, error if asked is None else placed(error, asked.place), headers)
        finally:
            if not is_handed_on:
                if stream is not None:
                    stream.close()
                watch.close()

    async def _asked(self, request: Request, read: Callable[[bytes], Asked], body: bytes) -> Asked:
        """Returns what a body asks for. Raises InvalidRequest, and counts such a request, which gets no trace."""
        try:
            return await self._service.parse(read, body)
        except WeftError as error:
            self._service.count_refusal(caller_of(request.scope), error)
            raise

    async def _written(self, stream: JoinedStreams, writer: AnswerWriter) -> bytes:
        """Returns a whole answer once it has ended. One with many log-probabilities takes long to write, so a thread
        does that. Raises the error that ended a request."""
        await stream.ended()
        batches = [deltas async for deltas in stream]

        def write() -> bytes:
            for deltas in batches:
                writer.take(deltas)
            return writer.whole()

        is_small = stream.num_scores <= SCORES_IN_LOOP and not stream.sample_rate
        return write() if is_small else await self._service.write(write)

    def _whole(self, content: bytes, media_type: str, opened: Opened) -> WholeAnswer:
        """Returns the response of a whole answer, which takes over the tickets. Raises Overloaded if too many answers
        wait for their clients."""
        config = self._service.config
        times = config.write_timeout_s, config.min_answer_bytes_per_s
        return WholeAnswer(content, media_type, opened.headers, opened.tickets, *times)

    async def _open(self, asked: Asked, tickets: Tickets, label: str | None) -> JoinedStreams:
        """Starts the requests of an answer; each has a ticket of its own. If one of them is refused, the others end.
        Raises InvalidRequest if there are more requests than can ever be in flight at once, and what
        `Admission.admit_rest` and `RouterService.open` raise."""
        most, num_requests = self._service.admission.most_at_once(tickets.first.caller), len(asked.requests)
        if num_requests > most:
            message = f"a request may have at most {most} prompts here, because each takes a place, not {num_requests}"
            raise InvalidRequest(message, param="prompt")
        taken = tickets.begin(self._service.admission, num_requests, num_requests)
        return await self._open_each(asked.requests, taken, label)

    async def _open_each(
        self, requests: Sequence[PromptRequest], tickets: Sequence[Ticket], label: str | None, num_later: int = 0
    ) -> JoinedStreams:
        """Starts requests. If one is refused, the others end; and if a quota has refused it, neither these nor the
        `num_later` that would follow count for the quota of requests."""
        news = asyncio.Event()
        streams: list[RequestStream] = []
        try:
            for each, ticket in zip(requests, tickets, strict=True):
                ticket.span = ticket.span or beside(tickets[0].span)
                num_scores = sum(stream.num_prompt_scores for stream in streams)
                streams.append(await self._service.open(each, ticket, label, news, num_scores))
        except BaseException as error:  # However it ends, no request of a refused answer goes on.
            for stream in streams:
                stream.close()
            if isinstance(error, RateLimited):  # The ticket of the refused request has given that one back.
                rates, caller = self._service.admission.rates, tickets[0].caller
                rates.undo_begin(caller, len(requests) - 1 + num_later)
            raise
        return JoinedStreams(streams, news)

    # ------------------------------------------------------------ embeddings

    async def embeddings(self, request: Request) -> Response:
        """Returns the embeddings of texts, token ids, or a conversation with its media."""

        async def answer(opened: Opened) -> Response:
            watch = ClientWatch(request.receive)
            try:
                content = await watch.race(self._embed(opened, client_label(request)))
                return self._whole(content, "application/json", opened)
            except WeftError as error:
                return self._refusal(request, placed(error, embedding_place), opened.headers)
            finally:
                watch.close()

        return await self._exchange(request, answer)

    async def _embed(self, opened: Opened, label: str | None) -> bytes:
        """Computes the embeddings of one body, a limited number at once. Raises ModelNotFound if the cluster serves no
        embeddings, and what a request raises."""
        service, config = self._service, self._service.config
        asked = await service.parse(parse_embedding, opened.body)
        check_model(asked.model, config)
        if config.embeddings == "off":
            message = f"the model `{asked.model}` serves no embeddings; the operator can set `model.embeddings`"
            raise ModelNotFound(message, param="model")
        check_dimensions(asked, service.family.shape.hidden_size)
        requests = asked.each(config.embeddings)
        embeddings: list[bytes] = []
        usages: list[Usage] = []
        tickets, admission = opened.tickets, service.admission
        most = max(1, min(EMBEDDED_AT_ONCE, admission.most_at_once(tickets.first.caller) - 1))
        for begin, end in windows(len(requests), most):
            is_first = begin == 0  # All requests count for the quotas before the first is computed.
            taken = tickets.begin(admission, len(requests), end) if is_first else tickets.add(admission, end - begin)
            stream = await self._open_each(requests[begin:end], taken, label, len(requests) - end)
            with closing(stream):
                async for _ in stream:
                    pass  # A request that generates nothing has no text; the embedding comes with its end.
            embeddings += stream.embeddings
            usages += [stream.usage] if stream.usage is not None else []
            tickets.release_others()
        write = partial(embeddings_answer, asked, asked.model, embeddings, usages)
        is_small = sum(map(len, embeddings)) <= EMBEDDINGS_IN_LOOP_BYTES
        return write() if is_small else await service.write(write)

    # ------------------------------------------------------------ tokens

    async def tokenize(self, request: Request) -> Response:
        """Returns the tokens of a prompt, or of a conversation with its media."""

        async def tokens(opened: Opened) -> bytes:
            service = self._service
            asked = await service.parse(parse_tokenize, opened.body)
            wanted = asked.to_prompt_request(service.config.model_name)
            token_ids = await service.tokenize(wanted, opened.tickets.first)
            texts = await service.token_texts(token_ids) if asked.return_token_strs else None
            return tokens_answer(token_ids, service.family.shape.max_model_len, texts)

        return await self._compute(request, tokens)

    async def detokenize(self, request: Request) -> Response:
        """Returns the text of tokens, control tokens included."""

        async def text(opened: Opened) -> bytes:
            service = self._service
            asked = await service.parse(parse_detokenize, opened.body)
            check_model(asked.model or service.config.model_name, service.config)
            return text_answer(await service.detokenize(asked.tokens))

        return await self._compute(request, text)

    async def _compute(self, request: Request, compute: Callable[[Opened], Coroutine[Any, Any, bytes]]) -> Response:
        """Answers with what `compute` makes of the exchange, without a member of the cluster."""

        async def answer(opened: Opened) -> Response:
            watch = ClientWatch(request.receive)
            try:
                content = await watch.race(compute(opened))
                return self._whole(content, "application/json", opened)
            except WeftError as error:
                return self._refusal(request, error, opened.headers)
            finally:
                watch.close()

        return await self._exchange(request, answer)

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
        served = [self._model(name) for name in self._service.config.model_names]
        return answer_json(request, {"object": "list", "data": served})

    async def model(self, request: Request) -> Response:
        name, config = request.path_params["model_id"], self._service.config
        if name not in config.model_names:
            if name.rstrip("/") in ("", *config.model_names):
                raise HTTPException(HTTPStatus.NOT_FOUND)  # It is a path with a slash too many, and no name.
            return self._refusal(request, model_not_found(name, config), echo(request))
        return answer_json(request, self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        """Returns the model, or an adapter of it, as clients see it."""
        service, config = self._service, self._service.config
        max_model_len = service.family.shape.max_model_len
        voices = () if config.speech is None else config.speech.voices
        shown = model_object(name, self._created, max_model_len, service.modalities, voices)
        return shown if name == config.model_name else shown | adapter_origin(config.adapters[name], config.model_name)


def windows(num_items: int, most: int) -> Iterator[tuple[int, int]]:
    """Yields the beginning and end of parts of at most `most` items each."""
    for begin in range(0, num_items, most):
        yield begin, min(begin + most, num_items)


def placed(error: WeftError, place: Callable[[str], str]) -> WeftError:
    """Returns the error with the place that it names as the client's body has it, in its message too."""
    param = None if error.param is None else place(error.param)
    if error.param is None or param is None or param == error.param:
        return error
    message = error.message.replace(error.param, param)
    return type(error)(message, param=param, retry_after_s=error.retry_after_s)


def client_label(request: Request) -> str | None:
    """Returns the client's own `x-request-id`, if it is fit to be repeated. It is never an internal id."""
    label = request.headers.get("x-request-id", "")
    return label if CLIENT_LABEL.fullmatch(label) else None

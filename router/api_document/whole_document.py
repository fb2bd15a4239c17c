"""Puts the OpenAPI document together from the operations, the schemas of requests and answers, and the table of errors.

The document says what one router serves: its examples name the served model, its messages have the media that the model
takes, and it asks for keys only if the router does.
"""

from __future__ import annotations

from typing import Any

from router.api_document.answer_schemas import OPEN, answer_schemas
from router.api_document.chunk_schemas import chunk_schemas
from router.api_document.operations import EVENTS_TYPE, JSON_TYPE, AnswerLink, Operation, ServedApi, operations
from router.api_document.refusals import EVERY_ANSWER, HEADERS, header_refs, refusals
from router.api_document.request_schemas import Schema, ref, request_schemas

TAG_TO_DESCRIPTION = {
    "Generation": "Answers of the model, in the forms of OpenAI's API.",
    "Prompts": "What becomes of a prompt, without an answer.",
    "Models": "The model that is served, and its adapters.",
    "Health": "What supervisors and load balancers ask.",
    "Cluster": "What operators see of the cluster and of its requests.",
    "Document": "The description of this API.",
}
ABOUT = (
    "Serves the model `{model}` behind OpenAI's API. Refusals have OpenAI's error envelope: 429 and 503 may be tried"
    " again after `retry-after`, and `x-should-retry: false` says that a retry would fail too. Paths that do not exist"
    " are answered 404, and other methods 405, in the same envelope."
)
STREAM = (
    "Sent if `stream` is true: server-sent events of this form, with one JSON object in each `data` line. {end}"
    " A failure after the first event is an event with an `error`."
)
DONE = "The last event is `data: [DONE]`."
NO_DONE = "The last event says that the answer is done."
DONE_EVENTS = ("ChatCompletionEvent", "CompletionEvent")
"""Names the events that end with `[DONE]`."""


def api_document(served: ServedApi) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document of a router as JSON values."""
    paths: dict[str, Schema] = {}
    shared = SharedResponses()
    for operation in operations(served):
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, shared)
    requests = request_schemas(served.modalities, takes_features=served.features is not None)
    schemas = requests | answer_schemas() | chunk_schemas() | {"OpenApiDocument": OPEN}
    about = ABOUT.format(model=served.model_name)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Weft", "version": served.version, "description": about},
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": text} for name, text in TAG_TO_DESCRIPTION.items()],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "responses": shared.name_to_response,
            "headers": HEADERS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "An API key."}},
        },
    }
    return document | ({"security": [{"key": []}]} if served.asks_for_keys else {})


class SharedResponses:
    """A `SharedResponses` keeps each refusal once, under the name of the operation that has it first; others refer to
    it. This makes the document half as long."""

    def __init__(self) -> None:
        self.name_to_response: dict[str, Schema] = {}

    def refer(self, name: str, response: Schema) -> Schema:
        """Returns a reference to the response. It is kept as `name` if there is none like it."""
        known = next((key for key, value in self.name_to_response.items() if value == response), name)
        self.name_to_response[known] = response
        return {"$ref": f"#/components/responses/{known}"}


def _operation(operation: Operation, shared: SharedResponses) -> Schema:
    described: Schema = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "description": operation.description,
    }
    if operation.parameters:
        described["parameters"] = [*operation.parameters]
    if operation.request:
        described["requestBody"] = {"required": True, "content": {operation.request_type: _body(operation)}}
    if operation.access == "open":
        described["security"] = []
    return described | {"responses": _responses(operation, shared)}


def _body(operation: Operation) -> Schema:
    examples = {each.name: {"summary": each.summary, "value": each.body} for each in operation.examples}
    return {"schema": ref(operation.request)} | ({"examples": examples} if examples else {})


def _responses(operation: Operation, shared: SharedResponses) -> dict[str, Schema]:
    """Returns the responses of an operation by status."""
    headers = header_refs([*EVERY_ANSWER, *operation.headers])
    content = {kind: {"schema": ref(name) if name else {"type": "string"}} for kind, name in operation.answers.items()}
    if operation.events:
        content[EVENTS_TYPE] = {"schema": _events(operation.events)}
    answers: dict[str, Schema] = {}
    if content:
        answers["200"] = {"description": operation.summary + ".", "headers": headers, "content": content}
    if content and operation.links:
        answers["200"]["links"] = {link.name: _link(link) for link in operation.links}
    for status, response in refusals(operation.errors, operation.headers).items():
        answers[status] = shared.refer(f"{operation.name}{status}", response)
    if operation.is_unavailable:
        missing = {"description": "The server can't serve now.", "headers": headers}
        answers["503"] = missing | {"content": {JSON_TYPE: {"schema": ref(operation.is_unavailable)}}}
    return answers


def _link(link: AnswerLink) -> Schema:
    return {
        "operationId": link.operation,
        "parameters": {link.parameter: link.value},
        "description": link.description,
    }


def _events(name: str) -> Schema:
    """Returns the schema of one event, as OpenAPI 3.2 and the tools for 3.1 understand that of an event stream."""
    end = DONE if name in DONE_EVENTS else NO_DONE
    chunk = {"type": "string", "contentMediaType": JSON_TYPE, "contentSchema": ref(name)}
    data = {"anyOf": [{"const": "[DONE]"}, chunk] if name in DONE_EVENTS else [chunk]}
    return {
        "type": "object",
        "description": STREAM.format(end=end),
        "required": ["data"],
        "properties": {"data": data, "event": {"type": "string"}},
    }

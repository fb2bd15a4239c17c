"""Lists the operations of the API: the route, what it takes, what it answers, and which errors refuse it.

An operation with a route is here once; a test compares the list with the routes of the app. The module knows nothing of
how an operation is carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from fabric.contracts import InvalidRequest, ModelNotFound
from router.api import FORMAT_TO_MEDIA_TYPE
from router.api_document.examples import (
    Example,
    SampleFeatures,
    chat_examples,
    completion_examples,
    detokenize_examples,
    embedding_examples,
    response_examples,
    tokenize_examples,
)
from router.api_document.refusals import BODY, GENERATION, KEY, OPERATOR, PROMPT, RATE_HEADERS, Errors
from router.api_document.request_schemas import Schema

Access = Literal["open", "key", "operator"]
JSON_TYPE = "application/json"
HTML_TYPE = "text/html"
EVENTS_TYPE = "text/event-stream"
TEXT_TYPE = "text/plain"
FORM_TYPE = "multipart/form-data"
MAX_LISTED = 1000
MAX_SECONDS = 3600
"""Limits the requests that one list may have."""


class ServedApi(NamedTuple):
    """A `ServedApi` holds what the document says about one router."""

    model_name: str
    modalities: tuple[str, ...]
    """Names the modalities of media that the model takes on this server."""
    has_embeddings: bool
    asks_for_keys: bool
    version: str
    features: SampleFeatures | None = None
    """Describes features of a picture that the server takes; it is None if it takes none."""
    voices: tuple[str, ...] = ()
    """Names the voices in which the server speaks."""
    adapters: tuple[str, ...] = ()
    """Names the LoRA adapters for which clients may ask as for a model."""


class AnswerLink(NamedTuple):
    """An `AnswerLink` says which value of an answer names what another operation reads."""

    name: str
    operation: str
    """Is the id of the other operation."""
    parameter: str
    """Names the parameter of the other operation."""
    value: str
    """Says where the value stands, as a runtime expression of OpenAPI."""
    description: str


class Operation(NamedTuple):
    """An `Operation` is one method of one path."""

    method: Literal["get", "post"]
    path: str
    name: str
    """Is the operation's id."""
    tag: str
    summary: str
    description: str
    access: Access
    errors: Errors
    answers: dict[str, str]
    """Maps the media types of a successful answer to the names of their schemas; an empty name means text."""
    request: str = ""
    """Names the schema of the body; it is empty if there is none."""
    examples: Sequence[Example] = ()
    parameters: Sequence[Schema] = ()
    events: str = ""
    """Names the schema of the events if the answer may be streamed."""
    is_unavailable: str = ""
    """Names the schema of an answer with status 503 that is no error."""
    request_type: str = "application/json"
    """Is the media type of the body."""
    headers: Sequence[str] = ()
    """Names the headers of its answers beyond those of every answer."""
    links: Sequence[AnswerLink] = ()
    """Says where a successful answer leads."""


MADE_HEADERS = ("x-weft-request-id", *RATE_HEADERS)
_FORMAT: Schema = {
    "name": "format",
    "in": "query",
    "description": "Asks for JSON, or for a page for people; by default the header `accept` decides.",
    "schema": {"enum": ["html", "json"]},
}
SECONDS: Schema = {"type": "integer", "minimum": 1, "maximum": MAX_SECONDS}
LIMIT: Schema = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_LISTED}, {"const": ""}]}
RECORD = AnswerLink(
    "record",
    "getRequest",
    "request_id",
    "$response.header.x-weft-request-id",
    "An operator finds the record of the request under the id in this header.",
)
LISTED_RECORD = AnswerLink(
    "record",
    "getRequest",
    "request_id",
    "$response.body#/requests/0/request_id",
    "Each request of the list has a record under its id.",
)
LISTED_MODEL = AnswerLink(
    "model", "getModel", "model_id", "$response.body#/data/0/id", "The model has a path of its own."
)
BAD_PARAMETER: Errors = (InvalidRequest,)
GONE: Errors = (*KEY, ModelNotFound)
"""Is answered 404 for a name that is not there."""


def operations(served: ServedApi) -> list[Operation]:
    """Returns all operations, with examples for the served model."""
    return [
        *_generation(served),
        *_response(served),
        *_transcription(served),
        *_speech(served),
        *_prompts(served),
        *_models(served),
        *_health(),
        *_cluster(),
        *_document(),
    ]


def _generation(served: ServedApi) -> list[Operation]:
    model, modalities = served.model_name, served.modalities
    return [
        Operation(
            "post",
            "/v1/chat/completions",
            "createChatCompletion",
            "Generation",
            "Answer a conversation",
            f"Continues a conversation, whole or streamed. {_taken(served)} Unknown fields are ignored, unless they"
            " would change the answer.",
            "key",
            GENERATION,
            {JSON_TYPE: "ChatCompletion"},
            "ChatRequest",
            chat_examples(model, modalities, served.features),
            events="ChatCompletionEvent",
            headers=MADE_HEADERS,
            links=(RECORD,),
        ),
        Operation(
            "post",
            "/v1/completions",
            "createCompletion",
            "Generation",
            "Continue texts",
            "Continues one or several texts as they are, without a chat template, whole or streamed.",
            "key",
            GENERATION,
            {JSON_TYPE: "Completion"},
            "CompletionRequest",
            completion_examples(model),
            events="CompletionEvent",
            headers=MADE_HEADERS,
            links=(RECORD,),
        ),
    ]


def _taken(served: ServedApi) -> str:
    if not served.modalities:
        return "It takes text only."
    return f"Messages may have parts of these media: {', '.join(served.modalities)}."


def _response(served: ServedApi) -> list[Operation]:
    return [
        Operation(
            "post",
            "/v1/responses",
            "createResponse",
            "Generation",
            "Make a response",
            f"Answers a conversation in the form of OpenAI's responses. No response is kept. {_taken(served)}",
            "key",
            GENERATION,
            {JSON_TYPE: "Response"},
            "ResponsesRequest",
            response_examples(served.model_name, served.modalities),
            events="ResponseEvent",
            headers=MADE_HEADERS,
            links=(RECORD,),
        ),
    ]


def _transcription(served: ServedApi) -> list[Operation]:
    is_heard = "audio" in served.modalities
    hears = "" if is_heard else " The model of this server does not hear, so the answer is always 400."
    return [
        Operation(
            "post",
            "/v1/audio/transcriptions",
            "createTranscription",
            "Generation",
            "Transcribe a sound",
            f"Asks the model to write down what is said, whole or streamed.{hears}",
            "key",
            GENERATION,
            {JSON_TYPE: "Transcript", TEXT_TYPE: ""} if is_heard else {},
            "TranscriptionForm",
            events="TranscriptEvent" if is_heard else "",
            request_type=FORM_TYPE,
            headers=MADE_HEADERS,
            links=(RECORD,),
        ),
    ]


def _speech(served: ServedApi) -> list[Operation]:
    voices = ", ".join(served.voices)
    speaks = (
        f" Voices: {voices}." if voices else " The model of this server does not speak, so the answer is always 400."
    )
    media_types = dict.fromkeys((*FORMAT_TO_MEDIA_TYPE.values(),), "")
    return [
        Operation(
            "post",
            "/v1/audio/speech",
            "createSpeech",
            "Generation",
            "Read a text aloud",
            f"Speaks a text, as a file, or as a stream of samples or of events.{speaks}",
            "key",
            GENERATION,
            media_types if voices else {},
            "SpeechRequest",
            events="SpeechEvent" if voices else "",
            headers=MADE_HEADERS,
            links=(RECORD,),
        ),
    ]


def _prompts(served: ServedApi) -> list[Operation]:
    model = served.model_name
    says = "" if served.has_embeddings else " This server serves no embeddings, so every request is answered 404."
    return [
        Operation(
            "post",
            "/v1/embeddings",
            "createEmbeddings",
            "Prompts",
            "Embed texts",
            f"Returns one embedding for each input, or that of a conversation with its media.{says}",
            "key",
            GENERATION,
            {JSON_TYPE: "Embeddings"} if served.has_embeddings else {},
            "EmbeddingRequest",
            embedding_examples(model) if served.has_embeddings else (),
            headers=MADE_HEADERS,
            links=(RECORD,),
        ),
        Operation(
            "post",
            "/tokenize",
            "tokenize",
            "Prompts",
            "Tokenize a prompt",
            "Returns the tokens of a text, or of a conversation with its media, as the model gets them.",
            "key",
            PROMPT,
            {JSON_TYPE: "Tokens"},
            "TokenizeRequest",
            tokenize_examples(model),
            headers=("x-weft-request-id", *RATE_HEADERS),
            links=(RECORD,),
        ),
        Operation(
            "post",
            "/detokenize",
            "detokenize",
            "Prompts",
            "Turn tokens into text",
            "Returns the text of tokens, control tokens included.",
            "key",
            (*BODY, ModelNotFound),
            {JSON_TYPE: "Detokenized"},
            "DetokenizeRequest",
            detokenize_examples(model),
            headers=("x-weft-request-id", *RATE_HEADERS),
        ),
    ]


def _models(served: ServedApi) -> list[Operation]:
    tag, name = "Models", "The name of the model, or of an adapter."
    return [
        _read("/v1/models", "listModels", tag, "List the models", _listed(served), "ModelList")._replace(
            links=(LISTED_MODEL,)
        ),
        _read(
            "/v1/models/{model_id}",
            "getModel",
            tag,
            "Describe a model",
            "Returns the model and the length of its context.",
            "Model",
        )._replace(parameters=[_path_parameter("model_id", name)], errors=(*BAD_PARAMETER, *GONE)),
    ]


def _listed(served: ServedApi) -> str:
    if not served.adapters:
        return "There is one model."
    return f"There is one model, and these adapters of it: {', '.join(served.adapters)}."


def _health() -> list[Operation]:
    tag = "Health"
    alive = "Returns 503 if the process should be replaced. It needs no key."
    ready = "Returns 503 while a worker or a needed encoder is missing, or while the server stops. It needs no key."
    live = _read("/health/live", "isAlive", tag, "Ask whether the process lives", alive, "Liveness", "open")
    return [
        live._replace(path="/health", name="health", is_unavailable="Liveness"),
        live._replace(is_unavailable="Liveness"),
        _read("/health/ready", "isReady", tag, "Ask whether requests are served", ready, "Readiness", "open")._replace(
            is_unavailable="Readiness"
        ),
    ]


def _cluster() -> list[Operation]:
    tag = "Cluster"
    filters = [
        _query("limit", "Lists at most this many requests; 50 if it is empty.", LIMIT),
        _query("outcome", "Lists only requests that ended so, such as `stop` or `running`.", {"type": "string"}),
        _query("modality", "Lists only requests of this class, such as `text` or `image`.", {"type": "string"}),
        _FORMAT,
    ]
    listed = "Lists the latest requests of all routers, the newest first."
    found = "Returns the record of a recent request: where its time went, and why it was routed as it was."
    by_id = _path_parameter("request_id", "The id of the request, or that of its completion.")
    exposition = "Returns the series of all routers in Prometheus' text format."
    targets = "Lists the machines, or the members, that Prometheus scrapes, for its HTTP service discovery."
    records = _operator("/weft/requests", "listRequests", tag, "List the latest requests", listed, "RequestList")
    record = _operator("/weft/requests/{request_id}", "getRequest", tag, "Explain a request", found, "RequestRecord")
    spans = "Returns what all parts did for the latest requests, or for one, as spans in the form that Perfetto opens."
    few = _query("seconds", "Takes the requests that came within this many seconds; 60 by default.", SECONDS)
    one = _query("request_id", "Takes this request alone, by its id or that of its completion.", {"type": "string"})
    picture = "Says what every worker and encoder does at this moment, as far as this router knows."
    return [
        _operator("/weft/cluster", "getCluster", tag, "See the cluster", picture, "ClusterPicture"),
        _operator("/metrics", "metrics", tag, "Read the metrics", exposition, "")._replace(answers={TEXT_TYPE: ""}),
        _operator(
            "/weft/members", "listMembers", tag, "List the members", "Lists workers, encoders and routers.", "Members"
        ),
        _operator("/weft/prometheus-targets", "listTargets", tag, "List scrape targets", targets, "PrometheusTargets"),
        records._replace(
            parameters=filters,
            answers={JSON_TYPE: "RequestList", HTML_TYPE: ""},
            errors=(*OPERATOR, *BAD_PARAMETER),
            links=(LISTED_RECORD,),
        ),
        record._replace(
            parameters=[by_id, _FORMAT],
            answers={JSON_TYPE: "RequestRecord", HTML_TYPE: ""},
            errors=(*OPERATOR, *BAD_PARAMETER, *GONE),
        ),
        _operator("/weft/spans", "listSpans", tag, "Read spans", spans, "SpanFile")._replace(
            parameters=[*filters[:3], few, one], errors=(*OPERATOR, *BAD_PARAMETER, *GONE)
        ),
    ]


def _document() -> list[Operation]:
    tag = "Document"
    page = _read("/docs", "docs", tag, "Read the API's page", "Shows this document as a page.", "")
    console = "Shows a page on which people talk with the model and see where requests lose their time."
    off = "It needs no key. The operator may turn the console off; then there is no such path."
    parts, part = "Returns one of the files that the page loads.", _path_parameter("name", "The name of the file.")
    shown = _read("/console", "console", tag, "Open the console", f"{console} {off}", "", "open")
    file = _read("/console/{name}", "consoleFile", tag, "Load a part of the console", parts, "", "open")
    types = {"text/javascript": "", "text/css": "", "image/svg+xml": ""}
    return [
        shown._replace(answers={HTML_TYPE: ""}, errors=(ModelNotFound,)),
        file._replace(answers=types, parameters=[part], errors=(ModelNotFound,)),
        _read("/openapi.json", "openapi", tag, "Read the API's document", "Returns this document.", "OpenApiDocument"),
        page._replace(answers={HTML_TYPE: ""}),
    ]


# ------------------------------------------------------------ pieces of operations


def _read(
    path: str, name: str, tag: str, summary: str, description: str, schema: str, access: Access = "key"
) -> Operation:
    errors = KEY if access == "key" else ()
    return Operation("get", path, name, tag, summary, description, access, errors, {JSON_TYPE: schema})


def _operator(path: str, name: str, tag: str, summary: str, description: str, schema: str) -> Operation:
    described = f"{description} If keys are asked for, it needs that of an operator."
    return _read(path, name, tag, summary, described, schema)._replace(access="operator", errors=OPERATOR)


def _path_parameter(name: str, description: str) -> Schema:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "description": description, "schema": schema}


def _query(name: str, description: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "description": description, "schema": schema}

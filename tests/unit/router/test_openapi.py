"""Tests that the OpenAPI document is true: its examples are answered as it says, real answers fit its schemas, and it
has every route and every status."""

from __future__ import annotations

import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest
from described_api import Description, description_of, payloads
from edge_client import served
from router_chats import chat_body, image
from router_media_fakes import media_cluster
from starlette.routing import Route
from tool_samples import CALL, TOOLS

from deploy.testing import TINY_MODEL
from fabric.contracts import Aborted, EngineFailed, WeftError
from router.api import ERROR_TO_STATUS
from router.api_document import ServedApi, api_document
from router.edge import create_api, create_app
from router.router_config import RateQuota, Tenant

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
KEY = "a-key"
DIGEST_OF_KEY = hashlib.sha256(KEY.encode()).hexdigest()


async def test_every_example_is_answered_as_the_document_says() -> None:
    async with served(embeddings="last", takes_image_embeds=True) as (_, client):
        description = await description_of(client)
        assert "image_embeds" in {name for _, name, _ in description.examples()}
        sent = {path for path, _, _ in description.examples()}
        posted = {path for path, methods in description.document["paths"].items() if "post" in methods}
        assert sent == posted - {"/v1/audio/transcriptions", "/v1/audio/speech"}
        for path, name, body in description.examples():
            schema = description.operation("post", path)["requestBody"]["content"]["application/json"]["schema"]
            assert description.mismatches(body, schema) == [], (path, name)
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, (path, name, answer.text)
            assert description.flaws("post", path, answer) == [], (path, name)


async def test_every_get_without_a_name_is_answered_as_the_document_says() -> None:
    async with served() as (_, client):
        description = await description_of(client)
        paths = [path for path, methods in description.document["paths"].items() if "get" in methods]
        values = {"{model_id}": TINY_MODEL, "{request_id}": "none"}
        statuses = {}
        for path in paths:
            url = path
            for name, value in values.items():
                url = url.replace(name, value)
            answer = await client.get(url)
            statuses[path] = answer.status_code
            assert description.flaws("get", path, answer) == [], path
        missing = [path for path, status in statuses.items() if status != 200]
        assert sorted(missing) == ["/console/{name}", "/weft/requests/{request_id}"]


DETAILS: dict[str, Any] = {"seed": 7, "weft": {"explain": True}, "max_tokens": 8}
WITH_IDS: dict[str, Any] = {"return_token_ids": True}
IMAGE_CHAT = [{"role": "user", "content": [image()]}]
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, WITH_IDS | {"messages": IMAGE_CHAT, "logprobs": True, "top_logprobs": 3, "n": 2}),
    (CHAT, WITH_IDS | {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}),
    (COMPLETIONS, WITH_IDS | {"prompt": ["one", "two"], "logprobs": 2}),
    (COMPLETIONS, WITH_IDS | {"prompt": "one", "logprobs": 0}),
    (RESPONSES, {"input": "hi", "top_logprobs": 2, "max_output_tokens": 8}),
    (RESPONSES, {"input": "hi", "tools": [{"type": "function", **TOOLS[0]["function"]}]}),
]


@pytest.mark.parametrize(("path", "fields"), BODIES)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_answers_with_everything_that_can_be_asked_for_fit_the_schemas(
    path: str, fields: dict[str, Any], is_streamed: bool
) -> None:
    async with served() as (cluster, client):
        description = await description_of(client)
        if "tools" in fields:
            cluster.workers[0].script.reply = f"Let me see.\n{CALL}"
        body = {"model": TINY_MODEL} | DETAILS | fields | (STREAMED if is_streamed else {})
        if "tools" in fields:
            body = {key: value for key, value in body.items() if key != "max_tokens"}
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert description.flaws("post", path, answer) == []
        if is_streamed:
            assert len(payloads(answer)) > 3
        assert ("get_weather" in answer.text or "weather" in answer.text) == ("tools" in fields)


async def test_prompts_with_log_probabilities_fit_the_schemas() -> None:
    async with served() as (_, client):
        description = await description_of(client)
        scored = {"model": TINY_MODEL, "prompt_logprobs": 1, "max_tokens": 2}
        for path, fields in (
            (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
            (COMPLETIONS, {"prompt": "hi", "echo": True, "logprobs": 1}),
        ):
            answer = await client.post(path, json=scored | fields)
            assert answer.status_code == 200
            assert description.flaws("post", path, answer) == []


async def test_links_of_an_answer_lead_to_what_they_name() -> None:
    bodies = {
        CHAT: {"messages": [{"role": "user", "content": "hi"}]},
        COMPLETIONS: {"prompt": "hi"},
        RESPONSES: {"input": "hi"},
        "/v1/embeddings": {"input": "hi"},
        "/tokenize": {"prompt": "hi"},
    }
    async with served(embeddings="last") as (_, client):
        description = await description_of(client)
        paths = {
            operation["operationId"]: path
            for path, methods in description.document["paths"].items()
            for operation in methods.values()
        }
        followed = []
        for method, path in [*(("post", path) for path in bodies), ("get", "/v1/models"), ("get", "/weft/requests")]:
            body = {"model": TINY_MODEL} | bodies[path] if method == "post" else None
            answer = await client.request(method, path, json=body)
            (link,) = description.response(method, path, 200)["links"].values()
            ((parameter, expression),) = link["parameters"].items()
            named = re.fullmatch(r"\$response\.(header\.|body#/)(.*)", expression)
            assert named is not None
            value: Any = answer.headers if named[1] == "header." else answer.json()
            for step in named[2].split("/"):
                value = value[int(step) if step.isdigit() else step]
            found = await client.get(paths[link["operationId"]].replace(f"{{{parameter}}}", value))
            assert found.status_code == 200, path
            assert value in (found.json().get("id"), found.json().get("request_id")), path
            followed.append(path)
        linked = {
            path
            for path, methods in description.document["paths"].items()
            for operation in methods.values()
            if operation["responses"].get("200", {}).get("links")
        }
        assert linked == set(followed)


async def test_a_field_that_the_document_does_not_know_is_noticed() -> None:
    """The schemas of answers are closed; otherwise the tests above could not fail."""
    async with served() as (_, client):
        description = await description_of(client)
        answer = (await client.post(CHAT, content=chat_body(max_tokens=2))).json()
        schema = {"$ref": "#/components/schemas/ChatCompletion"}
        assert description.mismatches(answer, schema) == []
        assert description.mismatches(answer | {"new": 1}, schema) != []
        answer["choices"][0]["message"]["new"] = 1
        assert description.mismatches(answer, schema) != []


async def test_a_stream_that_fails_fits_the_schemas() -> None:
    for path, fields in ((CHAT, {"messages": [{"role": "user", "content": "hi"}]}), (RESPONSES, {"input": "hi"})):
        async with served() as (cluster, client):
            description = await description_of(client)
            cluster.workers[0].script.die_at = 2
            cluster.workers[0].script.error = EngineFailed("the step has failed")
            answer = await client.post(path, json={"model": TINY_MODEL, "stream": True} | fields)
            assert answer.status_code == 200
            assert "error" in payloads(answer)[-1]
            assert description.flaws("post", path, answer) == []


async def test_the_document_has_the_routes_of_the_app_and_no_others() -> None:
    async with served() as (cluster, client):
        description = await description_of(client)
        app = create_api(cluster.service)
        routes = {
            (method.lower(), route.path.replace(":path}", "}"))
            for route in app.routes
            if isinstance(route, Route)
            for method in route.methods or ()
            if method != "HEAD"
        }
        described = {(method, path) for path, methods in description.document["paths"].items() for method in methods}
        assert described == routes


def test_the_document_is_valid_openapi() -> None:
    openapi = pytest.importorskip("openapi_spec_validator")
    document = api_document(ServedApi("m", ("audio", "image", "video"), True, True, "1"))
    assert [str(flaw) for flaw in openapi.OpenAPIV31SpecValidator(document).iter_errors()] == []


def test_every_error_is_described_where_it_can_occur() -> None:
    document = api_document(ServedApi("m", ("image",), True, True, "1"))
    description = Description(document)
    for path in (CHAT, COMPLETIONS, RESPONSES, "/v1/embeddings"):
        for error in [each for each in ERROR_TO_STATUS if each is not Aborted] + [WeftError]:
            status = ERROR_TO_STATUS.get(error, 500)
            assert f"`{error.code}`" in description.response("post", path, status)["description"], (path, error)
    with pytest.raises(KeyError):
        description.response("post", CHAT, ERROR_TO_STATUS[Aborted])


async def test_refusals_of_every_route_are_described() -> None:
    quota = RateQuota(requests_per_minute=1)
    tenant = Tenant("a", key_digests=(DIGEST_OF_KEY,), rates=quota)
    headers = {"authorization": f"Bearer {KEY}"}
    async with served(tenants=(tenant,), embeddings="last") as (_, client):
        description = await description_of(client, headers)
        assert description.document["security"] == [{"key": []}]
        for path, methods in description.document["paths"].items():
            for method, operation in methods.items():
                answer = await client.request(method, path.replace("{", "").replace("}", ""))
                is_open = operation.get("security") == []
                assert (answer.status_code == 401) != is_open, path
                if not is_open:
                    assert description.flaws(method, path, answer) == []
        statuses = []
        for path in ("/tokenize", CHAT):
            answer = await client.post(path, content=b"{", headers=headers)
            statuses.append(answer.status_code)
            assert description.flaws("post", path, answer) == []
        forbidden = await client.get("/weft/members", headers=headers)
        assert description.flaws("get", "/weft/members", forbidden) == []
        assert [*statuses, forbidden.status_code] == [400, 429, 403]


async def test_only_what_is_served_is_described() -> None:
    async with served() as (_, client):
        description = await description_of(client)
        schemas = description.document["components"]["schemas"]
        assert "ImagePart" in schemas
        assert "VideoPart" not in schemas
        assert "ImageEmbedsPart" not in schemas
        assert schemas["ImagePart"]["properties"]["type"] == {"const": "image_url"}
        assert "InputAudioPart" not in schemas
        assert not any(path == "/v1/embeddings" for path, _, _ in description.examples())
        assert "security" not in description.document
        assert {body["model"] for _, _, body in description.examples()} == {TINY_MODEL}
        refused = await client.post("/v1/embeddings", json={"model": TINY_MODEL, "input": "hi"})
        assert description.flaws("post", "/v1/embeddings", refused) == []


def test_requests_have_only_fields_that_take_effect() -> None:
    schemas = api_document(ServedApi("m", ("image",), True, True, "1"))["components"]["schemas"]
    names = ("ChatRequest", "CompletionRequest", "ResponsesRequest")
    detailed = {"prompt_logprobs", "return_token_ids"}
    assert [detailed & schemas[name]["properties"].keys() for name in names] == [detailed, detailed, set()]
    assert schemas["Response"]["properties"]["truncation"] == {"const": "disabled"}


def test_every_reference_leads_somewhere_and_the_document_is_not_large() -> None:
    document = api_document(ServedApi("m", ("audio", "image", "video"), True, True, "1"))
    text = json.dumps(document)
    names = {part.partition('"')[0] for part in text.split('"#/components/')[1:]}
    assert {name for name in names if name.split("/")[1] not in document["components"][name.split("/")[0]]} == set()
    assert len(text) < 200_000


class PageReader(HTMLParser):
    """Collects the tags, the links and the ids of a page, and how many of its elements are open at its end."""

    VOID = ("meta", "br", "input")

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.open += [] if tag in self.VOID else [tag]
        given = dict(attrs)
        self.links += [str(given["href"])] if "href" in given else []
        self.ids |= {str(given["id"])} if "id" in given else set()
        self.wrong += [name for name in given if name.startswith("on") or name == "src"]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


async def test_the_page_shows_every_operation_and_loads_nothing() -> None:
    async with served() as (_, client):
        description = await description_of(client)
        answer = await client.get("/docs")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        reader = PageReader()
        reader.feed(answer.text)
        assert (reader.wrong, reader.open) == ([], [])
        assert reader.tags.isdisjoint({"script", "link", "img", "iframe"})
        assert {link for link in reader.links if not link.startswith("#")} == {"/openapi.json"}
        assert {link[1:] for link in reader.links if link.startswith("#")} <= reader.ids
        for path, methods in description.document["paths"].items():
            assert path in answer.text
            assert {operation["operationId"] for operation in methods.values()} <= reader.ids
        assert set(description.document["components"]["schemas"]) <= {
            name.removeprefix("schema-") for name in reader.ids
        }


SCORED = {"include[]": "logprobs"}


async def test_transcripts_are_answered_as_the_document_says() -> None:
    async with media_cluster() as cluster:
        transport = httpx.ASGITransport(create_app(cluster.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://weft") as client:
            description = await description_of(client)
            path, sound = "/v1/audio/transcriptions", ("speech.wav", b"audio 16000x32000", "audio/wav")
            kinds: list[dict[str, str]] = [{}, {"response_format": "text"}, {"response_format": "verbose_json"}]
            for fields in (*kinds, {"stream": "true"}, SCORED, SCORED | {"stream": "true"}):
                answer = await client.post(path, data={"model": TINY_MODEL} | fields, files={"file": sound})
                assert answer.status_code == 200, answer.text
                assert description.flaws("post", path, answer) == [], fields

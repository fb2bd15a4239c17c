"""Tests what a cluster accepts from browsers: bodies of the right type only, and without keys nothing that pages of
other sites send, or that comes under a name which is not the server's."""

from __future__ import annotations

import hashlib

import httpx
import pytest
from described_api import description_of
from edge_client import served
from router_chats import chat_body

from deploy.compose import allowed_hosts, host_name
from deploy.config import ClusterConfig
from router.router_config import Tenant

CHAT = "/v1/chat/completions"
JSON_ROUTES = (CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize")
OTHER_TYPES = (
    "text/plain",
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "text/json",
    "applicationjson",
    "application/jsonx",
    "text/x+json",
    "text/plain, application/json",
)
JSON_TYPES = ("application/json", "Application/JSON", "application/json; charset=utf-8", "application/problem+json", "")
JSON = "application/json"
KEY = "a-key"
KEYED = Tenant("a", key_digests=(hashlib.sha256(KEY.encode()).hexdigest(),))
OPEN_PATHS = ("/health", "/health/live", "/health/ready")


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_a_body_of_another_type_is_refused_by_every_route() -> None:
    async with served(embeddings="last") as (cluster, client):
        description = await description_of(client)
        for path in JSON_ROUTES:
            for kind in OTHER_TYPES:
                answer = await client.post(path, content=chat_body(), headers={"content-type": kind})
                assert refusal(answer) == (415, "unsupported_content_type"), (path, kind)
                assert description.flaws("post", path, answer) == []
        for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded", ""):
            answer = await client.post("/v1/audio/transcriptions", content=b"{}", headers={"content-type": kind})
            assert refusal(answer) == (415, "unsupported_content_type"), kind
            assert description.flaws("post", "/v1/audio/transcriptions", answer) == []
        assert not cluster.workers[0].requests


async def test_two_types_are_both_checked() -> None:
    async with served() as (_, client):
        headers = [("content-type", "application/json"), ("content-type", "text/plain")]
        assert (await client.post(CHAT, content=chat_body(), headers=headers)).status_code == 415


async def test_a_compressed_body_is_refused_by_every_route_before_it_is_read() -> None:
    async with served(embeddings="last") as (cluster, client):
        description = await description_of(client)
        for path in (*JSON_ROUTES, "/v1/audio/transcriptions"):
            kind = JSON if path in JSON_ROUTES else "multipart/form-data; boundary=x"
            for coding in ("gzip", "br", "identity, deflate"):
                headers = {"content-type": kind, "content-encoding": coding}
                answer = await client.post(path, content=b"\x1f\x8b", headers=headers)
                assert refusal(answer) == (415, "unsupported_content_type"), path
                assert answer.json()["error"]["message"] == (
                    "the body must be sent as it is, without the header `Content-Encoding`,"
                    f' not as "{coding.rpartition(", ")[2]}"'
                )
                assert description.flaws("post", path, answer) == []
        for coding in ("identity", "Identity", ""):
            answer = await client.post(CHAT, content=chat_body(), headers={"content-encoding": coding})
            assert answer.status_code == 200, coding
        assert len(cluster.workers[0].requests) == 3


async def test_json_is_taken_under_all_its_names_and_without_one() -> None:
    async with served() as (_, client):
        for kind in JSON_TYPES:
            answer = await client.post(CHAT, content=chat_body(), headers={"content-type": kind})
            assert answer.status_code == 200, kind
        assert "content-type" not in client.build_request("POST", CHAT, content=chat_body()).headers
        assert (await client.post(CHAT, content=chat_body())).status_code == 200


async def test_who_forgets_the_header_with_curl_is_told_what_to_add() -> None:
    async with served() as (_, client):
        answer = await client.post(
            CHAT, content=chat_body(), headers={"content-type": "application/x-www-form-urlencoded"}
        )
        assert "with curl, add -H 'Content-Type: application/json'" in answer.json()["error"]["message"]


# ------------------------------------------------------------ pages of other sites

FROM_ELSEWHERE: list[dict[str, str]] = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://weft:8001"},
    {"origin": "http://weft.evil.example"},
    {"origin": "https://evil.example", "sec-fetch-site": "cross-site"},
    {"origin": "https://other.example", "sec-fetch-site": "same-site"},
    {"origin": "http://weft", "sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "cross-site"},
]
FROM_HERE: list[dict[str, str]] = [
    {},
    {"origin": "http://weft"},
    {"origin": "http://WEFT"},
    {"origin": "https://proxy.example", "sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "none"},
]


async def test_without_keys_pages_of_other_sites_can_send_nothing() -> None:
    async with served() as (cluster, client):
        description = await description_of(client)
        for headers in FROM_ELSEWHERE:
            for path in (*JSON_ROUTES, "/v1/audio/transcriptions"):
                answer = await client.post(path, content=chat_body(), headers=headers)
                assert refusal(answer) == (403, "permission_denied"), (path, headers)
                assert description.flaws("post", path, answer) == []
        assert not cluster.workers[0].requests
        for headers in FROM_HERE:
            assert (await client.post(CHAT, content=chat_body(), headers=headers)).status_code == 200, headers
        answer = await client.get("/v1/models", headers={"origin": "https://evil.example"})
        assert answer.status_code == 200, "a browser keeps the answer from the page"
        assert "access-control-allow-origin" not in answer.headers


async def test_allowed_origins_may_send_requests() -> None:
    async with served(allowed_origins=("https://chat.example",)) as (_, client):
        for origin, status in (("https://chat.example", 200), ("http://chat.example", 403), ("https://x.example", 403)):
            headers = {"origin": origin, "sec-fetch-site": "cross-site"}
            assert (await client.post(CHAT, content=chat_body(), headers=headers)).status_code == status, origin
    async with served(allowed_origins=("*",)) as (_, client):
        headers = {"origin": "null"}
        assert (await client.post(CHAT, content=chat_body(), headers=headers)).status_code == 200


@pytest.mark.parametrize("tenants", [(), (KEYED,)], ids=["without keys", "with keys"])
async def test_pages_of_allowed_origins_may_read_answers(tenants: tuple[Tenant, ...]) -> None:
    site = "https://chat.example"
    async with served(allowed_origins=(site,), tenants=tenants) as (cluster, client):
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        question = await client.options(CHAT, headers={"origin": site, **asked})
        assert question.status_code == 200
        assert question.headers["access-control-allow-origin"] == site
        assert {"authorization", "content-type"} <= {
            name.strip() for name in question.headers["access-control-allow-headers"].split(",")
        }
        assert "POST" in question.headers["access-control-allow-methods"]
        assert "access-control-allow-credentials" not in question.headers
        for is_streamed in (False, True):
            body = chat_body(stream=is_streamed)
            answer = await client.post(
                CHAT, content=body, headers={"origin": site, "authorization": f"Bearer {KEY}", "content-type": JSON}
            )
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == site
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        other = await client.options(CHAT, headers={"origin": "https://evil.example", **asked})
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers
        assert len(cluster.workers[0].requests) == 2


async def test_with_keys_the_key_decides() -> None:
    async with served(tenants=(KEYED,), allowed_hosts=()) as (_, client):
        for headers in FROM_ELSEWHERE:
            keyed = headers | {"authorization": f"Bearer {KEY}"}
            assert (await client.post(CHAT, content=chat_body(), headers=keyed)).status_code == 200
            assert (await client.post(CHAT, content=chat_body(), headers=headers)).status_code == 401


# ------------------------------------------------------------ names of the server


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("localhost.:8000", True),
        ("a.localhost:8000", True),
        ("127.0.0.1:8000", True),
        ("192.168.1.7", True),
        ("[::1]:8000", True),
        ("[2001:db8::7]", True),
        ("weft.example:8000", True),
        ("a.lan", True),
        ("lan", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evillocalhost", False),
        ("weft.example.evil:80", False),
        ("[evil.example]:80", False),
    ],
)
async def test_a_server_with_known_names_refuses_others(host: str, is_allowed: bool) -> None:
    async with served(allowed_hosts=("weft.example", "*.lan")) as (_, client):
        description = await description_of(client, {"host": host}) if is_allowed and host == "localhost" else None
        read = [("GET", path) for path in ("/v1/models", "/metrics", "/weft/requests", "/docs", "/openapi.json")]
        for method, path in (*read, ("POST", CHAT)):
            content = chat_body() if method == "POST" else None
            answer = await client.request(method, path, content=content, headers={"host": host})
            if is_allowed:
                assert answer.status_code == 200, path
            else:
                assert refusal(answer) == (403, "permission_denied"), path
            if description is not None:
                assert description.flaws(method.lower(), path, answer) == []
        for path in OPEN_PATHS:
            assert (await client.get(path, headers={"host": host})).status_code == 200


def test_only_clusters_that_listen_on_loopback_have_known_names_by_default() -> None:
    def hosts(host: str, **access: object) -> tuple[str, ...] | None:
        return allowed_hosts(ClusterConfig.model_validate({"server": {"host": host}, "access": access}))

    own = host_name().lower()
    assert hosts("127.0.0.1") == hosts("::1") == hosts("localhost") == (own,)
    assert hosts("0.0.0.0") is None
    assert hosts("10.1.2.3") is None
    assert hosts("0.0.0.0", allowed_hosts=["Weft.Example"]) == (own, "weft.example")
    assert hosts("127.0.0.1", allowed_hosts=["*"]) == (own, "*")


def test_a_misspelt_origin_is_refused_by_the_config() -> None:
    with pytest.raises(ValueError, match="allowed_origins"):
        ClusterConfig.model_validate({"access": {"allowed_origins": ["chat.example"]}})

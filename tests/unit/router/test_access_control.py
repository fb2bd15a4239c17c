"""Tests who may use which route: every route of the app asks for a key, except those of health; pages of operators stay
closed to tenants; quotas show in headers and are refused as OpenAI's clients expect."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from asgi_exchange import Exchange
from router_chats import chat_body, expected, image, text
from router_media_fakes import SOUND, audio, media_cluster, video
from starlette.routing import Route

from deploy.testing import TINY_MODEL, FakeCluster, fake_cluster
from fabric.contracts import Member, MemberId
from router.edge import create_api, create_app
from router.edge.access import OPEN_PATHS
from router.router_config import RateQuota, Tenant

CHAT = "/v1/chat/completions"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


SHOP = Tenant("shop", (digest("sk-shop"),), rates=RateQuota(requests_per_minute=2, tokens_per_minute=6000))
KEYS: dict[str, Any] = {"tenants": (SHOP,), "operator_digests": (digest("sk-ops"),)}


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[tuple[FakeCluster, httpx.AsyncClient]]:
    async with fake_cluster(**settings) as cluster:
        transport = httpx.ASGITransport(create_app(cluster.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://weft") as client:
            yield cluster, client


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def test_every_route_but_health_asks_for_a_key() -> None:
    async with served(**KEYS) as (cluster, client):
        routes = [route for route in create_api(cluster.service).routes if isinstance(route, Route)]
        assert {route.path for route in routes} >= OPEN_PATHS | {CHAT, "/metrics", "/weft/requests", "/docs"}
        assert {path for path in OPEN_PATHS if not path.startswith("/health")} == set()
        without_key = {*OPEN_PATHS, "/console", "/console/console.js"}
        for route in routes:
            path = route.path.replace("{model_id:path}", TINY_MODEL).replace("{request_id}", "req-1")
            path = path.replace("{name}", "console.js")
            for method in sorted(route.methods or ()):
                answers = [
                    await client.request(method, path, headers=headers)
                    for headers in ({}, bearer("sk-wrong"), bearer(digest("sk-shop")))
                ]
                if path in without_key:
                    assert [each.status_code for each in answers] == [200] * 3, path
                else:
                    assert [each.status_code for each in answers] == [401] * 3, (method, path)
                    assert all("www-authenticate" in each.headers for each in answers)
        for path in (
            "/nothing",
            "/v1/nothing",
            "/health/",
            "//health",
            "/health/live/x",
            "/weft",
            "/weft/",
            "/console/a/b",
        ):
            assert code(await client.get(path)) == (401, "invalid_api_key"), path
        assert code(await client.get("/console/")) == (404, "not_found"), "it names the path that is meant"


async def test_without_keys_everything_is_open() -> None:
    async with served() as (_, client):
        for path in ("/metrics", "/weft/requests", "/v1/models", "/health"):
            assert (await client.get(path)).status_code == 200
        answer = await client.post(CHAT, content=chat_body())
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


async def test_tenants_see_no_metrics_and_no_records_and_operators_ask_for_no_answers() -> None:
    async with served(**KEYS) as (cluster, client):
        first = await client.post(CHAT, content=chat_body(), headers=bearer("sk-shop"))
        name = first.headers["x-weft-request-id"]
        for path in (
            "/metrics",
            "/weft/requests",
            f"/weft/requests/{name}",
            "/weft/members",
            "/weft/prometheus-targets",
        ):
            refused = await client.get(path, headers=bearer("sk-shop"))
            assert code(refused) == (403, "permission_denied")
            assert name not in refused.text
            assert (await client.get(path, headers=bearer("sk-ops"))).status_code == 200
        for key in ("sk-shop", "sk-ops"):
            assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200
        num_requests = len(cluster.workers[0].requests)
        assert code(await client.post(CHAT, content=chat_body(), headers=bearer("sk-ops"))) == (
            403,
            "permission_denied",
        )
        assert len(cluster.workers[0].requests) == num_requests


def basic(key: str) -> dict[str, str]:
    return {"authorization": f"Basic {base64.b64encode(f'me:{key}'.encode()).decode()}"}


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
async def test_the_description_of_the_api_needs_any_key_which_a_browser_sends_as_a_password(path: str) -> None:
    async with served(**KEYS) as (_, client):
        asked = await client.get(path)
        assert code(asked) == (401, "invalid_api_key")
        assert TINY_MODEL not in asked.text
        assert asked.headers["www-authenticate"].startswith('Basic realm="Weft: an API key')
        for headers in (bearer("sk-shop"), basic("sk-shop"), bearer("sk-ops"), basic("sk-ops")):
            assert (await client.get(path, headers=headers)).status_code == 200
        assert code(await client.get(path, headers=basic("sk-wrong"))) == (401, "invalid_api_key")


async def test_a_browser_may_send_an_operators_key_as_a_password_for_pages_only() -> None:
    async with served(**KEYS) as (_, client):
        asked = await client.get("/weft/requests", headers={"accept": "text/html"})
        assert asked.status_code == 401
        assert asked.headers["www-authenticate"].startswith("Basic ")
        page = await client.get("/weft/requests", headers=basic("sk-ops") | {"accept": "text/html"})
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert code(await client.get("/weft/requests", headers=basic("sk-shop"))) == (403, "permission_denied")
        assert code(await client.get("/v1/models", headers=basic("sk-shop"))) == (401, "invalid_api_key")
        assert code(await client.post(CHAT, content=chat_body(), headers=basic("sk-shop"))) == (401, "invalid_api_key")
        for broken in ("Basic", "Basic ###", "Basic /w==", "Bearer", "Bearer  "):
            assert code(await client.get("/metrics", headers={"authorization": broken})) == (401, "invalid_api_key")


async def test_two_keys_in_one_request_are_none() -> None:
    async with served(**KEYS) as (_, client):
        headers = [("authorization", "Bearer sk-shop"), ("authorization", "Bearer sk-ops")]
        assert code(await client.get("/v1/models", headers=headers)) == (401, "invalid_api_key")


async def test_a_wrong_key_is_refused_before_the_body_is_read() -> None:
    async with fake_cluster(**KEYS) as cluster:
        exchange = Exchange(create_app(cluster.service), "POST", CHAT, {"content-length": "1000000"})
        await exchange.until(lambda: len(exchange.sent) >= 2)
        assert exchange.status == 401
        assert exchange.num_received == 0, "no byte of the body was asked for before the answer"
        await exchange.feed(b"{}").ended()


# ------------------------------------------------------------ quotas


async def test_quotas_show_in_headers_and_are_refused_with_the_time_to_wait() -> None:
    async with served(**KEYS) as (cluster, client):
        first = await client.post(CHAT, content=chat_body(), headers=bearer("sk-shop"))
        usage = first.json()["usage"]
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert 20 < float(first.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 30
        left = int(first.headers["x-ratelimit-remaining-tokens"])
        assert 6000 - usage["total_tokens"] <= left < 6000 - usage["prompt_tokens"]
        await client.post(CHAT, content=chat_body(stream=True), headers=bearer("sk-shop"))
        refused = await client.post(CHAT, content=chat_body(), headers=bearer("sk-shop"))
        assert code(refused) == (429, "rate_limit_exceeded")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert "the tenant shop may use 2 requests per minute; 0 are left now" in refused.json()["error"]["message"]
        wait_ms = int(refused.headers["retry-after-ms"])
        assert 20_000 < wait_ms <= 30_000
        assert int(refused.headers["retry-after"]) == -(-wait_ms // 1000)
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert len(cluster.workers[0].requests) == 2


@pytest.mark.parametrize(
    ("path", "field", "param"), [("/v1/completions", "prompt", "prompt"), ("/v1/embeddings", "input", "input")]
)
async def test_prompts_that_no_wait_lets_pass_are_refused_for_good_and_count_for_nothing(
    path: str, field: str, param: str
) -> None:
    async with served(**KEYS, embeddings="mean") as (cluster, client):
        body = {"model": TINY_MODEL, field: ["a"] * 3}
        answer = await client.post(path, json=body, headers=bearer("sk-shop"))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert f"at most 2 {param}s" in answer.json()["error"]["message"]
        assert answer.headers["x-ratelimit-remaining-requests"] == "2"
        assert cluster.workers[0].requests == []
        assert (await client.post(path, json=body | {field: ["a"] * 2}, headers=bearer("sk-shop"))).status_code == 200


async def test_all_inputs_count_before_the_first_is_computed() -> None:
    """If inputs counted in windows of 16, the first ones would be computed in vain."""
    shop = Tenant("shop", (digest("sk-shop"),), rates=RateQuota(requests_per_minute=20))
    async with served(tenants=(shop,), embeddings="mean") as (cluster, client):
        for num_inputs, status in ((2, 200), (20, 429), (18, 200)):
            body = {"model": TINY_MODEL, "input": ["a"] * num_inputs}
            answer = await client.post("/v1/embeddings", json=body, headers=bearer("sk-shop"))
            assert answer.status_code == status
        assert len(cluster.workers[0].requests) == 20


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
async def test_prompts_that_the_quota_of_tokens_refuses_count_for_no_request(path: str, field: str) -> None:
    shop = Tenant("shop", (digest("sk-shop"),), rates=RateQuota(requests_per_minute=50, tokens_per_minute=30))
    async with served(tenants=(shop,), embeddings="mean") as (_, client):
        body = {"model": TINY_MODEL, field: ["a long text of many tokens"] * 40}
        answer = await client.post(path, json=body, headers=bearer("sk-shop"))
        assert code(answer) == (429, "rate_limit_exceeded")
        assert answer.headers["x-ratelimit-remaining-requests"] == "50"


async def test_openais_client_raises_the_right_class_and_comes_back_in_time() -> None:
    """The quota gives a request every 50 ms, and the client reads the time to wait from `retry-after-ms`."""
    fast = Tenant("fast", (digest("sk-fast"),), rates=RateQuota(requests_per_minute=1200))
    settings = KEYS | {"tenants": (SHOP, fast), "rate_burst_s": 0.05}
    messages: Any = [{"role": "user", "content": "hello"}]
    async with served(**settings) as (cluster, http_client):

        async def ask(key: str, max_retries: int) -> str | None:
            client = openai.AsyncOpenAI(
                base_url="http://weft/v1", api_key=key, max_retries=max_retries, http_client=http_client
            )
            answer = await client.chat.completions.create(model=TINY_MODEL, messages=messages, seed=7)
            return answer.choices[0].message.content

        with pytest.raises(openai.AuthenticationError):
            await ask("sk-wrong", 2)
        with pytest.raises(openai.PermissionDeniedError):
            await ask("sk-ops", 2)
        assert not cluster.workers[0].requests
        await ask("sk-shop", 0)
        with pytest.raises(openai.RateLimitError) as caught:
            await ask("sk-shop", 0)
        assert caught.value.code == "rate_limit_exceeded"
        assert 0 < int(caught.value.response.headers["retry-after-ms"]) <= 30_000
        assert [await ask("sk-fast", 2) for _ in range(3)] == [expected(cluster)] * 3


async def test_streams_have_the_headers_and_other_routes_have_not() -> None:
    async with served(**KEYS) as (_, client):
        stream = await client.post(CHAT, content=chat_body(stream=True), headers=bearer("sk-shop"))
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.headers["x-ratelimit-remaining-requests"] == "1"
        listed = await client.get("/v1/models", headers=bearer("sk-shop"))
        assert not [name for name in listed.headers if name.startswith("x-ratelimit")]


async def test_routers_of_the_directory_share_a_quota() -> None:
    async with served(**KEYS) as (cluster, client):
        one = Member(MemberId("router-a"), "router", "local://a", "host-0", 1)
        two = Member(MemberId("router-b"), "router", "local://b", "host-0", 1)
        members = [*(each.member for each in (*cluster.workers, *cluster.encoders)), one, two]
        cluster.service.update_members(members)
        statuses = [
            (await client.post(CHAT, content=chat_body(), headers=bearer("sk-shop"))).status_code for _ in range(2)
        ]
        assert statuses == [200, 429]
        cluster.service.update_members(members[:-1])
        answer = await client.post(CHAT, content=chat_body(), headers=bearer("sk-shop"))
        assert answer.status_code == 429, "the burst that was used stays used"


async def test_usage_is_counted_by_tenant_and_key() -> None:
    async with served(**KEYS) as (cluster, client):
        answer = await client.post(CHAT, content=chat_body(), headers=bearer("sk-shop"))
        usage = answer.json()["usage"]
        labels = {"tenant": "shop", "key": digest("sk-shop")[:8]}
        registry = cluster.service.metrics.registry

        def total(name: str) -> float | None:
            return registry.get_sample_value(f"weft_router_usage_{name}_total", labels)

        assert total("requests") == 1
        assert total("prompt_tokens") == usage["prompt_tokens"]
        assert total("completion_tokens") == usage["completion_tokens"]
        assert total("cached_tokens") == 0
        assert total("encoder_seconds") == 0


async def test_seconds_of_sound_and_video_are_limited_and_counted_and_pictures_have_none() -> None:
    """The sound track of the video belongs to it, so a video of three seconds and a sound of two make five."""
    heard = Tenant("heard", (digest("sk-heard"),), rates=RateQuota(media_seconds_per_minute=6))
    media = chat_body([video(sound=SOUND), audio(2), image(), text("?")])
    async with media_cluster(tenants=(heard,)) as cluster:
        transport = httpx.ASGITransport(create_app(cluster.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://weft") as client:
            first = await client.post(CHAT, content=media, headers=bearer("sk-heard"))
            assert first.status_code == 200
            assert first.headers["x-ratelimit-remaining-media-seconds"] == "1"
            num_encoded = len(cluster.encoders[0].requests)
            refused = await client.post(CHAT, content=media, headers=bearer("sk-heard"))
            assert code(refused) == (429, "rate_limit_exceeded")
            assert "may use 6 seconds of media per minute" in refused.json()["error"]["message"]
            assert 35_000 < int(refused.headers["retry-after-ms"]) <= 40_000
            assert len(cluster.encoders[0].requests) == num_encoded
            pictures = await client.post(CHAT, content=chat_body([image(), text("?")]), headers=bearer("sk-heard"))
            assert pictures.status_code == 200
        registry = cluster.service.metrics.registry
        labels = {"tenant": "heard", "key": digest("sk-heard")[:8]}
        seconds = {
            modality: registry.get_sample_value(
                "weft_router_usage_media_seconds_total", labels | {"modality": modality}
            )
            for modality in ("video", "audio", "image")
        }
        assert seconds == {"video": 3.0, "audio": 2.0, "image": None}


@pytest.mark.parametrize(
    ("tenants", "salts"),
    [
        ((("shop", "shop"), ("bank", "bank")), ("4:shop/", "4:bank/")),
        ((("shop", "a"), ("bank", "a/b")), ("1:a/b/x", "3:a/b/x")),
        ((("shop", ""), ("bank", "shop")), ("0:/shop/", "4:shop/")),
    ],
)
async def test_no_tenant_reaches_the_caches_of_another(
    tenants: tuple[tuple[str, str], tuple[str, str]], salts: tuple[str, str]
) -> None:
    """The client of each tenant sends the salt that would bring it nearest to the other's."""
    configured = tuple(Tenant(name, (digest(name),), cache_salt=salt) for name, salt in tenants)
    own = {"4:shop/": None, "4:bank/": None, "1:a/b/x": "b/x", "3:a/b/x": "x", "0:/shop/": "shop/"}
    async with served(tenants=configured) as (cluster, client):
        for (name, _), salt in zip(tenants, salts, strict=True):
            body = chat_body(cache_salt=own[salt])
            assert (await client.post(CHAT, content=body, headers=bearer(name))).status_code == 200
        sent = [request.cache_salt for request in cluster.workers[0].requests]
        assert sent == list(salts)
        assert len(set(sent)) == 2


@pytest.mark.parametrize("path", ["/metrics%0A", "/weft/members%0A", "/health%0A", "/v1/models%00"])
async def test_a_path_with_a_control_character_is_no_path(path: str) -> None:
    """A pattern may overlook a line break at the end of a path, which then is an operator's path for one only."""
    async with served(**KEYS) as (_, client):
        response = await client.get(path, headers=bearer("sk-shop"))
        assert response.status_code == 400

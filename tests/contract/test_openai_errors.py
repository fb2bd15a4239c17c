"""Checks which error OpenAI's Python library raises for each refusal of the server, and whether the library tries
again. The library talks to a real socket; the members behind the router are fakes."""

from __future__ import annotations

import hashlib
from typing import Any

import openai
import pytest
from chat_media import data_url
from sdk_serving import WatchedClient, serving

from deploy.testing import TINY_MODEL, FakeCluster
from fabric.contracts import (
    DeadlineOutOfReach,
    Draining,
    EngineFailed,
    InvalidRequest,
    NoCapacity,
    Overloaded,
    WeftError,
)
from router.api.http_errors import ERROR_TO_STATUS
from router.router_config import RateQuota, Tenant

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
STATUS_TO_CLASS: dict[int, type[openai.APIStatusError]] = {
    400: openai.BadRequestError,
    401: openai.AuthenticationError,
    403: openai.PermissionDeniedError,
    404: openai.NotFoundError,
    413: openai.APIStatusError,
    415: openai.APIStatusError,
    422: openai.UnprocessableEntityError,
    429: openai.RateLimitError,
    499: openai.APIStatusError,
}


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def chat(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return await client.chat.completions.create(**({"model": TINY_MODEL, "messages": HELLO} | fields))


def failing(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, *errors: WeftError) -> list[WeftError]:
    """Makes the service raise these errors for the next requests, one each. Returns the list of those that are left."""
    left, opened = list(errors), cluster.service.open

    async def open_or_fail(*args: Any, **kwargs: Any) -> Any:
        if left:
            raise left.pop(0)
        return await opened(*args, **kwargs)

    monkeypatch.setattr(cluster.service, "open", open_or_fail)
    return left


@pytest.mark.parametrize("kind", list(ERROR_TO_STATUS), ids=lambda kind: kind.code)
async def test_each_error_raises_the_librarys_class_and_is_tried_again_only_if_that_may_help(
    kind: type[WeftError], monkeypatch: pytest.MonkeyPatch
) -> None:
    status = ERROR_TO_STATUS[kind]
    async with serving(max_retries=1) as (cluster, client):
        left = failing(cluster, monkeypatch, kind("it failed", param="model"), kind("it failed again", param="model"))
        with pytest.raises(STATUS_TO_CLASS.get(status, openai.InternalServerError)) as caught:
            await chat(client)
        is_tried_again = kind is not DeadlineOutOfReach and (status == 429 or (status >= 500 and kind.retryable))
        assert len(left) == (0 if is_tried_again else 1)
        assert caught.value.status_code == status
        assert (caught.value.code, caught.value.param) == (kind.code, "model")
        body: Any = caught.value.body
        assert body["message"] == ("it failed again" if is_tried_again else "it failed")


@pytest.mark.parametrize("kind", [Overloaded, NoCapacity, Draining])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_library_waits_as_long_as_the_server_says(
    kind: type[WeftError], is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as (cluster, client):
        errors = [kind("wait a little", retry_after_s=0.3), kind("and some more", retry_after_s=2.5)]
        left = failing(cluster, monkeypatch, *errors)
        answer = await chat(client, stream=is_streamed)
        if is_streamed:
            assert [chunk async for chunk in answer]
        assert left == []
        assert client.waits == (0.3, 2.5)
        assert len(cluster.workers[0].requests) == 1


async def test_what_can_only_fail_again_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (cluster, client):
        left = failing(cluster, monkeypatch, *(EngineFailed("this request breaks engines") for _ in range(3)))
        with pytest.raises(openai.InternalServerError, match="breaks engines") as caught:
            await chat(client)
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert len(left) == 2
        assert client.waits == ()


async def test_refused_requests_raise_the_class_of_their_status() -> None:
    async with serving(max_body_bytes=10_000) as (cluster, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await chat(client, temperature=9)
        assert (caught.value.code, caught.value.param) == ("invalid_request", "temperature")
        with pytest.raises(openai.NotFoundError) as missing:
            await chat(client, model="other")
        assert missing.value.code == "model_not_found"
        broken = {"type": "image_url", "image_url": {"url": data_url(b"no picture")}}
        with pytest.raises(openai.BadRequestError) as medium:
            await chat(client, messages=[{"role": "user", "content": [broken]}])
        assert medium.value.param == "messages.0.content.0"
        with pytest.raises(openai.APIStatusError) as large:
            await chat(client, messages=[{"role": "user", "content": "x" * 20_000}])
        assert (large.value.status_code, large.value.code) == (413, "body_too_large")
        with pytest.raises(openai.NotFoundError) as embedding:
            await client.embeddings.create(model=TINY_MODEL, input="a")
        assert embedding.value.code == "model_not_found"
        assert client.waits == ()
        assert cluster.workers[0].requests == []


async def test_keys_are_asked_for_and_quotas_are_waited_for() -> None:
    quota = RateQuota(requests_per_minute=1)
    tenants = (Tenant("shop", (digest("sk-shop"),), rates=quota),)
    keys: dict[str, Any] = {"tenants": tenants, "operator_digests": (digest("sk-ops"),)}
    async with serving(api_key="sk-wrong", **keys) as (cluster, client):
        with pytest.raises(openai.AuthenticationError) as unknown:
            await chat(client)
        assert unknown.value.code == "invalid_api_key"
        with pytest.raises(openai.PermissionDeniedError) as forbidden:
            await chat(client.with_options(api_key="sk-ops"))
        assert forbidden.value.code == "permission_denied"
        assert client.waits == ()
        shop = client.with_options(api_key="sk-shop", max_retries=1)
        assert isinstance(shop, WatchedClient)
        assert (await chat(shop)).choices[0].finish_reason == "stop"
        with pytest.raises(openai.RateLimitError) as limited:
            await chat(shop)
        assert limited.value.type == "rate_limit_error"
        (wait_s,) = shop.waits
        assert 0 < wait_s <= 60
        assert wait_s == pytest.approx(float(limited.value.response.headers["retry-after-ms"]) / 1000, abs=5)
        assert len(cluster.workers[0].requests) == 1


@pytest.mark.parametrize("path", ["chat", "completions", "responses"])
async def test_a_failure_in_mid_stream_raises_and_is_not_tried_again(path: str) -> None:
    async with serving(max_attempts=1) as (cluster, client):
        cluster.workers[0].script.error, cluster.workers[0].script.die_at = EngineFailed("the step broke"), 5
        stream: Any
        if path == "chat":
            stream = await chat(client, stream=True)
        elif path == "completions":
            stream = await client.completions.create(model=TINY_MODEL, prompt="hello", stream=True)
        else:
            stream = await client.responses.create(model=TINY_MODEL, input="hello", stream=True)
        with pytest.raises(openai.APIError, match="the step broke"):
            [event async for event in stream]
        assert len(cluster.workers[0].requests) == 1


async def test_the_chat_stream_helper_raises_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(max_attempts=1) as (cluster, client):
        cluster.workers[0].script.error, cluster.workers[0].script.die_at = EngineFailed("the step broke"), 5
        with pytest.raises(openai.APIError, match="the step broke"):
            async with client.chat.completions.stream(model=TINY_MODEL, messages=HELLO) as stream:
                await stream.get_final_completion()
        failing(cluster, monkeypatch, InvalidRequest("it is refused", param="messages"))
        with pytest.raises(openai.BadRequestError):
            async with client.chat.completions.stream(model=TINY_MODEL, messages=HELLO) as stream:
                await stream.get_final_completion()

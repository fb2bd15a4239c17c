"""Tests the access log: each exchange has a line, a failure's level says whose fault it is, and the log holds nothing
that a client may want kept private."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from router_chats import chat_body, image, text

from deploy.testing import FakeCluster, fake_cluster
from fabric.contracts import EngineFailed
from router.edge import create_app

CHAT = "/v1/chat/completions"


@asynccontextmanager
async def served(**settings: object) -> AsyncIterator[tuple[FakeCluster, httpx.AsyncClient]]:
    async with fake_cluster(**settings) as cluster:
        transport = httpx.ASGITransport(create_app(cluster.service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://weft") as client:
            yield cluster, client


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "router")
    return caplog


def access_line(log: pytest.LogCaptureFixture) -> logging.LogRecord:
    """Returns the one line of the last exchange."""
    (line,) = [record for record in log.records if hasattr(record, "duration_ms")]
    return line


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_has_a_line_with_what_it_took(log: pytest.LogCaptureFixture, is_streamed: bool) -> None:
    async with served() as (cluster, client):
        response = await client.post(CHAT, content=chat_body(stream=is_streamed), headers={"x-request-id": "mine"})
        line = vars(access_line(log))
        assert line["levelno"] == logging.INFO
        assert (line["method"], line["path"], line["status"], line["code"]) == ("POST", CHAT, 200, "ok")
        assert line["label"] == "mine"
        assert line["prompt_tokens"] == len(cluster.workers[0].requests[0].token_ids)
        assert line["completion_tokens"] > 1
        assert line["num_bytes_sent"] == len(response.content)
        assert line["duration_ms"] > 0


async def test_a_client_s_mistake_is_at_info_and_has_no_trace(log: pytest.LogCaptureFixture) -> None:
    async with served() as (_, client):
        assert (await client.post(CHAT, content=b"{")).status_code == 400
        assert vars(access_line(log))["code"] == "invalid_request"
        assert {record.levelno for record in log.records} == {logging.INFO}
        assert [record for record in log.records if record.exc_info] == []


async def test_overload_is_a_warning(log: pytest.LogCaptureFixture) -> None:
    async with served(max_in_flight=0) as (_, client):
        assert (await client.post(CHAT, content=chat_body())).status_code == 429
        assert "overloaded" in log.text
        assert vars(access_line(log))["status"] == 429


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_fault_of_ours_is_an_error_with_its_trace(log: pytest.LogCaptureFixture, is_streamed: bool) -> None:
    async with served() as (cluster, client):
        script = cluster.workers[0].script
        script.error, script.die_at = EngineFailed("the step broke"), 4
        await client.post(CHAT, content=chat_body(stream=is_streamed))
        (fault,) = [record for record in log.records if record.levelno == logging.ERROR]
        assert fault.exc_info is not None
        assert "engine_failed" in fault.getMessage()
        assert vars(access_line(log))["code"] == "engine_failed"


async def test_health_and_metrics_are_at_debug(log: pytest.LogCaptureFixture) -> None:
    log.set_level(logging.DEBUG, "router")
    async with served() as (_, client):
        for path in ("/health", "/health/ready", "/metrics"):
            await client.get(path)
        assert {record.levelno for record in log.records} == {logging.DEBUG}
        assert len(log.records) == 3


async def test_a_path_can_not_forge_a_line_and_its_query_is_left_out(log: pytest.LogCaptureFixture) -> None:
    async with served() as (_, client):
        await client.get("/v1/x%0A2026-01-01 INFO forged?key=SECRET")
        assert "\n" not in access_line(log).getMessage()
        assert "SECRET" not in log.text


FORGED = "x\n2026-01-01 CRITICAL forged\x1b[31m"


async def test_the_name_of_a_field_can_not_forge_a_line(log: pytest.LogCaptureFixture) -> None:
    """The log says which field was wrong, and a client may call a field what it likes."""
    part = f'--b\r\nContent-Disposition: form-data; name="{FORGED}"\r\n\r\n'.encode()
    ending = b'\r\n--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--b--\r\n'
    form = {"content-type": "multipart/form-data; boundary=b"}
    async with served() as (_, client):
        answers = [
            await client.post(CHAT, content=chat_body(structured_outputs={FORGED: 1})),
            await client.post("/v1/audio/transcriptions", content=part + b"9" * 70_000 + ending, headers=form),
            await client.post("/v1/audio/transcriptions", content=part + b"\xff" + ending, headers=form),
        ]
    assert [answer.status_code for answer in answers] == [400] * 3
    assert ["forged" in answer.json()["error"]["param"] for answer in answers] == [True] * 3
    assert sum("forged" in record.getMessage() for record in log.records) == 3
    assert [record.getMessage() for record in log.records if not record.getMessage().isprintable()] == []


async def test_prompts_media_and_keys_are_not_logged_at_any_level(log: pytest.LogCaptureFixture) -> None:
    log.set_level(logging.DEBUG, "router")
    async with served() as (_, client):
        key = {"authorization": "Bearer SECRET"}
        secret = [text("SECRET"), image()]
        bodies = [
            chat_body(secret),
            chat_body(secret, stream=True),
            chat_body([{"type": "image_url", "image_url": {"url": "data:image/png;base64,SECRET"}}]),
            chat_body([{"type": "image_url", "image_url": {"url": "data:image/SECRET"}}]),
            chat_body([{"type": "SECRET"}]),
            chat_body(secret, temperature="SECRET"),
            chat_body(secret, stop=["SECRET"] * 99),
            chat_body(secret, model="SECRET"),
            chat_body(secret, response_format={"type": "SECRET"}),
            b'{"messages": "SECRET',
            b'{"model": "m", "messages": [{"role": "user", "content": {"SECRET": 1}}]}',
        ]
        for body in bodies:
            await client.post(CHAT, content=body, headers=key)
    assert len([record for record in log.records if hasattr(record, "duration_ms")]) == len(bodies)
    assert [record.getMessage() for record in log.records if "SECRET" in str(vars(record))] == []

"""Runs real clients against the router's HTTP edge: the OpenAI library over a real uvicorn, with fake members behind
the router, and the demo checkpoint's own tokenizer and family."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest
from chat_media import data_url, picture, png
from router_chats import chat_body, expected

from deploy.demo.build import write_all_but_weights
from deploy.http_server import DEFAULT_LIMITS, HttpServer
from deploy.testing import TINY_MODEL, FakeCluster, fake_cluster
from fabric.contracts import EngineFailed
from modalities.registry import REGISTRY
from modalities.text import TextCodec
from router.edge import create_app


@asynccontextmanager
async def serving(**settings: object) -> AsyncIterator[tuple[FakeCluster, openai.AsyncOpenAI, int]]:
    async with fake_cluster(**settings) as cluster:
        server = HttpServer(create_app(cluster.service), "127.0.0.1", 0)
        await server.start()
        url = f"http://127.0.0.1:{server.port}/v1"
        try:
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                yield cluster, client, server.port
        finally:
            await server.stop()


def question(*parts: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(parts)}]


IMAGE = {"type": "image_url", "image_url": {"url": data_url(png(picture(1)))}}
TEXT = {"type": "text", "text": "what is this?"}


async def test_openai_client_reads_an_answer_about_an_image() -> None:
    async with serving() as (cluster, client, _):
        answer = await client.chat.completions.create(model=TINY_MODEL, messages=question(TEXT, IMAGE), seed=7)
        assert answer.choices[0].message.content == expected(cluster)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(cluster.workers[0].requests[0].token_ids)
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert answer._request_id == cluster.workers[0].requests[0].request_id


async def test_openai_client_reads_a_stream_with_usage() -> None:
    async with serving() as (cluster, client, _):
        stream = await client.chat.completions.create(
            model=TINY_MODEL, messages=question(TEXT), seed=7, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected(cluster)
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(expected(cluster).encode()) + 1


async def test_openai_client_raises_by_status() -> None:
    async with serving() as (_, client, _port):
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=question(TEXT))
        assert missing.value.code == "model_not_found"
        broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=TINY_MODEL, messages=question(TEXT, broken))
        assert (caught.value.code, caught.value.param) == ("invalid_media", "messages.0.content.1")


async def test_openai_client_raises_on_a_failure_in_mid_stream() -> None:
    async with serving() as (cluster, client, _):
        cluster.workers[0].script.error, cluster.workers[0].script.die_at = EngineFailed("the step broke"), 5
        stream = await client.chat.completions.create(model=TINY_MODEL, messages=question(TEXT), stream=True)
        with pytest.raises(openai.APIError, match="the step broke"):
            [chunk async for chunk in stream]


async def test_closed_socket_aborts_at_the_worker() -> None:
    async with serving() as (cluster, _, port):
        worker = cluster.workers[0]
        worker.script.pause_at = 4
        reader, writer = await send(port, chat_body(stream=True))
        assert b"200 OK" in await reader.readline()
        writer.close()
        await settled_slowly(lambda: worker.num_cancelled == 1 and len(worker.aborted) == 1)
        await settled_slowly(lambda: cluster.service.admission.num_in_flight == 0)


async def test_refusal_of_a_large_body_can_be_read_while_it_is_sent() -> None:
    async with serving(max_body_bytes=1 << 20) as (cluster, client, port):
        body = b"x" * (8 << 20)
        reader, writer = await send(port, body)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 413 " in head.splitlines()[0]
        length = next(
            int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length")
        )
        assert json.loads(await reader.readexactly(length))["error"]["code"] == "body_too_large"
        writer.close()
        await client.chat.completions.create(model=TINY_MODEL, messages=question(TEXT))
        assert len(cluster.workers[0].requests) == 1


async def test_a_reader_that_dawdles_is_given_everything_and_delays_nobody() -> None:
    async with serving(max_model_len=60_000) as (cluster, client, port):
        body = chat_body(stream=True, ignore_eos=True, max_tokens=20_000)
        reader, writer = await send(port, body, receive_buffer=4096)
        await settled_slowly(lambda: bool(cluster.workers[0].requests))
        fast = await client.chat.completions.create(model=TINY_MODEL, messages=question(TEXT))
        assert fast.choices[0].finish_reason == "stop"
        data = await asyncio.wait_for(reader.readuntil(b"[DONE]"), 120)
        lines = [line for line in data.split(b"\n") if line.startswith(b"data: {")]
        pieces = [json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in lines]
        assert len("".join(pieces).encode()) > 18_000
        writer.close()


async def test_demo_model_renders_plans_and_answers(tmp_path: Path) -> None:
    write_all_but_weights(tmp_path)
    family, codec = REGISTRY.load_family(tmp_path), TextCodec.load(tmp_path)
    async with serving(model=(family, codec)) as (cluster, client, _):
        spelled = {"type": "text", "text": "is <|image_pad|> a picture?"}
        answer = await client.chat.completions.create(model=TINY_MODEL, messages=question(IMAGE, spelled), seed=7)
        request = cluster.workers[0].requests[0]
        assert answer.choices[0].message.content == expected(cluster)
        (item,) = request.media
        (run,) = request.placeholders
        placeholder = codec.token_id(family.placeholder_text("image"))
        assert request.token_ids.count(placeholder) == item.num_tokens == run.length
        assert set(request.token_ids[run.offset : run.end]) == {placeholder}
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(request.token_ids)
        assert cluster.encoders[0].requests[0].items == (item,)
        family.positions(request.token_ids, request.placeholders, request.media)


async def send(
    port: int, body: bytes, receive_buffer: int | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a request by hand; it returns while the body may still be in transit."""
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=2**26)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: weft\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


async def settled_slowly(condition: Callable[[], bool]) -> None:
    """Waits as `settled` does, for conditions that depend on sockets: it gives the selector time instead of
    spinning."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nothing tells when a socket's end is noticed
            await asyncio.sleep(0.005)


async def test_a_huge_header_is_refused_while_it_is_read() -> None:
    async with serving() as (_, client, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"GET /health HTTP/1.1\r\nhost: weft\r\nx-huge: " + b"a" * (3 * DEFAULT_LIMITS.max_header_bytes // 2)
        )
        async with asyncio.timeout(10):
            status = await reader.readline()
        assert status.split()[1] == b"431", "its end is not waited for"
        writer.close()
        assert (await client.models.list()).data[0].id == TINY_MODEL

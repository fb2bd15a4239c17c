"""The front end's own server: several on one port, and a stop that lets open answers be read."""

from __future__ import annotations

import asyncio
import http.client
import socket
from collections.abc import Awaitable, Callable

import pytest
from router_chats import chat_body
from router_fakes import fake_cluster, settled

import deploy.http_server
from deploy.http_server import HttpServer, bind
from fabric.errors import ConfigError
from router.http import create_app

HOST = "127.0.0.1"
Send = Callable[[dict[str, object]], Awaitable[None]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class NamedApp:
    """Answers its name and counts; then, where it is held, waits to be let go on and answers it again."""

    def __init__(self, name: str) -> None:
        self.num_answers = 0
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self._name = name.encode()

    async def __call__(self, scope: object, receive: object, send: Send) -> None:
        self.num_answers += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self._name, "more_body": True})
        await self.goes_on.wait()
        await send({"type": "http.response.body", "body": self._name, "more_body": False})


def get(port: int) -> bytes:
    client = http.client.HTTPConnection(HOST, port, timeout=60)
    try:
        client.request("GET", "/")
        return client.getresponse().read()
    finally:
        client.close()


async def test_front_ends_of_one_host_share_a_port_and_one_that_stops_leaves_it_to_the_other() -> None:
    """The kernel spreads connections over those that listen: 64 of them never all reach one by chance."""
    port = free_port()
    apps = [NamedApp("one"), NamedApp("two")]
    servers = [HttpServer(app, HOST, port) for app in apps]  # type: ignore[arg-type]
    for server in servers:
        await server.start()
        assert server.port == port
    try:
        answers = [await asyncio.to_thread(get, port) for _ in range(64)]
        assert set(answers) == {b"oneone", b"twotwo"}
        assert [app.num_answers for app in apps] == [answers.count(b"oneone"), answers.count(b"twotwo")]
        await servers[0].stop()
        assert {await asyncio.to_thread(get, port) for _ in range(16)} == {b"twotwo"}
    finally:
        await servers[1].stop()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.to_thread(get, port)


def test_a_port_of_somebody_else_is_refused_by_name() -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on {HOST}:{port}"):
            bind(HOST, port)


async def test_a_stop_waits_for_answers_that_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy.http_server, "CLOSE_S", 30 * deploy.http_server.CLOSE_S)  # however busy the machine is
    app = NamedApp("x")
    app.goes_on.clear()
    server = HttpServer(app, HOST, 0)  # type: ignore[arg-type]
    await server.start()
    port = server.port
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(b"GET / HTTP/1.1\r\nHost: weft\r\nConnection: close\r\n\r\n")
    await reader.readuntil(b"x")
    stopping = asyncio.create_task(server.stop())
    ended, _ = await asyncio.wait({stopping}, timeout=0.5)
    assert not ended, "it went away with an answer half written"
    with pytest.raises(ConnectionRefusedError):
        await asyncio.to_thread(get, port)
    app.goes_on.set()
    assert (await reader.read(-1)).endswith(b"x\r\n0\r\n\r\n")
    await stopping
    writer.close()


async def test_a_stop_tells_open_streams_how_they_end() -> None:
    """The router ends its requests, then the server closes: the client reads an error event, not a cut connection."""
    async with fake_cluster() as cluster:
        cluster.workers[0].script.pause_at = 2
        server = HttpServer(create_app(cluster.service), HOST, 0)
        await server.start()
        reader, writer = await asyncio.open_connection(HOST, server.port)
        body = chat_body(stream=True)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: weft\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readuntil(b'"content"')
        await settled(lambda: cluster.service.admission.num_in_flight == 1)
        await cluster.service.stop()
        await server.stop()
        rest = await reader.read(-1)
        assert b'"code": "aborted"' in rest or b'"code":"aborted"' in rest
        assert rest.endswith(b"0\r\n\r\n"), "the answer was ended, not cut"
        writer.close()

"""Checks the front end's own server: several servers share one port, and a stop lets clients read open answers."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from router_chats import chat_body

import deploy.http_server
from deploy.config import ClusterConfig
from deploy.http_server import HttpServer, bind, check_port, router_server
from deploy.local import serving
from deploy.testing import fake_cluster, settled
from fabric.contracts import ConfigError
from router.edge import create_app

HOST = "127.0.0.1"
Send = Callable[[dict[str, object]], Awaitable[None]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class NamedApp:
    """Answers with its name and counts the answers; while it is held, it then waits until the test lets it continue,
    and sends its name again."""

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


async def test_parts_of_an_answer_do_not_wait_for_each_other() -> None:
    app = NamedApp("one")
    app.goes_on.clear()
    server = HttpServer(app, HOST, 0)
    await server.start()
    reader, writer = await asyncio.open_connection(HOST, server.port)
    try:
        writer.write(b"GET / HTTP/1.1\r\nhost: weft\r\n\r\n")
        await reader.readuntil(b"one\r\n")
        (connection,) = server._guard.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    finally:
        app.goes_on.set()
        writer.close()
        await server.stop()


async def test_front_ends_of_one_host_share_a_port_and_one_that_stops_leaves_it_to_the_other() -> None:
    """The kernel spreads connections over the listening sockets: it is practically impossible that 64 of them all reach
    one by chance."""
    port = free_port()
    apps = [NamedApp("one"), NamedApp("two")]
    servers = [HttpServer(app, HOST, port) for app in apps]
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
        with pytest.raises(ConfigError, match=f"can't listen on {HOST}:{port}"):
            bind(HOST, port)


@pytest.mark.parametrize(("num_bytes", "status"), [(7000, 200), (9000, 431)])
async def test_the_limit_of_headers_is_that_of_the_config(num_bytes: int, status: int) -> None:
    config = ClusterConfig.model_validate({"server": {"port": 0, "max_header_bytes": 8192}})
    app = NamedApp("one")
    server = router_server(app, config)
    await server.start()
    try:
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"http://{HOST}:{server.port}/", headers={"x-long": "a" * num_bytes})
        assert (answer.status_code, app.num_answers) == (status, int(status == 200))
    finally:
        await server.stop()


async def test_a_port_on_which_another_cluster_listens_is_seen_before_models_load() -> None:
    port = free_port()
    server = HttpServer(NamedApp("one"), HOST, port)
    await server.start()
    try:
        with pytest.raises(ConfigError, match=f"can't listen on {HOST}:{port}.*--port"):
            check_port(HOST, port)
        config = ClusterConfig.model_validate({"server": {"host": HOST, "port": port}})
        with pytest.raises(ConfigError, match=f"can't listen on {HOST}:{port}"):
            async with serving(config):
                pytest.fail("a second cluster must not share the port of the first")
    finally:
        await server.stop()
    check_port(HOST, port)


async def test_a_stop_waits_for_answers_that_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    # the limit must not end the wait on a busy machine
    monkeypatch.setattr(deploy.http_server, "CLOSE_S", 30 * deploy.http_server.CLOSE_S)
    app = NamedApp("x")
    app.goes_on.clear()
    server = HttpServer(app, HOST, 0)
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
    """The router ends its requests, then the server closes: the client reads an error event instead of a cut
    connection."""
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


# ---------------------------------------------------------------- the cost of a client for the event loop


class BodyApp:
    """Reads the body and records how long it was, before it answers; with `is_early` it starts its answer first and
    reads the body then."""

    def __init__(self) -> None:
        self.num_bytes: list[int] = []
        self.is_early = False
        self.kinds: list[str] = []

    async def __call__(self, scope: dict[str, object], receive: Callable[[], Awaitable[Any]], send: Send) -> None:
        self.kinds.append(str(scope["type"]))
        self.num_bytes.append(0)
        if self.is_early:
            await send({"type": "http.response.start", "status": 413, "headers": []})
            await send({"type": "http.response.body", "body": b"early", "more_body": True})
        is_more = True
        while is_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            self.num_bytes[-1] += len(message.get("body", b""))
            is_more = message.get("more_body", False)
        if not self.is_early:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def chunked(body: bytes, num_bytes: int) -> bytes:
    """Returns the body in chunks of `num_bytes`."""
    pieces = [body[at : at + num_bytes] for at in range(0, len(body), num_bytes)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def post(port: int, *parts: bytes, head: bytes = b"Transfer-Encoding: chunked") -> bytes:
    """Returns the answer, read until the server closes the connection."""
    with socket.create_connection((HOST, port), timeout=60) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(b"POST / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n" + head + b"\r\n\r\n")
            for part in parts:
                client.sendall(part)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(65536):
                answer += piece
        return answer


@pytest.fixture
async def body_server() -> AsyncIterator[tuple[BodyApp, int]]:
    app = BodyApp()
    server = HttpServer(app, HOST, 0)
    await server.start()
    yield app, server.port
    await server.stop()


@pytest.mark.parametrize(
    ("num_bytes", "num_chunk_bytes"), [(4_000, 1), (2**20, 1024), (2**22, 2**16), (2**21, 256), (0, 1)]
)
async def test_bodies_in_ordinary_chunks_are_read(
    body_server: tuple[BodyApp, int], num_bytes: int, num_chunk_bytes: int
) -> None:
    app, port = body_server
    answer = await asyncio.to_thread(post, port, chunked(bytes(num_bytes), num_chunk_bytes))
    assert answer.startswith(b"HTTP/1.1 200")
    assert app.num_bytes == [num_bytes]


@pytest.mark.parametrize("num_chunk_bytes", [1, 16, 100])
@pytest.mark.parametrize("is_early", [False, True])
async def test_a_body_in_very_many_chunks_is_refused_before_it_is_parsed_whole(
    body_server: tuple[BodyApp, int], num_chunk_bytes: int, is_early: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Each chunk takes the event loop some microseconds: 32 MiB of single bytes took minutes of it. The limit also
    holds for a body that is refused and is read only to be dropped."""
    app, port = body_server
    app.is_early = is_early
    answer = await asyncio.to_thread(post, port, chunked(bytes(2**16 * num_chunk_bytes), num_chunk_bytes))
    early = (b"HTTP/1.1 413", b"HTTP/1.1 400")  # it is the second if all chunks came before the server called the app
    assert answer.startswith(early if is_early else b"HTTP/1.1 400")
    (num_bytes,) = app.num_bytes
    assert num_bytes <= 10_000 * num_chunk_bytes
    assert not [line for line in caplog.records if line.levelname == "ERROR"]
    app.is_early = False
    answer = await asyncio.to_thread(post, port, chunked(bytes(10), 5))
    assert answer.startswith(b"HTTP/1.1 200")


async def test_no_other_protocol_is_taken(body_server: tuple[BodyApp, int]) -> None:
    """Web sockets would add one more parser that clients' bytes reach."""
    app, port = body_server
    head = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nContent-Length: 3\r\n"
    head += b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
    answer = await asyncio.to_thread(post, port, b"abc", head=head)
    assert answer.startswith(b"HTTP/1.1 200")
    assert (app.kinds, app.num_bytes) == (["http"], [3])


async def test_headers_of_any_size_are_refused(body_server: tuple[BodyApp, int]) -> None:
    app, port = body_server
    answer = await asyncio.to_thread(post, port, head=b"x: " + b"y" * 2**17)
    assert answer.startswith(b"HTTP/1.1 431")
    assert app.num_bytes == []

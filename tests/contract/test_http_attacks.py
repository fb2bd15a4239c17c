"""Attacks the HTTP server of a router over real sockets: slow, huge, malformed and numerous connections. After each
attack the server still answers a text request, and it has taken no more memory or time than its limits allow.

The limits are small where a test would otherwise wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing.connection import Connection

import psutil
import pytest
from router_chats import chat_body

from deploy.http_server import DEFAULT_LIMITS, HttpServer
from deploy.process_setup import allow_many_files
from deploy.testing import FakeCluster, fake_cluster
from router.edge import create_app

HOST = "127.0.0.1"
PATH = b"/v1/chat/completions"
Limits = dict[str, float]
MANY = 10_000
PATIENCE_S = 30.0
"""A test waits so long for the server to close a connection."""


class Attacked:
    """Holds a served router and what a test does to it."""

    def __init__(self, cluster: FakeCluster, server: HttpServer) -> None:
        self.cluster, self.server, self.port = cluster, server, server.port
        self.writers: list[asyncio.StreamWriter] = []

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a connection, which is closed when the test ends."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        self.writers.append(writer)
        return reader, writer

    async def answer(self, *pieces: bytes) -> bytes:
        """Sends bytes in pieces, and returns what the server sends until it closes the connection."""
        reader, writer = await self.open()
        for piece in pieces:
            writer.write(piece)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        return await rest_of(reader)

    async def ask(self) -> bytes:
        """Returns the status line and the rest of the answer to a text request."""
        return await self.answer(request(chat_body(), close=True))


def request(body: bytes, *, head: bytes = b"", close: bool = False) -> bytes:
    ending = b"Connection: close\r\n" if close else b""
    return b"POST %s HTTP/1.1\r\nHost: weft\r\n%s%sContent-Length: %d\r\n\r\n%s" % (PATH, head, ending, len(body), body)


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Reads until the server closes or resets the connection."""
    received = b""
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                received += piece
    return received


@asynccontextmanager
async def attacked(**limits: float) -> AsyncIterator[Attacked]:
    """Serves a router with these limits. After the test's attack, a text request must be answered."""
    async with fake_cluster() as cluster:
        server = HttpServer(create_app(cluster.service), HOST, 0, replace(DEFAULT_LIMITS, **limits))
        await server.start()
        try:
            target = Attacked(cluster, server)
            yield target
            assert (await target.ask()).startswith(b"HTTP/1.1 200")
            for writer in target.writers:
                writer.close()
        finally:
            await server.stop()


# ------------------------------------------------------------ slow clients


@pytest.mark.parametrize("start", [b"", b"\r\n", b"POST /v1/chat", b"POST / HTTP/1.1\r\nHost: a\r\nX: "])
async def test_a_client_that_does_not_finish_its_headers_is_disconnected(start: bytes) -> None:
    async with attacked(header_timeout_s=0.2) as target:
        answer = await target.answer(start)
        assert answer == b"" if not start else answer.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("drip", [b"x", b"X-%d: y\r\n"])
async def test_headers_that_drip_do_not_keep_a_connection_open(drip: bytes) -> None:
    """Each byte would restart a time limit on idleness; the limit is on the whole."""
    async with attacked(header_timeout_s=0.3) as target:
        reader, writer = await target.open()
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n")
        answer = asyncio.create_task(rest_of(reader))
        number = 0
        while not answer.done():
            number += 1
            writer.write(drip % number if b"%" in drip else drip)
            await asyncio.wait({answer}, timeout=0.02)
        assert answer.result().startswith(b"HTTP/1.1 408")


async def test_the_second_request_of_a_connection_has_no_longer_for_its_headers() -> None:
    async with attacked(header_timeout_s=0.3) as target:
        reader, writer = await target.open()
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"}")
        writer.write(b"GET /health HTTP")
        assert (await rest_of(reader)).startswith(b"HTTP/1.1 408")


async def test_a_body_that_stops_is_ended_and_its_request_released() -> None:
    async with attacked(body_timeout_s=0.2) as target:
        answer = await target.answer(request(chat_body())[:-5])
        assert answer.startswith(b"HTTP/1.1 408")
        assert target.cluster.service.admission.num_in_flight == 0
        assert target.cluster.service.admission.bodies_bytes == 0


async def test_a_body_that_drips_is_ended_although_bytes_come() -> None:
    async with attacked(body_timeout_s=0.2, min_body_bytes_per_s=1000) as target:
        reader, writer = await target.open()
        writer.write(request(b" " * 100_000)[:-100_000])
        answer = asyncio.create_task(rest_of(reader))
        while not answer.done():
            writer.write(b" ")
            await asyncio.wait({answer}, timeout=0.02)
        assert answer.result().startswith(b"HTTP/1.1 408")


async def test_a_body_that_comes_fast_enough_may_take_longer_than_the_time_limit() -> None:
    async with attacked(body_timeout_s=0.1, min_body_bytes_per_s=1) as target:
        reader, writer = await target.open()
        data = request(chat_body(), close=True)
        for at in range(0, len(data), 8):
            writer.write(data[at : at + 8])
            await asyncio.wait({asyncio.create_task(reader.read(0))}, timeout=0.02)
            await asyncio.sleep(0)
        assert (await rest_of(reader)).startswith(b"HTTP/1.1 200")


async def test_a_slow_body_does_not_hold_up_other_requests() -> None:
    async with attacked() as target:
        _, writer = await target.open()
        writer.write(request(chat_body())[:-5])
        assert (await target.ask()).startswith(b"HTTP/1.1 200")


# ------------------------------------------------------------ clients that do not read


async def test_a_client_that_reads_nothing_is_disconnected_and_its_request_ended() -> None:
    """The worker writes megabytes of events. What the router holds meanwhile is the text of the answer, and what one
    socket holds."""
    async with fake_cluster(max_model_len=400_000, write_timeout_s=0.5) as cluster:
        server = HttpServer(create_app(cluster.service), HOST, 0)
        await server.start()
        target = Attacked(cluster, server)
        try:
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((HOST, server.port))
            body = chat_body(stream=True, ignore_eos=True, max_tokens=200_000)
            client.sendall(request(body))
            worker = cluster.workers[0]
            await until(lambda: worker.num_open == 1)
            before = psutil.Process().memory_info().rss
            assert (await target.ask()).startswith(b"HTTP/1.1 200"), "others are served meanwhile"
            await until(lambda: worker.num_open == 0)
            assert [each.request_id for each in worker.aborted] == [worker.requests[0].request_id]
            assert cluster.service.admission.num_in_flight == 0
            assert psutil.Process().memory_info().rss - before < 64 * 2**20
            client.close()
            for writer in target.writers:
                writer.close()
        finally:
            await server.stop()


async def test_whole_answers_that_are_not_read_do_not_hold_their_connection() -> None:
    async with attacked(write_timeout_s=0.3, max_pipelined=2000) as target:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((HOST, target.port))
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 1000)
        await until(lambda: target.server.num_connections == 1)
        before = psutil.Process().memory_info().rss
        await until(lambda: target.server.num_connections == 0)
        assert psutil.Process().memory_info().rss - before < 32 * 2**20
        client.close()


# ------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /%s HTTP/1.1\r\nHost: a\r\n\r\n" % (b"x" * 20_000), 414),
        (b"GET /%s" % (b"x" * 2**20), 414),
        (b"GET /?%s HTTP/1.1\r\nHost: a\r\n\r\n" % (b"x=1&" * 50_000), 414),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: %s\r\n\r\n" % (b"y" * 70_000), 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: %s" % (b"y" * 2**21), 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\n%s: 1\r\n\r\n" % (b"n" * 70_000), 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\n%s\r\n" % (b"a: b\r\n" * 300), 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\n%s" % (b"a: b\r\n" * 500_000), 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\n%s\r\n" % b"".join(b"x-%d: %d\r\n" % (n, n) for n in range(20_000)), 431),
    ],
)
async def test_floods_of_headers_are_refused_by_their_name(data: bytes, status: int) -> None:
    async with attacked() as target:
        answer = await target.answer(data)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b'{"error":{"message":' in answer


async def test_headers_that_end_in_a_later_piece_are_counted_whole() -> None:
    async with attacked() as target:
        answer = await target.answer(b"GET / HTTP/1.1\r\nHost: a\r\nX: ", *[b"y" * 10_000] * 20)
        assert answer.startswith(b"HTTP/1.1 431")


async def test_many_ordinary_headers_are_taken() -> None:
    async with attacked() as target:
        head = b"".join(b"X-%d: %s\r\n" % (number, b"v" * 200) for number in range(200))
        assert (await target.answer(request(chat_body(), head=head, close=True))).startswith(b"HTTP/1.1 200")


# ------------------------------------------------------------ chunks

CHUNKED = b"POST %s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n" % PATH


@pytest.mark.parametrize(
    "body",
    [
        pytest.param([b"1\r\nx\r\n" * 100_000], id="tiny chunks"),
        pytest.param([b"1;%s\r\nx\r\n" % (b"e" * 2**20)], id="one huge extension"),
        pytest.param([b"1;", *[b"e" * 2**16] * 40], id="an extension without an end"),
        pytest.param([b"1;e=e\r\nx\r\n" * 100_000], id="many extensions"),
        pytest.param([b"1\r\nx\r\n0\r\n", b"a: b\r\n" * 100_000, b"\r\n"], id="many trailers"),
        pytest.param([b"0\r\nx: ", *[b"t" * 2**16] * 40], id="a trailer without an end"),
        pytest.param([b"fffffffffffffffff\r\nx"], id="a size that overflows"),
        pytest.param([b"-1\r\nx\r\n"], id="a negative size"),
        pytest.param([b"g\r\nx\r\n"], id="a size that is no number"),
        pytest.param([b"1\r\nxy\r\n0\r\n\r\n"], id="a chunk longer than its size"),
    ],
)
async def test_abused_chunks_are_refused(body: list[bytes]) -> None:
    async with attacked() as target:
        answer = await target.answer(CHUNKED + b"\r\n", *body)
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431")), answer[:200]
        assert target.cluster.workers[0].requests == []
        assert target.cluster.service.admission.num_in_flight == 0


async def test_trailers_do_not_become_headers() -> None:
    async with attacked() as target:
        body = chat_body()
        data = b"%x\r\n%s\r\n0\r\nX-Request-Id: forged\r\nConnection: close\r\n\r\n" % (len(body), body)
        answer = await target.answer(CHUNKED + b"Connection: close\r\n\r\n", data)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"forged" not in answer


# ------------------------------------------------------------ syntax

SECOND = b"GET /weft/members HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(CHUNKED + b"Content-Length: 4\r\n\r\n0\r\n\r\n" + SECOND, id="both framings"),
        pytest.param(
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nContent-Length: 40\r\n\r\nabcd" + SECOND,
            id="two lengths",
        ),
        pytest.param(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +4\r\n\r\nabcd" + SECOND, id="a signed length"),
        pytest.param(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x4\r\n\r\nabcd" + SECOND, id="a hex length"),
        pytest.param(
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4, 4\r\n\r\nabcd" + SECOND, id="a list of lengths"
        ),
        pytest.param(
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + SECOND,
            id="chunked is not last",
        ),
        pytest.param(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n", id="space in name"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n z: 1\r\n\r\n", id="a folded header"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n", id="a null byte in a header"),
        pytest.param(b"GET /\x00 HTTP/1.1\r\nHost: a\r\n\r\n", id="a null byte in the path"),
        pytest.param(b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n", id="a path that is no ASCII"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="no host"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", id="two hosts"),
        pytest.param(b"GET / HTTP/9.9\r\nHost: a\r\n\r\n", id="an unknown version"),
        pytest.param(b"GET / HTP/1.1\r\nHost: a\r\n\r\n", id="another protocol"),
        pytest.param(b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", id="a proxy's method"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="TLS"),
        pytest.param(b"\x00" * 1000, id="null bytes"),
    ],
)
async def test_what_is_not_http_is_refused_and_nothing_after_it_is_read(data: bytes) -> None:
    async with attacked() as target:
        answer = await target.answer(data)
        assert answer.startswith(b"HTTP/1.1 400"), answer[:200]
        assert b"\r\nx-request-id: " in answer
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"members" not in answer


@pytest.mark.parametrize(
    "data", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", b"GET /\r\n\r\n"]
)
async def test_another_version_of_http_is_refused(data: bytes) -> None:
    async with attacked() as target:
        assert (await target.answer(data)).startswith((b"HTTP/1.1 505", b"HTTP/1.1 400"))


async def test_a_wish_for_another_protocol_is_ignored_and_its_body_is_read() -> None:
    """Java's HTTP client sends this with its first request."""
    async with attacked() as target:
        head = b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
        assert (await target.answer(request(chat_body(), head=head))).startswith(b"HTTP/1.1 200")


# ------------------------------------------------------------ numbers


async def test_pipelined_requests_are_answered_in_order_and_a_flood_of_them_is_not_kept() -> None:
    async with attacked(max_pipelined=4) as target:
        few = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 3
        answer = await target.answer(few + b"GET /nowhere HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert [piece[:3] for piece in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"200", b"404"]
        flood = await target.answer(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 100_000)
        assert flood.count(b"HTTP/1.1 200") <= 2000


async def test_a_client_that_pipelines_and_leaves_is_noticed() -> None:
    async with attacked() as target:
        target.cluster.workers[0].script.pause_at = 2
        _, writer = await target.open()
        writer.write(request(chat_body()) + request(chat_body()))
        await until(lambda: target.cluster.workers[0].num_open == 1)
        writer.transport.abort()
        await until(lambda: target.cluster.workers[0].num_open == 0)
        assert len(target.cluster.workers[0].requests) == 1, "the second request never begins"
        target.cluster.workers[0].script.pause_at = None
        assert (await target.ask()).startswith(b"HTTP/1.1 200")


async def test_connections_beyond_the_limit_make_the_oldest_silent_ones_go() -> None:
    async with attacked(max_connections=8) as target:
        silent = [await target.open() for _ in range(8)]
        assert (await target.ask()).startswith(b"HTTP/1.1 200")
        assert await rest_of(silent[0][0]) == b"", "the oldest made room"
        silent[7][1].write(request(chat_body(), close=True))
        assert (await rest_of(silent[7][0])).startswith(b"HTTP/1.1 200"), "a younger one was kept"


async def test_connections_beyond_the_limit_are_closed_if_all_others_are_at_work() -> None:
    async with attacked(max_connections=2) as target:
        target.cluster.workers[0].script.pause_at = 1
        busy = [await target.open() for _ in range(2)]
        for _, writer in busy:
            writer.write(request(chat_body(), close=True))
        await until(lambda: target.cluster.workers[0].num_open == 2)
        assert await target.ask() == b""
        target.cluster.workers[0].script.resume.set()
        assert [(await rest_of(reader)).startswith(b"HTTP/1.1 200") for reader, _ in busy] == [True, True]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nothing tells when a socket's end is noticed
            await asyncio.sleep(0.005)


def hold_idle_connections(pipe: Connection, port: int) -> None:
    """Opens connections that send nothing, and holds them until it is asked to end."""
    allow_many_files()
    held = [socket.create_connection((HOST, port), timeout=30) for _ in range(MANY)]
    pipe.send(len(held))
    pipe.recv()


async def test_ten_thousand_idle_connections_leave_room_for_text_requests() -> None:
    allow_many_files()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < MANY + 1000:
        pytest.skip(f"the limit of open files is {files}, which is too low for {MANY} connections")
    context = multiprocessing.get_context("spawn")
    async with attacked(header_timeout_s=300) as target:
        here, there = context.Pipe()
        before = psutil.Process().memory_info().rss
        process = context.Process(target=hold_idle_connections, args=(there, target.port), daemon=True)
        process.start()
        try:
            assert await asyncio.to_thread(here.recv) == MANY
            assert (await target.ask()).startswith(b"HTTP/1.1 200")
            each = (psutil.Process().memory_info().rss - before) / MANY
            assert each < 32 * 1024, f"an idle connection takes {each:.0f} bytes"
            print(f"an idle connection takes {each:.0f} bytes")
        finally:
            here.send(None)
            await asyncio.to_thread(process.join, 20)
            process.kill()

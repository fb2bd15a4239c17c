"""Sends the requests of `weft bench http` from a process of its own, over raw sockets.

The clients parse no JSON and hold no answers: they count the events and the bytes that arrive, so that they take less
CPU time than the router. The module knows nothing of the router but its port.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple, cast

from deploy.process_setup import allow_many_files

DONE = b"data: [DONE]\n\n"
HOST = "127.0.0.1"


class HttpLoad(NamedTuple):
    """An `HttpLoad` is a list of bodies that some clients send, each client one after the other."""

    port: int
    bodies: Sequence[bytes]
    num_clients: int = 1
    keeps_connection: bool = True


class HttpCounts(NamedTuple):
    """Holds what all clients of a load have read."""

    num_answers: int
    """Counts the answers with status 200 that came to their end."""
    num_errors: int
    num_content_events: int
    """Counts the events of streamed answers that carry text."""


class StreamClient(asyncio.Protocol):
    """A `StreamClient` is one connection. It sends a request at a time, and counts what it reads."""

    def __init__(self) -> None:
        self.num_content_events = 0
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[bool] | None = None
        self._tail = b""
        self._is_first = True
        self._left: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def ask(self, request: bytes) -> bool:
        """Sends a request and waits for the end of its answer. Returns whether it has the status 200 and is whole."""
        assert self._transport is not None
        self._answered = asyncio.get_running_loop().create_future()
        self._tail, self._is_first, self._left = b"", True, None
        self._transport.write(request)
        return await self._answered

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        joined = self._tail + data
        if self._is_first:
            if b"\r\n\r\n" not in joined:
                self._tail = joined
                return
            head, _, joined = joined.partition(b"\r\n\r\n")
            self._is_first = False
            if not head.startswith(b"HTTP/1.1 200"):
                self._end(False)
                return
            _, found, length = head.lower().partition(b"content-length:")
            self._left = int(length.split(b"\r\n")[0]) if found else None
            data = joined
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._end(True)
            return
        mark = b'"delta":{"content":'
        self.num_content_events += joined.count(mark)
        self._tail = joined[-(len(mark) - 1) :]
        if joined.endswith(DONE + b"\r\n0\r\n\r\n"):
            self._end(True)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(False)

    def _end(self, is_whole: bool) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(is_whole)


class StreamClients:
    """Holds the process of the clients. It is a context manager."""

    def __enter__(self) -> StreamClients:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve_loads, args=(there,), daemon=True)
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join(timeout=10)
        self._process.kill()

    def run(self, load: HttpLoad) -> HttpCounts:
        """Runs a load to its end."""
        self.begin(load)
        return self.end()

    def begin(self, load: HttpLoad) -> None:
        self._pipe.send(load)

    def end(self) -> HttpCounts:
        """Waits for the end of the load that `begin` started."""
        counts: HttpCounts = self._pipe.recv()
        return counts

    def poll(self, limit_s: float) -> HttpCounts | None:
        """Returns the counts if the load ends within `limit_s`, otherwise None."""
        return self.end() if self._pipe.poll(limit_s) else None


def _serve_loads(pipe: Connection) -> None:
    import uvloop

    allow_many_files()
    while (load := pipe.recv()) is not None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            pipe.send(runner.run(_run_load(load)))


async def _run_load(load: HttpLoad) -> HttpCounts:
    parts = [load.bodies[at :: load.num_clients] for at in range(load.num_clients)]
    results = await asyncio.gather(*(_run_client(load, part) for part in parts))
    return HttpCounts(*(sum(column) for column in zip(*results, strict=True)))


async def _run_client(load: HttpLoad, bodies: Sequence[bytes]) -> HttpCounts:
    client: StreamClient | None = None
    num_answers = num_errors = num_events = 0
    for body in bodies:
        if client is None:
            _, client = await asyncio.get_running_loop().create_connection(StreamClient, HOST, load.port)
        is_whole = await client.ask(_head(body, load.keeps_connection) + body)
        num_answers, num_errors = num_answers + is_whole, num_errors + (not is_whole)
        if not (is_whole and load.keeps_connection):
            num_events += client.num_content_events
            client.close()
            client = None
    if client is not None:
        num_events += client.num_content_events
        client.close()
    return HttpCounts(num_answers, num_errors, num_events)


def _head(body: bytes, keeps_connection: bool) -> bytes:
    close = "" if keeps_connection else "Connection: close\r\n"
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Accept: */*\r\nUser-Agent: weft-bench\r\n{close}Content-Length: {len(body)}\r\n\r\n"
    ).encode()

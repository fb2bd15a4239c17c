"""Fetches from servers on this machine, for tests that pass with each fetcher, and writes answers that never end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from media_servers import Answer, AskedRequest, MediaServer, local_names

from modalities.media import MediaLimits
from router.fetch import FetchedFile, FetchSettings, MediaFetcher, WantedMedium

Make = Callable[..., MediaFetcher]
MEDIUM = bytes(range(256)) * 300


@asynccontextmanager
async def fetching(make: Make, server: MediaServer, **settings: object) -> AsyncIterator[MediaFetcher]:
    defaults = {
        "schemes": ("https", "http"),
        "allowed_ports": (server.port,),
        "allowed_networks": ("127.0.0.2/31",),
    }
    fetcher = make(FetchSettings(**(defaults | settings)), local_names)
    await fetcher.start()
    try:
        yield fetcher
    finally:
        await fetcher.close()


async def fetch(fetcher: MediaFetcher, url: str, salt: str = "", request: int = 1) -> FetchedFile:
    return await fetcher.fetch(WantedMedium(url, salt, request), lambda _: None)


def at_most(num_bytes: int) -> MediaLimits:
    return MediaLimits(max_bytes_per_item=num_bytes)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.005)


def endless(first: bytes) -> Answer:
    """Returns a page that begins with these bytes and then never ends."""

    async def page(_: AskedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        while True:
            writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
            await writer.drain()

    return page


def silent(first: bytes) -> Answer:
    """Returns a page that sends these bytes, and then nothing until its client leaves."""

    async def page(_: AskedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        await writer.drain()
        await asyncio.Event().wait()

    return page


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"

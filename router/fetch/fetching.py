"""Fetches one URL: walks its redirects, asks with the validators of what the cache has, and receives the file within
its limits.

Every URL on the way is parsed and checked alike, and each connection is made by `PinnedNetwork`. The client is httpcore
alone, which takes a URL in parts and knows neither proxies, nor cookies, nor passwords of the environment; it follows
no redirects and decodes no content. Each request has a connection of its own: on one that is kept, a server may have
put what the next request would take for its answer. What a server sends is never part of a message.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import httpcore

from fabric.contracts import InvalidMedia, MediaUnreachable, Overloaded, UrlRefused
from router.fetch.address_rules import AddressRules
from router.fetch.fetch_cache import FetchCache, UrlKey, cache_terms
from router.fetch.fetch_settings import FetchSettings
from router.fetch.file_root import open_under
from router.fetch.pinned_network import NameResolver, PinnedNetwork
from router.fetch.stored_file import READ_BYTES, FileWriter, StoredFile
from router.fetch.url_policy import FILE, FetchUrl, UrlPolicy, parse_url, redirected
from router.fetch.wire_meter import MeteredStream, WireMeter

REDIRECTS = frozenset({301, 302, 303, 307, 308})
OK, NOT_MODIFIED = 200, 304
NUM_FILE_THREADS = 2
"""Reads this many files of `file:` URLs at once, because a file system may block."""
_HEADERS = (("accept", "*/*"), ("accept-encoding", "identity"), ("user-agent", "weft"), ("connection", "close"))


class GrowingFile(Protocol):
    """A `GrowingFile` is told what a file takes before its bytes are received, and sees them when they are there."""

    async def announce(self, num_bytes: int | None) -> None:
        """Takes the size of the file, or None if the server does not say it. Waits for room. Raises InvalidMedia if the
        file is too large, and Overloaded if there is no room."""
        ...

    def grow(self, num_bytes: int) -> None:
        """Takes the bytes that the file has now. Raises as `announce` does."""
        ...

    def see(self, piece: bytes) -> None:
        """Takes the next bytes of the file. Raises InvalidMedia if the file will be refused."""
        ...

    def see_whole(self, file: StoredFile) -> None:
        """Takes a file that was there already. Raises InvalidMedia if the file will be refused."""
        ...

    def end(self) -> None:
        """Says that all bytes have arrived. Raises InvalidMedia if the file will be refused."""
        ...


class ServerGone(Exception):
    """A `ServerGone` says that a server was too slow, or has left. It may have left because this machine was too slow,
    which the caller knows."""


class FetchedMedium(NamedTuple):
    file: StoredFile
    """The receiver closes the file."""
    is_cached: bool
    """Tells whether the bytes were there before; a server may still have been asked whether they are current."""


class MediumClient:
    """A `MediumClient` fetches URLs for all requests of a router. It belongs to one event loop."""

    def __init__(
        self,
        settings: FetchSettings,
        resolver: NameResolver,
        cache: FetchCache[StoredFile],
        now: Callable[[], float],
    ) -> None:
        """Raises OSError or ssl.SSLError if the file of certificates can't be read."""
        self._settings = settings
        self._policy = UrlPolicy(settings)
        self._cache = cache
        self._now = now
        trusted = ssl.create_default_context()
        if settings.ca_file is not None:
            trusted.load_verify_locations(settings.ca_file)
        self._threads = ThreadPoolExecutor(NUM_FILE_THREADS, thread_name_prefix="fetch-file")
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=trusted,
            max_connections=settings.max_concurrent,
            max_keepalive_connections=0,
            network_backend=PinnedNetwork(AddressRules(settings.allowed_networks, settings.denied_networks), resolver),
        )

    async def close(self) -> None:
        await self._pool.aclose()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def parse(self, text: str) -> FetchUrl:
        """Returns a client's URL in parts. Raises UrlRefused if it may not be asked."""
        url = parse_url(text)
        self._policy.check(url)
        return url

    async def fetch(self, url: FetchUrl, salt: str, growing: GrowingFile) -> FetchedMedium:
        """Returns the medium of a URL from `parse`. Raises UrlRefused if it leads to one that may not be asked,
        MediaUnreachable if it can't be fetched, ServerGone if that may be the fault of this machine, InvalidMedia if it
        is too large, and Overloaded if there is no room."""
        if url.scheme == FILE:
            return FetchedMedium(await self._read(url, growing), False)
        try:
            for _ in range(self._settings.max_redirects + 1):
                found = await self._ask(url, salt, growing)
                if isinstance(found, FetchedMedium):
                    return found
                url = found
        except httpcore.TimeoutException as error:
            raise ServerGone("the server of the URL did not answer in time") from error
        except (httpcore.ConnectError, ssl.SSLError) as error:
            message = "no connection to the server of the URL could be made, or its certificate is not trusted"
            raise MediaUnreachable(message) from error
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            raise ServerGone("the answer of the URL's server is malformed or was cut off") from error
        raise MediaUnreachable(f"the URL redirects more than {self._settings.max_redirects} times")

    # ------------------------------------------------------------ HTTP

    async def _ask(self, url: FetchUrl, salt: str, growing: GrowingFile) -> FetchedMedium | FetchUrl:
        """Asks one URL. Returns the medium, or where the URL redirects to."""
        key = UrlKey(salt, url.text)
        known = self._cache.find(key)
        if known is None:
            return await self._exchange(url, key, None, {}, growing)
        held = known.file.share()  # The cache may give its own up while the server is asked.
        try:
            if self._now() < known.fresh_until_s:
                return _taken_from_cache(held, growing)
            return await self._exchange(url, key, held, known.validators(), growing)
        finally:
            held.close()

    async def _exchange(
        self, url: FetchUrl, key: UrlKey, held: StoredFile | None, validators: Mapping[str, str], growing: GrowingFile
    ) -> FetchedMedium | FetchUrl:
        settings = self._settings
        timeouts = {"connect": settings.connect_timeout_s, "read": settings.read_timeout_s}
        async with self._pool.stream(
            "GET",
            httpcore.URL(scheme=url.scheme.encode(), host=url.host.encode(), port=url.port, target=url.target.encode()),
            headers=[("host", url.host_header), *_HEADERS, *validators.items()],
            extensions={"timeout": timeouts | {"write": settings.read_timeout_s, "pool": settings.wait_s}},
        ) as response:
            headers = _joined(response.headers)
            if response.status in REDIRECTS:
                return self._redirected(url, headers.get("location", ""))
            terms = cache_terms(headers)
            if response.status == NOT_MODIFIED and held is not None:
                self._cache.revalidated(key, terms, self._now())
                return _taken_from_cache(held, growing)
            if response.status != OK:
                raise MediaUnreachable(f"the server of the URL answered with the status {response.status}")
            if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
                raise MediaUnreachable("the server of the URL compressed its answer, which was not asked for")
            meter = _meter(response)
            await growing.announce(_length(headers))
            file = await _received(response.aiter_stream(), growing, meter)
        for dropped in self._cache.put(key, file.digest, file.share(), file.num_bytes, terms, self._now()):
            dropped.close()
        return FetchedMedium(file, False)

    def _redirected(self, url: FetchUrl, location: str) -> FetchUrl:
        """Returns where a redirect leads. Raises UrlRefused if that may not be asked."""
        if not location:
            raise MediaUnreachable("the server of the URL redirects to nowhere")
        target = redirected(url, location)
        if target.scheme == FILE:
            raise UrlRefused("the URL redirects to a file of this machine")
        self._policy.check(target)
        return target

    # ------------------------------------------------------------ files

    async def _read(self, url: FetchUrl, growing: GrowingFile) -> StoredFile:
        """Returns a copy of a file of this machine. Raises UrlRefused."""
        loop = asyncio.get_running_loop()
        file = await loop.run_in_executor(self._threads, open_under, self._settings.file_root, url)
        try:
            await growing.announce(os.fstat(file).st_size)
            return await _received(self._pieces(file), growing)
        except OSError as error:
            raise MediaUnreachable("the file of the URL could not be read") from error
        finally:
            os.close(file)

    async def _pieces(self, file: int) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        while piece := await loop.run_in_executor(self._threads, os.read, file, READ_BYTES):
            yield piece


def _taken_from_cache(held: StoredFile, growing: GrowingFile) -> FetchedMedium:
    growing.grow(held.num_bytes)
    growing.see_whole(held)
    return FetchedMedium(held.share(), True)


def _meter(response: httpcore.Response) -> WireMeter:
    """Returns the meter of the connection of an answer whose head is complete."""
    stream = response.extensions["network_stream"]
    if not isinstance(stream, MeteredStream):
        raise TypeError(f"the answer came by a {type(stream).__name__}, which is not metered")
    stream.meter.head_ended()
    return stream.meter


async def _received(pieces: AsyncIterator[bytes], growing: GrowingFile, meter: WireMeter | None = None) -> StoredFile:
    """Receives a file. Raises InvalidMedia if it is empty, MediaUnreachable if its pieces are too small, and what
    `growing` raises."""
    writer = FileWriter()
    try:
        async for piece in pieces:
            if meter is not None:
                meter.hand_on(len(piece))
            growing.grow(writer.num_bytes + len(piece))
            growing.see(piece)
            try:
                writer.append(piece)
            except OSError as error:
                raise Overloaded("this server has no memory left for the file behind the URL") from error
        if not writer.num_bytes:
            raise InvalidMedia("the file behind the URL is empty")
        growing.end()
        return writer.finish()
    finally:
        writer.close()


def _joined(raw: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Returns headers by their names in lower case; the values of a repeated one are joined by commas. A value that is
    not UTF-8 is read as Latin-1, which HTTP once prescribed."""
    headers: dict[str, str] = {}
    for name, value in raw:
        try:
            text = value.decode()
        except UnicodeDecodeError:
            text = value.decode("latin-1")
        key = name.decode("latin-1").lower()
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers


def _length(headers: Mapping[str, str]) -> int | None:
    """Returns the size of a body that its server announces, or None."""
    text = headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None

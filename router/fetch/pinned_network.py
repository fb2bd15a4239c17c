"""Connects to addresses that were validated, and to no others. `PinnedNetwork` is what httpcore makes connections with:
it is given the host of a URL, resolves it once, validates every address that the answer holds, and connects to one of
exactly these. The name is not resolved again, so an answer that changes afterwards has no effect. TLS then checks the
certificate against the host's name, which httpcore passes itself. What is read from a connection is metered
(`wire_meter`).

An address that is forbidden and a name that has no address give the same error, so that an answer does not tell which
names exist inside the operator's network.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

import httpcore

from fabric.contracts import MediaUnreachable, UrlRefused
from router.fetch.address_rules import Address, AddressRules
from router.fetch.wire_meter import MeteredStream, WireMeter

NOT_ALLOWED = "the host of the URL has no address from which this server may fetch"
NOT_RESOLVED = "the addresses of the URL's host could not be found in time"
NUM_RESOLVER_THREADS = 16
"""Limits the names that are resolved at once, because the system's resolver blocks."""
_TEMPORARY = frozenset({socket.EAI_AGAIN, socket.EAI_MEMORY, socket.EAI_SYSTEM})


class NameResolver(Protocol):
    """A `NameResolver` finds the addresses of a name; it is the seam for tests."""

    async def resolve(self, host: str) -> list[Address]:
        """Returns the addresses of a name in the order in which they should be tried; none if the name does not exist.
        Raises MediaUnreachable if the answer is not known now."""
        ...

    def close(self) -> None: ...


class SystemResolver:
    """Asks the resolver of the system, in threads of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_RESOLVER_THREADS, thread_name_prefix="resolve")

    async def resolve(self, host: str) -> list[Address]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, _look_up, host)
        except socket.gaierror as error:
            if error.errno in _TEMPORARY:
                raise MediaUnreachable(NOT_RESOLVED) from error
            return []
        except (OSError, UnicodeError):
            return []
        return [ipaddress.ip_address(text) for text in dict.fromkeys(found)]

    def close(self) -> None:
        """Closes without waiting, because a look-up may take as long as the system lets it."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str) -> list[str]:
    return [str(row[4][0]) for row in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


class PinnedNetwork(httpcore.AsyncNetworkBackend):
    """A `PinnedNetwork` makes the connections of one client."""

    def __init__(self, rules: AddressRules, resolver: NameResolver) -> None:
        self._rules = rules
        self._resolver = resolver
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore names it so
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> MeteredStream:
        """Returns a connection, for one answer of a server, to the first validated address that takes one. Raises
        UrlRefused if the host has no address or one of its addresses is forbidden, MediaUnreachable if the resolver has
        no answer, and httpcore's errors if no connection can be made within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                addresses = await self._validated(host)
                return await self._connect(addresses, port, timeout, socket_options)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout("the connection took too long") from error

    async def _validated(self, host: str) -> list[Address]:
        """Returns the addresses of the host, all of which may be connected to. One that is forbidden refuses the host:
        a host with public and private addresses is an attempt to be connected to the private one at a later try."""
        try:
            addresses: list[Address] = [ipaddress.ip_address(host)]
        except ValueError:
            addresses = await self._resolver.resolve(host)
        if not addresses or not all(map(self._rules.allows, addresses)):
            raise UrlRefused(NOT_ALLOWED)
        return addresses

    async def _connect(
        self,
        addresses: list[Address],
        port: int,
        limit_s: float | None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None,
    ) -> MeteredStream:
        """Connects to one address after the other. Each gets its share of the time, so that a silent one does not take
        that of the others."""
        share_s = None if limit_s is None else limit_s / len(addresses)
        for address in addresses[:-1]:
            with suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                stream = await self._backend.connect_tcp(str(address), port, share_s, socket_options=socket_options)
                return MeteredStream(stream, WireMeter())
        stream = await self._backend.connect_tcp(str(addresses[-1]), port, socket_options=socket_options)
        return MeteredStream(stream, WireMeter())

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore names it so
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise httpcore.UnsupportedProtocol("media are not fetched from sockets of this machine")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

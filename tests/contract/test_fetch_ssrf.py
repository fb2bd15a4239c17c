"""Tries to reach a listener on a forbidden address through URLs of media: each attempt is answered 400, and the
listener sees no connection.

The listener stands on 127.0.0.1 and, where the machine has it, on ::1. A server on 127.0.0.2, whose network is allowed,
redirects. Names are resolved by a fake, whose answers may change between two look-ups.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest
from media_servers import FixedResolver, MediaServer, media_server, response

from fabric.contracts import MediaUnreachable, UrlRefused, WeftError
from router.api import http_error
from router.fetch import FetchSettings, LoopFetcher, WantedMedium

ALLOWED = "127.0.0.2"


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


FORBIDDEN_HOSTS = ("127.0.0.1", *(["::1"] if has_ipv6() else []))

# Each of these, with the listener's port in place of PORT, names a forbidden address or is no URL that may be asked.
URLS = [
    # plain addresses
    "http://127.0.0.1:PORT/",
    "http://127.0.0.3:PORT/",
    "http://127.255.255.254:PORT/",
    "http://0.0.0.0:PORT/",
    "http://0.1.2.3:PORT/",
    "http://10.0.0.1:PORT/",
    "http://100.64.0.1:PORT/",
    "http://100.100.100.200:PORT/latest/meta-data/",
    "http://168.63.129.16:PORT/",
    "http://169.254.169.254:PORT/latest/meta-data/",
    "http://169.254.170.2:PORT/v2/credentials",
    "http://172.16.0.1:PORT/",
    "http://172.31.255.255:PORT/",
    "http://192.0.0.192:PORT/",
    "http://192.0.2.1:PORT/",
    "http://192.88.99.1:PORT/",
    "http://192.168.1.1:PORT/",
    "http://198.18.0.1:PORT/",
    "http://198.51.100.1:PORT/",
    "http://203.0.113.1:PORT/",
    "http://224.0.0.1:PORT/",
    "http://240.0.0.1:PORT/",
    "http://255.255.255.255:PORT/",
    # other forms of 127.0.0.1
    "http://2130706433:PORT/",
    "http://0x7f000001:PORT/",
    "http://0x7F.0x0.0x0.0x1:PORT/",
    "http://017700000001:PORT/",
    "http://0177.0.0.1:PORT/",
    "http://0177.0.0.01:PORT/",
    "http://127.1:PORT/",
    "http://127.0.1:PORT/",
    "http://127.0.0.1.:PORT/",
    "http://127.000.000.001:PORT/",
    "http://127.0.0.0x1:PORT/",
    "http://0:PORT/",
    "http://4294967297:PORT/",
    "http://１２７.０.０.１:PORT/",
    "http://127。0。0。1:PORT/",
    "http://①②⑦.0.0.1:PORT/",
    "http://%31%32%37.0.0.1:PORT/",
    "http://127.0.0.1%2f:PORT/",
    "http://127.0.0.1%00.example.test:PORT/",
    # IPv6
    "http://[::1]:PORT/",
    "http://[0:0:0:0:0:0:0:1]:PORT/",
    "http://[::]:PORT/",
    "http://[::ffff:127.0.0.1]:PORT/",
    "http://[::ffff:7f00:1]:PORT/",
    "http://[::127.0.0.1]:PORT/",
    "http://[::ffff:0:127.0.0.1]:PORT/",
    "http://[64:ff9b::127.0.0.1]:PORT/",
    "http://[64:ff9b::7f00:1]:PORT/",
    "http://[64:ff9b:1::7f00:1]:PORT/",
    "http://[2002:7f00:1::]:PORT/",
    "http://[2001:0:7f00:1::]:PORT/",
    "http://[2001:db8::1]:PORT/",
    "http://[3fff::1]:PORT/",
    "http://[100::1]:PORT/",
    "http://[5f00::1]:PORT/",
    "http://[fc00::1]:PORT/",
    "http://[fd00:ec2::254]:PORT/",
    "http://[fe80::1]:PORT/",
    "http://[fe80::1%25lo]:PORT/",
    "http://[fe80::1%lo]:PORT/",
    "http://[::1%25lo]:PORT/",
    "http://[fec0::1]:PORT/",
    "http://[ff02::1]:PORT/",
    "http://[::1:PORT/",
    "http://::1:PORT/",
    "http://[127.0.0.1]:PORT/",
    # parts of a URL that parsers read differently
    "http://example.test@127.0.0.1:PORT/",
    "http://example.test:80@127.0.0.1:PORT/",
    "http://127.0.0.1:PORT@127.0.0.2:PORT/",
    "http://@127.0.0.1:PORT/",
    "http://127.0.0.2:PORT\\@127.0.0.1:PORT/",
    "http://127.0.0.1:PORT\\@127.0.0.2:PORT/",
    "http:\\\\127.0.0.1:PORT\\",
    "http:/\\127.0.0.1:PORT/",
    "http:///127.0.0.1:PORT/",
    "http:127.0.0.1:PORT/",
    "http:/127.0.0.1:PORT/",
    "//127.0.0.1:PORT/",
    "127.0.0.1:PORT/",
    "http://127.0.0.2:PORT#@127.0.0.1:PORT/\t",
    "http://127.0.0.2 127.0.0.1:PORT/",
    "http://127.0.0.2:PORT/\r\nHost: 127.0.0.1\r\n\r\n",
    "http://127.0.0.2:PORT/ HTTP/1.1\r\nX: y",
    "http://127.0.0.2\r\n.test:PORT/",
    "http://127.0.0.2\t.test:PORT/",
    "http://127.0.0.1\x00.test:PORT/",
    "\x01http://127.0.0.1:PORT/",
    " http://127.0.0.1:PORT/",
    "http://127.0.0.1:PORT/\u2028",
    "http://loc\u00adalhost:PORT/",
    "http://loc\u200balhost:PORT/",
    # ports
    "http://127.0.0.2:22/",
    "http://127.0.0.2:0/",
    "http://127.0.0.2:65536/",
    "http://127.0.0.2:99999999999/",
    "http://127.0.0.2:-1/",
    "http://127.0.0.2:PORT:PORT/",
    "http://127.0.0.2:８０/",
    # hosts
    "http://",
    "http://:PORT/",
    "http://.:PORT/",
    "http://..:PORT/",
    "http://media.test..:PORT/",
    "http://-media.test:PORT/",
    f"http://{'a' * 64}.test:PORT/",
    f"http://{'a.' * 130}test:PORT/",
    f"http://media.test:PORT/{'a' * 9000}",
    # names
    "http://localhost:PORT/",
    "http://LOCALHOST:PORT/",
    "http://localhost.:PORT/",
    "http://sub.localhost:PORT/",
    "http://loopback.test:PORT/",
    "http://loopback6.test:PORT/",
    "http://private.test:PORT/",
    "http://metadata.test:PORT/",
    "http://mapped.test:PORT/",
    "http://nat64.test:PORT/",
    "http://unspecified.test:PORT/",
    "http://mixed.test:PORT/",
    "http://mixed6.test:PORT/",
    "http://mixed-last.test:PORT/",
    "http://missing.test:PORT/",
    "http://denied.test:PORT/",
    "http://sub.denied.test:PORT/",
    # schemes
    "file:///etc/passwd",
    "file://127.0.0.1/etc/passwd",
    "file:/etc/passwd",
    "gopher://127.0.0.1:PORT/_GET%20/",
    "ftp://127.0.0.1:PORT/",
    "dict://127.0.0.1:PORT/",
    "ldap://127.0.0.1:PORT/",
    "unix:/run/docker.sock",
    "http+unix://%2Frun%2Fdocker.sock/",
    "jar:http://127.0.0.1:PORT!/",
    "javascript:alert(1)",
    "ws://127.0.0.1:PORT/",
    "",
]

NAMES = {
    "localhost": [["127.0.0.1"]],
    "sub.localhost": [["127.0.0.1"]],
    "loopback.test": [["127.0.0.1"]],
    "loopback6.test": [["::1"]],
    "private.test": [["10.1.2.3"]],
    "metadata.test": [["169.254.169.254"]],
    "mapped.test": [["::ffff:127.0.0.1"]],
    "nat64.test": [["64:ff9b::7f00:1"]],
    "unspecified.test": [["0.0.0.0"]],
    "mixed.test": [["127.0.0.1", ALLOWED]],
    "mixed6.test": [["::1", ALLOWED]],
    "mixed-last.test": [[ALLOWED, "127.0.0.1"]],
    "denied.test": [[ALLOWED]],
    "sub.denied.test": [[ALLOWED]],
    "media.test": [[ALLOWED]],
    "rebinding.test": [[ALLOWED], ["127.0.0.1"]],
    "rebound.test": [["127.0.0.1"], [ALLOWED]],
}


class Place(NamedTuple):
    fetcher: LoopFetcher
    resolver: FixedResolver
    forbidden: MediaServer
    allowed: MediaServer

    async def fetch(self, url: str) -> bytes:
        port = str(self.forbidden.port)
        return (await self.fetcher.fetch(WantedMedium(url.replace("PORT", port)), lambda _: None)).data


@asynccontextmanager
async def place(
    networks: tuple[str, ...] = (f"{ALLOWED}/32",), denied_networks: tuple[str, ...] = ()
) -> AsyncIterator[Place]:
    async with (
        media_server({"/": response(b"a secret")}, FORBIDDEN_HOSTS) as forbidden,
        media_server({"/": response(b"a medium")}, (ALLOWED,), forbidden.port) as allowed,
    ):
        settings = FetchSettings(
            schemes=("https", "http"),
            allowed_ports=(forbidden.port,),
            allowed_networks=networks,
            denied_networks=denied_networks,
            denied_hosts=("denied.test", "*.denied.test"),
            cache_bytes=0,
        )
        resolver = FixedResolver(NAMES)
        fetcher = LoopFetcher(settings, lambda: resolver)
        await fetcher.start()
        try:
            yield Place(fetcher, resolver, forbidden, allowed)
        finally:
            await fetcher.close()


async def refused(at: Place, url: str) -> UrlRefused:
    """Fetches a URL and returns the error. Checks what must hold for every refusal."""
    with pytest.raises(UrlRefused) as caught:
        await at.fetch(url)
    for _ in range(5):  # A connection that was made would be accepted in these turns of the loop.
        await asyncio.sleep(0)
    return caught.value


def test_the_matrix_has_enough_cases() -> None:
    assert len(set(URLS)) == len(URLS) >= 80


@pytest.mark.parametrize("url", URLS, ids=ascii)
async def test_url_reaches_no_forbidden_listener(url: str) -> None:
    async with place() as at:
        error = await refused(at, url)
        assert at.forbidden.num_connections == 0
        answer = http_error(error)
        assert answer.status == 400
        assert b"127.0.0" not in answer.body
        assert b"169.254" not in answer.body


REDIRECTED = [
    "http://127.0.0.1:PORT/",
    "//127.0.0.1:PORT/",
    "http://[::1]:PORT/",
    "http://[::ffff:127.0.0.1]:PORT/",
    "http://[64:ff9b::7f00:1]:PORT/",
    "http://2130706433:PORT/",
    "http://0177.0.0.1:PORT/",
    "http://127.1:PORT/",
    "http://0.0.0.0:PORT/",
    "http://10.0.0.1:PORT/",
    "http://169.254.169.254:PORT/",
    "http://loopback.test:PORT/",
    "http://mixed.test:PORT/",
    "http://missing.test:PORT/",
    "http://denied.test:PORT/",
    "http://user@127.0.0.1:PORT/",
    "http://127.0.0.2:PORT\\@127.0.0.1:PORT/",
    "/\\127.0.0.1:PORT/",
    "\\\\127.0.0.1:PORT/",
    "//127.0.0.1:PORT\t/",
    "http://127.0.0.2:22/",
    "file:///etc/passwd",
    "gopher://127.0.0.1:PORT/",
    "javascript:alert(1)",
    "http:///",
]


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
@pytest.mark.parametrize("target", REDIRECTED, ids=ascii)
async def test_redirect_reaches_no_forbidden_listener(target: str, status: str) -> None:
    async with place() as at:
        location = target.replace("PORT", str(at.forbidden.port))
        at.allowed.pages["/go"] = response(b"", status, location=location)
        at.allowed.pages["/twice"] = response(b"", status, location="/go")
        await refused(at, "http://media.test:PORT/twice")
        assert at.forbidden.num_connections == 0
        assert [asked.target for asked in at.allowed.asked] == ["/twice", "/go"]


async def test_a_header_can_not_be_injected_by_a_redirect() -> None:
    async with place() as at:
        at.allowed.pages["/go"] = response(b"", "302 Found", location="/x\x0bHost: a")
        with pytest.raises(WeftError):
            await at.fetch("http://media.test:PORT/go")
        assert [asked.target for asked in at.allowed.asked] == ["/go"]


async def test_an_answer_that_changes_is_asked_for_once_and_pinned() -> None:
    async with place() as at:
        assert await at.fetch("http://rebinding.test:PORT/") == b"a medium"
        assert at.resolver.asked == ["rebinding.test"]
        assert at.forbidden.num_connections == 0


async def test_an_answer_that_changes_is_validated_for_each_connection() -> None:
    async with place() as at:
        at.allowed.pages["/go"] = response(b"", "302 Found", location="/", connection="close")
        await refused(at, "http://rebinding.test:PORT/go")
        assert at.resolver.asked == ["rebinding.test", "rebinding.test"]
        assert at.forbidden.num_connections == 0
        await refused(at, "http://rebound.test:PORT/")
        assert at.forbidden.num_connections == 0


async def test_a_forbidden_name_and_a_missing_one_look_the_same() -> None:
    async with place() as at:
        errors = [await refused(at, f"http://{name}.test:PORT/") for name in ("private", "loopback", "missing")]
        assert len({error.message for error in errors}) == 1
        literal = await refused(at, "http://10.0.0.1:PORT/")
        assert literal.message == errors[0].message


async def test_a_name_without_an_answer_now_is_unreachable() -> None:
    async with place() as at:
        with pytest.raises(MediaUnreachable):
            await at.fetch("http://slow.test:PORT/")


async def test_the_listener_is_reached_where_its_network_is_allowed() -> None:
    """The other tests would pass with a listener that counts nothing."""
    async with place(("127.0.0.0/8",)) as at:
        assert await at.fetch("http://127.0.0.1:PORT/") == b"a secret"
        assert at.forbidden.num_connections == 1


async def test_a_network_that_the_operator_denies_is_not_reached() -> None:
    async with place(("127.0.0.0/8",), ("127.0.0.1/32", "::1/128")) as at:
        await refused(at, "http://127.0.0.1:PORT/")
        await refused(at, "http://loopback.test:PORT/")
        assert at.forbidden.num_connections == 0
        assert await at.fetch("http://media.test:PORT/") == b"a medium"


async def test_the_environment_names_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with place() as at:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{at.forbidden.port}")
        assert await at.fetch("http://media.test:PORT/") == b"a medium"
        assert at.forbidden.num_connections == 0


async def test_what_is_asked_has_nothing_of_this_machine() -> None:
    async with place() as at:
        await at.fetch("http://media.test:PORT/")
        (asked,) = at.allowed.asked
        host = f"media.test:{at.allowed.port}"
        ours = {"accept": "*/*", "accept-encoding": "identity", "user-agent": "weft", "connection": "close"}
        assert asked.headers == ours | {"host": host}

"""Decides which URLs may be asked. `parse_url` is the only parser of URLs: it cuts a URL into the parts that the client
connects with, so no second parser can read the same text differently. `UrlPolicy` compares these parts with what the
operator allows.

The parser is strict, because a URL that needs tolerance is hardly one that a client means: it refuses user names,
backslashes, control characters, zone ids, percent-encoded hosts, trailing dots, and numbers in any form but four
decimal ones. The functions are pure. They know nothing of names' addresses, which `address_rules` judges.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import quote, urljoin

import idna

from fabric.contracts import UrlRefused
from router.fetch.fetch_settings import FetchSettings

MAX_URL_CHARS = 8192
"""Limits the length of a URL; servers and proxies commonly take 8 KiB."""
MAX_HOST_CHARS = 253
"""Limits the length of a name (RFC 1035)."""
SCHEME_TO_PORT = {"https": 443, "http": 80}
FILE = "file"
_FORM = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,31}):(?://([^/?#]*))?([^?#]*)(\?[^#]*)?(?:#.*)?")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_UNSAFE = re.compile(r"[\x00-\x20\x7f-\xa0\\\u1680\u2000-\u200f\u2028-\u202f\u205f-\u2064\u3000\ufeff\ufff9-\uffff]")
"""Finds control characters, spaces of all kinds, invisible characters and backslashes."""
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@%]+)(?::([0-9]{0,5}))?")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_URL_CHARS = "/%:@!$&'()*+,;=-._~?[]|^`{}\"<>"
"""Lists the characters that are not encoded in a path or a query: those that mean something, and those that a server
expects as the client wrote them."""


class FetchUrl(NamedTuple):
    """A `FetchUrl` is a URL in the parts with which it is asked."""

    scheme: str
    host: str
    """Holds a name in ASCII and lower case, or an address without brackets; it is empty for `file`."""
    port: int
    target: str
    """Holds the path and the query, in ASCII. For `file` it is the path, still percent-encoded."""

    @property
    def text(self) -> str:
        """Returns the URL in one form, for look-ups and as the base of redirects."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if SCHEME_TO_PORT.get(self.scheme, 0) == self.port else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.target}"

    @property
    def host_header(self) -> str:
        """Returns the value of the header `Host`."""
        return self.text.split("/", 3)[2]


def parse_url(text: str) -> FetchUrl:
    """Returns the parts of an absolute URL with the scheme `https`, `http` or `file`. Raises UrlRefused."""
    if len(text) > MAX_URL_CHARS:
        raise UrlRefused(f"the URL has {len(text)} characters, which is more than the limit of {MAX_URL_CHARS}")
    if _UNSAFE.search(text):
        raise UrlRefused("the URL has a space, a control character or a backslash in it; encode it with %")
    form = _FORM.fullmatch(text)
    if form is None:
        raise UrlRefused("the URL must be absolute, as in https://example.com/picture.png")
    scheme, authority, path, query = form[1].lower(), form[2], form[3], form[4] or ""
    if scheme == FILE:
        return _file_url(authority, path, query)
    if scheme not in SCHEME_TO_PORT:
        raise UrlRefused(f"the scheme of the URL is `{scheme}`, but media are fetched by https, http or file only")
    if not authority:
        raise UrlRefused("the URL names no host; it must look like https://example.com/picture.png")
    if "@" in authority:
        raise UrlRefused("the URL has a user name in it, which is not accepted")
    parts = _AUTHORITY.fullmatch(authority)
    if parts is None:
        raise UrlRefused("the host or the port of the URL is malformed")
    port = int(parts[2]) if parts[2] else SCHEME_TO_PORT[scheme]
    if not 1 <= port <= 65535:
        raise UrlRefused(f"the port of the URL is {port}, but it must be from 1 to 65535")
    return FetchUrl(scheme, _host(parts[1]), port, _encoded(path or "/") + _encoded(query))


def _file_url(authority: str | None, path: str, query: str) -> FetchUrl:
    if authority is None or authority or query or not path.startswith("/"):
        raise UrlRefused("a file: URL must have the form file:///path, without a host and a query")
    return FetchUrl(FILE, "", 0, path)


def _encoded(text: str) -> str:
    """Returns a part of a URL with its characters beyond ASCII percent-encoded as UTF-8. Raises UrlRefused."""
    try:
        return quote(text, safe=_URL_CHARS)
    except UnicodeEncodeError as error:
        raise UrlRefused("the URL has a character in it that is no valid Unicode") from error


def _host(text: str) -> str:
    """Returns the host in its one form. Raises UrlRefused for what is neither a name nor a plain address."""
    if text.startswith("["):
        if ":" not in text:
            raise UrlRefused("the host of the URL has brackets, but only an IPv6 address has these")
        return _address(text[1:-1])
    name = text.lower()
    if len(name) > MAX_HOST_CHARS:
        raise UrlRefused(f"the host of the URL has more than {MAX_HOST_CHARS} characters")
    if not name.isascii():
        try:
            name = idna.encode(name, strict=True).decode("ascii")
        except idna.IDNAError as error:
            raise UrlRefused("the host of the URL is no valid international name (IDNA 2008)") from error
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        return _address(name)
    if len(name) > MAX_HOST_CHARS or not all(_LABEL.fullmatch(label) for label in labels):
        raise UrlRefused("the host of the URL is no valid name")
    return name


def _address(text: str) -> str:
    """Returns an address in its one form. Resolvers take `127.1`, `0x7f.1` and `2130706433` for addresses too; here
    such a host is malformed. Raises UrlRefused."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as error:
        raise UrlRefused("the host of the URL is no valid address; write 203.0.113.7 or [2001:db8::7]") from error


def redirected(base: FetchUrl, location: str) -> FetchUrl:
    """Returns where a redirect from `base` leads. Raises UrlRefused if `location` is no URL that may be parsed. The
    library joins only what names no host, and only after the check, because it drops line breaks and repairs what is
    malformed."""
    if len(location) > MAX_URL_CHARS or _UNSAFE.search(location):
        raise UrlRefused("the URL redirects to a malformed one")
    if _SCHEME.match(location):
        return parse_url(location)
    if location.startswith("//"):
        return parse_url(f"{base.scheme}:{location}")
    return parse_url(urljoin(base.text, location))


def host_pattern(text: str) -> str:
    """Returns a pattern of hosts in the form in which hosts are compared: a name in lower case without a dot at its
    end, an address in its one form, `*.` and a name, or `*`. Raises ValueError for what no host can match: a denial
    without an effect would be taken for one."""
    below = text.removeprefix("*.")
    if text == "*":
        return text
    try:
        host = _host(f"[{below}]" if below.count(":") > 1 else below.removesuffix("."))
    except UrlRefused as error:
        raise ValueError(
            f"{text!r} matches no host: write example.com, *.example.com, 203.0.113.7 or 2001:db8::7"
        ) from (error)
    if below == text:
        return host
    if ":" in host or _NUMBER.fullmatch(host.rpartition(".")[2]):
        raise ValueError(f"{text!r} matches no host, because nothing lies below an address")
    return f"*.{host}"


class UrlPolicy:
    """A `UrlPolicy` is what the operator allows to be asked."""

    def __init__(self, settings: FetchSettings) -> None:
        """Raises ValueError for a pattern that no host can match."""
        self._schemes = frozenset(settings.schemes)
        self._ports = frozenset(settings.allowed_ports)
        self._allowed = tuple(map(host_pattern, settings.allowed_hosts))
        self._denied = tuple(map(host_pattern, settings.denied_hosts))

    def check(self, url: FetchUrl) -> None:
        """Raises UrlRefused if the URL's scheme, host or port is not allowed."""
        if url.scheme not in self._schemes:
            taken = ", ".join(f"{scheme}:" for scheme in sorted(self._schemes)) or "none"
            message = f"the scheme of the URL is {url.scheme}:, but this server fetches media by these only: {taken}"
            raise UrlRefused(message)
        if url.scheme == FILE:
            return
        if url.port not in self._ports:
            raise UrlRefused(f"the port of the URL is {url.port}, from which this server does not fetch")
        if not _matches(url.host, self._allowed) or _matches(url.host, self._denied):
            raise UrlRefused("the operator of this server does not allow media from the host of the URL")


def _matches(host: str, patterns: Iterable[str]) -> bool:
    return any(
        pattern in ("*", host) or (pattern.startswith("*.") and host.endswith(pattern[1:])) for pattern in patterns
    )

"""Tests the one parser of URLs and what an operator allows. `tests/contract/test_fetch_ssrf.py` tries to get around
both."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.contracts import UrlRefused
from router.fetch import FetchSettings, UrlPolicy, parse_url
from router.fetch.url_policy import FetchUrl, redirected

URLS = [
    ("https://example.com", FetchUrl("https", "example.com", 443, "/")),
    ("HTTPS://Example.COM:443/A?b=C#d", FetchUrl("https", "example.com", 443, "/A?b=C")),
    ("http://example.com:/a", FetchUrl("http", "example.com", 80, "/a")),
    ("http://example.com?a=1/2", FetchUrl("http", "example.com", 80, "/?a=1/2")),
    ("http://203.0.113.7:8080/%2e%2e/a", FetchUrl("http", "203.0.113.7", 8080, "/%2e%2e/a")),
    ("http://[2001:DB8::0:7]:81/", FetchUrl("http", "2001:db8::7", 81, "/")),
    ("https://bücher.example/ü ".strip(), FetchUrl("https", "xn--bcher-kva.example", 443, "/%C3%BC")),
    ("https://xn--bcher-kva.example/", FetchUrl("https", "xn--bcher-kva.example", 443, "/")),
    ("https://a_b.example-c.com/a:b@c", FetchUrl("https", "a_b.example-c.com", 443, "/a:b@c")),
    ("file:///srv/media/a%20b.png", FetchUrl("file", "", 0, "/srv/media/a%20b.png")),
]


@pytest.mark.parametrize(("text", "parts"), URLS)
def test_a_url_has_these_parts(text: str, parts: FetchUrl) -> None:
    assert parse_url(text) == parts


MALFORMED = [
    "https://[1.1.1.1]/",
    "https://[::1/",
    "https://[2606:4700::1%251]/",
    "https://1.1.1/",
    "https://1.1.1.1./",
    "https://1.1.1.01/",
    "https://1.1.1.256/",
    "https://1.1.1.1.1/",
    "https://16843009/",
    "https://example.0x1/",
    "https://example.com./",
    "https://example..com/",
    "https://exa mple.com/",
    "https://example.com\\/",
    "https://user:word@example.com/",
    "https://example.com:4 3/",
    "https://example.com:+443/",
    "https://example.com:0/",
    "https://example%2ecom/",
    "https://ｅxample.com/",
    "https://example。com/",
    "https:example.com",
    "https:/example.com",
    "https://",
    "//example.com",
    "example.com",
    "file://host/path",
    "file:path",
    "file:///path?query",
    "data:,x",
    "https://example.com/\ud800",
]


@pytest.mark.parametrize("text", MALFORMED, ids=ascii)
def test_what_needs_tolerance_is_refused(text: str) -> None:
    with pytest.raises(UrlRefused):
        parse_url(text)


def test_the_text_of_a_url_is_one_for_all_its_spellings() -> None:
    spellings = ["https://example.com", "HTTPS://EXAMPLE.com:443/", "https://example.com:/#x"]
    assert {parse_url(text).text for text in spellings} == {"https://example.com/"}
    assert parse_url("http://[::1]:81/a").text == "http://[::1]:81/a"
    assert parse_url("http://[::1]:81/a").host_header == "[::1]:81"
    assert parse_url("https://example.com:80/").host_header == "example.com:80"


@given(st.text(alphabet=st.sampled_from("htps:/\\@.[]#?%127ax0 \t\n１。:é-_"), max_size=40))
def test_what_is_parsed_is_read_alike_by_another_parser(tail: str) -> None:
    """Whatever the parser takes names the same host for the standard library, so no reader can be led elsewhere."""
    try:
        url = parse_url(f"http://{tail}")
    except UrlRefused:
        return
    other = urlsplit(url.text)
    assert other.hostname == url.host
    assert (other.port or 80) == url.port
    assert other.username is None
    assert url.host.isascii()
    assert url.target.isascii()
    assert not set(url.target + url.host) & set(" \t\r\n\\")
    assert parse_url(url.text) == url


REDIRECTS = [
    ("/b?c", "https://example.com/b?c"),
    ("b", "https://example.com/a/b"),
    ("../b", "https://example.com/b"),
    ("?c", "https://example.com/a/x?c"),
    ("//other.example/b", "https://other.example/b"),
    ("http://other.example:81/b", "http://other.example:81/b"),
]


@pytest.mark.parametrize(("location", "target"), REDIRECTS)
def test_a_redirect_leads_to(location: str, target: str) -> None:
    assert redirected(parse_url("https://example.com/a/x?y"), location).text == target


@pytest.mark.parametrize(
    "location", ["http:///b", "//", "/\tb", "/b\r\nx: y", "\\b", "mailto:a@b", "//u@h/", "a" * 9000]
)
def test_a_redirect_that_is_malformed_is_refused(location: str) -> None:
    with pytest.raises(UrlRefused):
        redirected(parse_url("https://example.com/a/x"), location)


def allows(url: str, **settings: object) -> bool:
    try:
        UrlPolicy(FetchSettings(**settings)).check(parse_url(url))
    except UrlRefused:
        return False
    return True


def test_https_on_two_ports_is_what_the_defaults_allow() -> None:
    assert allows("https://example.com/")
    assert allows("https://example.com:80/")
    assert not allows("http://example.com/")
    assert not allows("https://example.com:8443/")
    assert not allows("file:///a")
    assert allows("http://example.com:8080/", schemes=("http",), allowed_ports=(8080,))
    assert allows("file:///a", schemes=("file",))


@pytest.mark.parametrize(
    ("pattern", "hosts", "others"),
    [
        ("example.com", ["example.com", "EXAMPLE.com"], ["a.example.com", "badexample.com", "example.com.evil.com"]),
        ("*.Example.com", ["a.example.com", "a.b.example.com"], ["example.com", "badexample.com"]),
        ("*", ["example.com", "203.0.113.7"], []),
        ("203.0.113.7", ["203.0.113.7"], ["203.0.113.70"]),
        ("Example.com.", ["example.com"], ["a.example.com"]),
        ("*.example.com.", ["a.example.com"], ["example.com"]),
        ("2001:DB8:0::0:7", ["[2001:db8::7]", "[2001:db8:0:0:0:0:0:7]"], ["[2001:db8::70]"]),
    ],
)
def test_patterns_of_hosts(pattern: str, hosts: list[str], others: list[str]) -> None:
    for host in hosts:
        assert allows(f"https://{host}/", allowed_hosts=(pattern,))
        assert not allows(f"https://{host}/", denied_hosts=("x.test", pattern))
    for host in others:
        assert not allows(f"https://{host}/", allowed_hosts=(pattern,))
        assert allows(f"https://{host}/", denied_hosts=(pattern,))


@pytest.mark.parametrize(
    "pattern", ["", "example.com:443", "127.1", "1.2.3", "a..b", "..", "*.", "*.10.0.0.1", "*.2001:db8::7", "a.*.b"]
)
def test_a_pattern_that_no_host_matches_is_an_error(pattern: str) -> None:
    with pytest.raises(ValueError, match="matches no host"):
        UrlPolicy(FetchSettings(denied_hosts=(pattern,)))

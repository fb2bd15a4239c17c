"""Tests what the cache of fetched files keeps, for how long, and what it gives up."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fetch.fetch_cache import MAX_FRESH_S, CacheTerms, FetchCache, UrlKey, cache_terms

KEEP = CacheTerms(True, 60.0, "", "")


def key(url: str, salt: str = "") -> UrlKey:
    return UrlKey(salt, url)


@pytest.mark.parametrize(
    ("headers", "terms"),
    [
        ({}, CacheTerms(True, 0.0, "", "")),
        ({"cache-control": "max-age=60"}, KEEP),
        ({"cache-control": 'Public, Max-Age="60"'}, KEEP),
        ({"cache-control": "max-age=60", "age": "45"}, CacheTerms(True, 15.0, "", "")),
        ({"cache-control": "max-age=60", "age": "90"}, CacheTerms(True, 0.0, "", "")),
        ({"cache-control": "max-age=-5"}, CacheTerms(True, 0.0, "", "")),
        ({"cache-control": "max-age=1e9"}, CacheTerms(True, 0.0, "", "")),
        ({"cache-control": "max-age=99999999"}, CacheTerms(True, MAX_FRESH_S, "", "")),
        ({"cache-control": "s-maxage=60"}, CacheTerms(True, 0.0, "", "")),
        ({"cache-control": "no-cache, max-age=60", "etag": '"a"'}, CacheTerms(True, 0.0, '"a"', "")),
        ({"cache-control": "max-age=60, no-store"}, CacheTerms(False, 60.0, "", "")),
        ({"cache-control": "max-age=60", "vary": "Accept-Encoding"}, KEEP),
        ({"cache-control": "max-age=60", "vary": "Cookie"}, CacheTerms(False, 60.0, "", "")),
        ({"cache-control": "max-age=60", "vary": "*"}, CacheTerms(False, 60.0, "", "")),
        ({"last-modified": "Mon"}, CacheTerms(True, 0.0, "", "Mon")),
    ],
)
def test_headers_say_what_may_be_kept(headers: Mapping[str, str], terms: CacheTerms) -> None:
    assert cache_terms(headers) == terms


def test_what_can_not_be_used_again_is_not_kept() -> None:
    cache: FetchCache[str] = FetchCache(100)
    for terms in (cache_terms({}), KEEP._replace(may_keep=False)):
        assert cache.put(key("a"), b"1", "file", 10, terms, 0.0) == ["file"]
        assert cache.find(key("a")) is None
    assert cache.put(key("a"), b"1", "large", 101, KEEP, 0.0) == ["large"]
    assert cache.num_bytes == 0


def test_a_file_is_fresh_until_its_time_and_then_asked_for_with_its_validators() -> None:
    cache: FetchCache[str] = FetchCache(100)
    terms = CacheTerms(True, 60.0, '"a"', "Mon")
    assert cache.put(key("a"), b"1", "file", 10, terms, 100.0) == []
    found = cache.find(key("a"))
    assert found is not None
    assert (found.file, found.fresh_until_s) == ("file", 160.0)
    assert found.validators() == {"if-none-match": '"a"', "if-modified-since": "Mon"}
    cache.revalidated(key("a"), CacheTerms(True, 30.0, "", "Tue"), 200.0)
    assert found.fresh_until_s == 230.0
    assert found.validators() == {"if-none-match": '"a"', "if-modified-since": "Tue"}


def test_tenants_do_not_see_each_others_urls_and_share_content() -> None:
    cache: FetchCache[str] = FetchCache(100)
    assert cache.put(key("a", "one"), b"1", "file", 60, KEEP, 0.0) == []
    assert cache.find(key("a", "two")) is None
    assert cache.put(key("a", "two"), b"1", "same", 60, KEEP, 0.0) == ["same"]
    assert cache.num_bytes == 60
    assert cache.put(key("a", "one"), b"2", "new", 30, KEEP, 0.0) == []
    assert cache.num_bytes == 90
    assert sorted(cache.clear()) == ["file", "new"]


def test_the_url_that_was_not_used_for_longest_is_given_up() -> None:
    cache: FetchCache[str] = FetchCache(100, max_files=3)
    for name in "abc":
        assert cache.put(key(name), name.encode(), name, 30, KEEP, 0.0) == []
    cache.find(key("a"))
    assert cache.put(key("d"), b"d", "d", 10, KEEP, 0.0) == ["b"]
    assert cache.put(key("e"), b"e", "e", 90, KEEP, 0.0) == ["c", "a"]


Step = tuple[str, str, int, bool]


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from("xyz"), st.integers(1, 60), st.booleans()), max_size=40
    )
)
def test_every_file_is_given_up_once_and_the_budget_holds(steps: list[Step]) -> None:
    cache: FetchCache[int] = FetchCache(100, max_files=4)
    content_to_bytes: dict[str, int] = {}
    dropped: list[int] = []
    for number, (url, content, num_bytes, may_keep) in enumerate(steps):
        size = content_to_bytes.setdefault(content, num_bytes)
        terms = KEEP._replace(may_keep=may_keep)
        dropped += cache.put(key(url), content.encode(), number, size, terms, 0.0)
        found = cache.find(key(url))
        assert (found is not None) == may_keep
        if found is not None:
            assert found.digest == content.encode()
            assert found.file not in dropped
        assert cache.num_bytes <= 100
        assert len(cache) <= 4
    dropped += cache.clear()
    assert sorted(dropped) == list(range(len(steps)))
    assert (cache.num_bytes, len(cache)) == (0, 0)

"""Keeps fetched files for later requests: it knows when a file of a URL is still fresh, with which validators it can be
asked for again, and which files to give up when the budget is full.

URLs are looked up within a salt, so that no tenant learns from the time of an answer what another has fetched. Files
are kept by their content: two URLs with the same file share it. The module is pure; the clock is passed in, and the
files themselves are objects of which it knows only the size. It follows RFC 9111 for a private cache, with less:
nothing is fresh by guesswork, and a response that varies by anything is not kept.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

F = TypeVar("F")

MAX_FRESH_S = 24 * 3600.0
"""Limits how long a file is used without asking its server, whatever that has said."""
MAX_FILES = 512
"""Limits the URLs that are known; each may hold a file descriptor."""


class CacheTerms(NamedTuple):
    """A `CacheTerms` holds what a response says about being kept."""

    may_keep: bool
    fresh_s: float
    """The file may be used for this many seconds without asking again."""
    etag: str
    last_modified: str

    @property
    def is_worth_keeping(self) -> bool:
        """Tells whether the file could ever be used again."""
        return self.may_keep and bool(self.fresh_s or self.etag or self.last_modified)


def cache_terms(headers: Mapping[str, str]) -> CacheTerms:
    """Reads the terms from the headers of a response, whose names are in lower case."""
    directives: dict[str, str] = {}
    for each in headers.get("cache-control", "").split(","):
        name, _, value = each.strip().partition("=")
        directives[name.strip().lower()] = value.strip().strip('"')
    varies = bool(headers.get("vary", "").strip().lower().replace("accept-encoding", "").strip(", "))
    fresh_s = 0.0
    if "no-cache" not in directives:
        fresh_s = max(0.0, _seconds(directives.get("max-age", "")) - _seconds(headers.get("age", "")))
    return CacheTerms(
        may_keep="no-store" not in directives and not varies,
        fresh_s=min(MAX_FRESH_S, fresh_s),
        etag=headers.get("etag", ""),
        last_modified=headers.get("last-modified", ""),
    )


def _seconds(text: str) -> float:
    """Returns a number of seconds, or 0 for what is none."""
    return float(text) if text.isascii() and text.isdigit() and len(text) <= 12 else 0.0


class UrlKey(NamedTuple):
    salt: str
    url: str


@dataclass(slots=True)
class CachedFile(Generic[F]):
    """A `CachedFile` is what is known of one URL."""

    digest: bytes
    file: F
    terms: CacheTerms
    fresh_until_s: float

    def validators(self) -> dict[str, str]:
        """Returns the headers of a request that asks whether the file has changed; none if it can't be asked."""
        names = {"if-none-match": self.terms.etag, "if-modified-since": self.terms.last_modified}
        return {name: value for name, value in names.items() if value}


class FetchCache(Generic[F]):
    """A `FetchCache` holds files of at most `max_bytes` bytes together. The caller closes the files that `put` returns
    as given up."""

    def __init__(self, max_bytes: int, max_files: int = MAX_FILES) -> None:
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._entries: OrderedDict[UrlKey, CachedFile[F]] = OrderedDict()
        """Holds the URL that was used last at its end."""
        self._digest_to_file: dict[bytes, tuple[F, int]] = {}
        self._num_urls: Counter[bytes] = Counter()
        """Counts the URLs of each content."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: UrlKey) -> CachedFile[F] | None:
        """Returns what is known of a URL, fresh or not, and notes its use."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: UrlKey, digest: bytes, file: F, num_bytes: int, terms: CacheTerms, now: float) -> list[F]:
        """Keeps a file of a URL in place of the one before, if its terms and its size allow that. If the content is
        known, the file that is already there stays, and `file` is given up. Returns the files that were given up."""
        dropped = self._remove(key)
        if not terms.is_worth_keeping or num_bytes > self._max_bytes:
            return [*dropped, file]
        known = self._digest_to_file.get(digest)
        if known is None:
            self._digest_to_file[digest] = file, num_bytes
            self.num_bytes += num_bytes
        else:
            dropped.append(file)
        self._num_urls[digest] += 1
        self._entries[key] = CachedFile(digest, self._digest_to_file[digest][0], terms, now + terms.fresh_s)
        while self.num_bytes > self._max_bytes or len(self._entries) > self._max_files:
            dropped += self._remove(next(iter(self._entries)))
        return dropped

    def revalidated(self, key: UrlKey, terms: CacheTerms, now: float) -> None:
        """Notes that the server of a URL has confirmed its file (304). The validators stay if the response has none."""
        entry = self._entries.get(key)
        if entry is not None:
            before = entry.terms
            entry.terms = terms._replace(
                etag=terms.etag or before.etag, last_modified=terms.last_modified or before.last_modified
            )
            entry.fresh_until_s = now + terms.fresh_s

    def clear(self) -> list[F]:
        """Gives up everything, and returns the files."""
        return [file for key in list(self._entries) for file in self._remove(key)]

    def _remove(self, key: UrlKey) -> list[F]:
        entry = self._entries.pop(key, None)
        if entry is None:
            return []
        self._num_urls[entry.digest] -= 1
        if self._num_urls[entry.digest]:
            return []
        del self._num_urls[entry.digest]
        file, num_bytes = self._digest_to_file.pop(entry.digest)
        self.num_bytes -= num_bytes
        return [file]

"""Fetches media in the router's own event loop, for systems without the sockets that the fetch process needs, and for
tests. Nothing limits the memory of what parses the answers but the router's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fabric.contracts import NoCapacity
from modalities.probing import shipped_registry
from modalities.registry import Registry
from router.fetch.fetch_process import FetchedFile
from router.fetch.fetch_settings import FetchSettings
from router.fetch.pinned_network import NameResolver, SystemResolver
from router.fetch.url_fetcher import UrlFetcher, WantedMedium
from router.fetch.url_policy import UrlPolicy, parse_url


class LoopFetcher:
    """A `LoopFetcher` is a `MediaFetcher` without a process."""

    def __init__(
        self,
        settings: FetchSettings,
        make_resolver: Callable[[], NameResolver] = SystemResolver,
        registry: Callable[[], Registry] = shipped_registry,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._policy = UrlPolicy(settings)
        self._make_resolver = make_resolver
        self._registry = registry
        self._now = now
        self.fetcher: UrlFetcher | None = None

    async def start(self) -> None:
        if self.fetcher is None:
            self.fetcher = UrlFetcher(self._settings, self._make_resolver(), self._registry(), self._now)

    async def close(self) -> None:
        if self.fetcher is not None:
            await self.fetcher.close()

    def check(self, url: str) -> None:
        self._policy.check(parse_url(url))

    async def fetch(self, wanted: WantedMedium, take: Callable[[int], None]) -> FetchedFile:
        if self.fetcher is None:
            raise NoCapacity("fetching was not started")
        held = await self.fetcher.fetch(wanted)
        try:
            take(held.file.num_bytes)
            return FetchedFile(held.file.read(), held.file.digest, held.is_cached, held.header)
        finally:
            held.close()

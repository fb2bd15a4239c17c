"""Fetches the media that a request names by URL: `UrlMedia` finds these parts, refuses what may not be asked before
anything is fetched, and then fetches all of them at once.

The module knows neither HTTP nor formats of files. What a URL may be is known to `router.fetch`, and what its file is,
the plugin of the part says when it reads the header.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

from fabric.contracts import InvalidRequest, RequestRefused, UrlRefused, WeftError
from modalities.media import part_url
from router.api import MediaPart
from router.fetch import SHARED_TENANT, FetchedFile, MediaFetcher, WantedMedium

URL_SUFFIX = "_url"
"""Ends the part types that hold a URL, in the field of the same name: `image_url`, `video_url`, `audio_url`, and those
of packages."""
DATA = "data:"


class FetchAccount(Protocol):
    """A `FetchAccount` is told what is fetched for one request."""

    @property
    def tenant(self) -> str:
        """Returns the tenant that sent the request, whose share of the fetcher it takes; `SHARED_TENANT` if clients
        have no keys."""
        ...

    def take(self, num_bytes: int) -> None:
        """Counts bytes before they are taken into the router's memory. Raises Overloaded if there is no room."""
        ...

    def now(self) -> float:
        """Returns the time on the clock of the request's trace."""
        ...

    def ended(self, part: str, began_s: float, file: FetchedFile | None, code: str) -> None:
        """Notes that a fetch that began at `began_s` has ended, with a file (`ok`) or with the code of an error."""
        ...


class Unaccounted:
    """An `Unaccounted` is a `FetchAccount` that counts nothing."""

    tenant = SHARED_TENANT

    def take(self, num_bytes: int) -> None:
        return

    def now(self) -> float:
        return 0.0

    def ended(self, part: str, began_s: float, file: FetchedFile | None, code: str) -> None:
        return


UNACCOUNTED = Unaccounted()


class UrlMedia:
    """A `UrlMedia` belongs to one router. Without a fetcher it finds no URL, so the plugin of a part refuses what is no
    `data:` URL."""

    def __init__(self, fetcher: MediaFetcher | None = None) -> None:
        self._fetcher = fetcher
        self._numbers = itertools.count(1)

    async def start(self) -> None:
        """Makes ready to fetch. Raises NoCapacity."""
        if self._fetcher is not None:
            await self._fetcher.start()

    async def close(self) -> None:
        """Ends all fetches."""
        if self._fetcher is not None:
            await self._fetcher.close()

    def find(self, parts: Sequence[MediaPart]) -> dict[str, str]:
        """Maps the parts (by their place in the request) that must be fetched to their URLs. Raises UrlRefused, naming
        the first part at fault."""
        urls: dict[str, str] = {}
        for part in parts if self._fetcher is not None else ():
            if not part.part_type.endswith(URL_SUFFIX):
                continue
            try:
                url = part_url(part.fields, part.part_type, part.param)
            except InvalidRequest:
                continue  # The plugin says what is wrong with the part.
            if url[: len(DATA)].lower() == DATA:
                continue
            urls[part.param] = url
            assert self._fetcher is not None
            try:
                self._fetcher.check(url)
            except UrlRefused as error:
                raise _of_part(error, part.param) from error
        return urls

    async def fetch(
        self, urls: Mapping[str, str], modalities: Mapping[str, str], salt: str, account: FetchAccount
    ) -> dict[str, FetchedFile]:
        """Fetches the URLs of one request, and maps their parts to the files. `modalities` says what each part is to
        be. The first failure ends the other fetches. Raises UrlRefused, MediaUnreachable or InvalidMedia, naming the
        part, and Busy or Unavailable."""
        if not urls:
            return {}
        request = next(self._numbers)
        tasks = [
            asyncio.create_task(
                self._fetch(part, WantedMedium(url, salt, request, modalities[part], account.tenant), account),
                name=f"fetch of {part}",
            )
            for part, url in urls.items()
        ]
        try:
            files = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return dict(zip(urls, files, strict=True))

    async def _fetch(self, part: str, wanted: WantedMedium, account: FetchAccount) -> FetchedFile:
        assert self._fetcher is not None
        began_s = account.now()
        try:
            file = await self._fetcher.fetch(wanted, account.take)
        except WeftError as error:
            account.ended(part, began_s, None, error.code)
            if isinstance(error, RequestRefused):
                raise _of_part(error, part) from error
            raise
        account.ended(part, began_s, file, "ok")
        return file


def _of_part(error: RequestRefused, part: str) -> RequestRefused:
    """Returns the error with the part that it is about."""
    return type(error)(f"{part}: {error.message}", param=part)

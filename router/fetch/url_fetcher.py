"""Runs the fetches of many requests in one event loop: `UrlFetcher` gives them places and memory, and lets requests
that want the same URL at the same time share one fetch.

A fetch is cancelled when the last request that waits for it is. Requests share a fetch only within a salt, as they
share the cache. The module knows nothing of processes (`fetch_process`), and nothing of what the files are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

from fabric.contracts import InvalidMedia, MachineBusy, MediaUnreachable, Overloaded, WeftError
from modalities.family import ImageHeader
from modalities.registry import Registry
from router.fetch.fair_shares import SHARED_TENANT, FairShares, Party
from router.fetch.fair_turns import FairTurns
from router.fetch.fetch_budget import ByteAllowance, FetchBudget
from router.fetch.fetch_cache import FetchCache, UrlKey
from router.fetch.fetch_settings import MIB, FetchSettings
from router.fetch.fetching import FetchedMedium, MediumClient, ServerGone
from router.fetch.first_look import FirstLook, MediaJudge
from router.fetch.pinned_network import NameResolver
from router.fetch.stored_file import StoredFile
from router.fetch.url_policy import FetchUrl

_LOG = logging.getLogger(__name__)
FULL = "the media that this server is fetching take all the memory that they may have"
MEMORY_GREED = 2
"""A party may have twice the memory that remains free, so that a file of half of all memory gets its turn while small
ones come and go."""
FIRST_BYTES = MIB
"""A file of unknown size takes this much of the budget first, and twice as much each time that it outgrows it."""
PROCESSOR_S = 2.0
PROCESSOR_S_PER_BYTE = 0.1 / MIB
"""A fetch may use this much processor time, and this much more for each byte of the file that has arrived: some ten
times what a server of files makes it use."""


class WantedMedium(NamedTuple):
    """A `WantedMedium` says what is fetched, and for which request."""

    url: str
    salt: str = ""
    """Requests with the same salt share fetches and files."""
    request: int = 0
    """This is the number of the request, whose fetches that are open together share what one request may fetch."""
    modality: str = ""
    """Names what the medium is to be; of an unknown modality nothing is judged."""
    tenant: str = SHARED_TENANT
    """Names the tenant whose share of places and memory the fetch takes."""


class HeldFile:
    """A `HeldFile` is a fetched file of one request, with the memory that it takes of the budget, until `close`."""

    def __init__(
        self, file: StoredFile, is_cached: bool, header: ImageHeader | None, give_back: Callable[[], None]
    ) -> None:
        self.file = file
        self.is_cached = is_cached
        self.header = header
        """This is the header of an ordinary picture; other headers are still to be read."""
        self._at_close = [give_back]

    def on_close(self, call: Callable[[], None]) -> None:
        """Has `call` called when the file is closed."""
        self._at_close.append(call)

    def close(self) -> None:
        """Gives the file and its memory back. Idempotent."""
        self.file.close()
        while self._at_close:
            self._at_close.pop()()


class UrlFetcher:
    """A `UrlFetcher` belongs to one event loop. `now` is the clock of the cache, in seconds."""

    def __init__(
        self, settings: FetchSettings, resolver: NameResolver, registry: Registry, now: Callable[[], float]
    ) -> None:
        """Raises OSError or ssl.SSLError if the file of certificates can't be read."""
        self._settings = settings
        self._resolver = resolver
        self._cache: FetchCache[StoredFile] = FetchCache(settings.cache_bytes)
        self._client = MediumClient(settings, resolver, self._cache, now)
        self._judge = MediaJudge(registry, settings.media_limits)
        quantum = min(FIRST_BYTES, settings.in_flight_bytes // 64)
        memory = FairShares(settings.in_flight_bytes, quantum, settings.max_concurrent, MEMORY_GREED)
        self._budget = FetchBudget(memory, FULL)
        places = FairShares(settings.max_concurrent, 1, settings.max_waiting)
        self._places = FetchBudget(places, f"no place for fetching the medium was free within {settings.wait_s:g} s")
        self._turns = FairTurns()
        self._shared: dict[tuple[UrlKey, str], _SharedFetch] = {}
        self._requests: dict[int, _OpenRequest] = {}

    @property
    def num_bytes(self) -> int:
        """Counts the bytes that fetches hold now, without the cache."""
        return self._budget.used

    @property
    def num_fetches(self) -> int:
        return len(self._shared)

    async def fetch(self, wanted: WantedMedium) -> HeldFile:
        """Fetches a medium. The caller closes the file. Raises UrlRefused, MediaUnreachable, InvalidMedia if it is too
        large or will be refused, Overloaded, and MachineBusy if other fetches have kept it back for too long."""
        url = self._client.parse(wanted.url)
        request = wanted.request
        key = UrlKey(wanted.salt, url.text), wanted.modality
        shared = self._shared.get(key)
        if shared is None or shared.is_over:
            party = Party(wanted.tenant, url.host)
            most, look = self._judge.max_bytes(wanted.modality), self._judge.first_look(wanted.modality)
            shared = self._shared[key] = _SharedFetch(party, self._budget, self._settings.wait_s, most, look)
            shared.task = asyncio.create_task(self._run(key, url, shared), name="fetch")
        opened = self._requests.setdefault(request, _OpenRequest(ByteAllowance(self._settings.max_request_bytes)))
        opened.num_open += 1
        held: HeldFile | None = None
        try:
            held = await shared.join(opened.allowance)
            held.on_close(lambda: self._closed(request))
            return held
        finally:
            if held is None:
                self._closed(request)

    def _closed(self, request: int) -> None:
        opened = self._requests[request]
        opened.num_open -= 1
        if not opened.num_open:
            del self._requests[request]

    async def close(self) -> None:
        """Ends all fetches, whose requests fail, and drops the cache."""
        tasks = [shared.task for shared in self._shared.values() if shared.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()
        self._resolver.close()
        for file in self._cache.clear():
            file.close()

    async def _run(self, key: tuple[UrlKey, str], url: FetchUrl, shared: _SharedFetch) -> None:
        """Fetches a URL, and ends the shared fetch with the medium or with an error."""
        limit_s = self._settings.total_timeout_s
        fetch = self._turns.fetch(shared.party, lambda: self._take(key, url, shared), shared.processor_allowed_s)
        try:
            async with self._place(shared.party), asyncio.timeout(limit_s):
                medium = await fetch
        except (TimeoutError, ServerGone) as error:
            words = str(error) or f"fetching the URL took more than {limit_s:g} s"
            if fetch.was_kept_back:
                shared.fail(MachineBusy(f"{words}, while this server was busy with other media", retry_after_s=1.0))
            else:
                shared.fail(MediaUnreachable(words))
        except WeftError as error:
            shared.fail(error)
        except Exception as error:
            # This is the top of a fetch's task; requests wait for its end.
            _LOG.exception("a medium could not be fetched")
            shared.fail(WeftError(f"an internal error occurred ({type(error).__name__})"))
        else:
            shared.succeed(medium)
        finally:
            if self._shared.get(key) is shared:
                del self._shared[key]
            shared.fail(Overloaded("the fetch was stopped"))

    async def _take(self, key: tuple[UrlKey, str], url: FetchUrl, shared: _SharedFetch) -> FetchedMedium:
        medium = await self._client.fetch(url, key[0].salt, shared)
        shared.header = await self._header(key[1], medium)
        return medium

    async def _header(self, modality: str, medium: FetchedMedium) -> ImageHeader | None:
        """Returns the header of an ordinary picture, or None. Closes the file if that fails."""
        is_read = False
        try:
            header = await self._judge.header(modality, medium.file)
            is_read = True
            return header
        finally:
            if not is_read:
                medium.file.close()

    @asynccontextmanager
    async def _place(self, party: Party) -> AsyncIterator[None]:
        """Holds one of the places. Raises Overloaded if none becomes free in time."""
        number = await self._places.take(party, 1, self._settings.wait_s)
        try:
            yield
        finally:
            self._places.give_back(number)


@dataclass(slots=True)
class _OpenRequest:
    """An `_OpenRequest` has fetches that were not closed."""

    allowance: ByteAllowance
    num_open: int = 0


class _Listener:
    """A `_Listener` is a request that waits for a shared fetch."""

    def __init__(self, allowance: ByteAllowance) -> None:
        self._allowance = allowance
        self._num_bytes = 0
        self.landed: asyncio.Future[HeldFile] = asyncio.get_running_loop().create_future()

    def charge(self, num_bytes: int) -> None:
        """Counts the bytes that the file has now. Raises InvalidMedia."""
        if num_bytes > self._num_bytes:
            self._allowance.take(num_bytes - self._num_bytes)
            self._num_bytes = num_bytes


class _SharedFetch:
    """A `_SharedFetch` is one fetch and the requests that wait for it (it is their `GrowingFile`)."""

    def __init__(self, party: Party, budget: FetchBudget, wait_s: float, max_bytes: int, look: FirstLook) -> None:
        """`max_bytes` limits the file, and `wait_s` the wait for memory."""
        self.party = party
        self.header: ImageHeader | None = None
        self.task: asyncio.Task[None] | None = None
        self.is_over = False
        """This is True when no further request may join."""
        self._budget = budget
        self._wait_s = wait_s
        self._max_bytes = max_bytes
        self._look = look
        self._listeners: list[_Listener] = []
        self._num_bytes = 0
        """This is the size of the file as far as it is known."""
        self._num_arrived = 0
        self._number: int | None = None
        """This is the number of what the fetch holds of the budget."""
        self._reserved = 0
        self._num_holders = 0
        """Counts the requests that have the file and have not given it back."""

    async def join(self, allowance: ByteAllowance) -> HeldFile:
        """Waits for the file. Cancelling the last request that waits cancels the fetch."""
        listener = _Listener(allowance)
        listener.charge(self._num_bytes)
        self._listeners.append(listener)
        try:
            return await listener.landed
        except asyncio.CancelledError:
            if listener.landed.done() and not listener.landed.cancelled() and listener.landed.exception() is None:
                listener.landed.result().close()
            raise
        finally:
            self._leave(listener)

    def _leave(self, listener: _Listener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)
            if not self._listeners and self.task is not None:
                self.is_over = True
                self.task.cancel()

    # ------------------------------------------------------------ the file grows

    async def announce(self, num_bytes: int | None) -> None:
        if num_bytes is not None:
            self._charge(num_bytes)
        wanted = FIRST_BYTES if num_bytes is None else num_bytes
        self._number = await self._budget.take(self.party, wanted, self._wait_s)
        self._reserved = wanted

    def grow(self, num_bytes: int) -> None:
        self._charge(num_bytes)
        if self._number is not None and num_bytes > self._reserved:
            more = min(max(num_bytes, 2 * self._reserved), max(num_bytes, self._max_bytes))
            self._budget.take_more(self._number, more - self._reserved)
            self._reserved = more

    def see(self, piece: bytes) -> None:
        self._num_arrived += len(piece)
        self._look.see(piece)

    def processor_allowed_s(self) -> float:
        """Returns how much processor time the fetch may have used by now."""
        return PROCESSOR_S + PROCESSOR_S_PER_BYTE * self._num_arrived

    def see_whole(self, file: StoredFile) -> None:
        self._look.see(file.read_head(self._look.num_wanted))
        self._look.end()

    def end(self) -> None:
        self._look.end()

    def _charge(self, num_bytes: int) -> None:
        """Counts the bytes for every request that waits; one that may not have so many fails alone. Raises InvalidMedia
        if the file is too large for every request."""
        most = self._max_bytes
        if num_bytes > most:
            self.is_over = True
            raise InvalidMedia(f"the file behind the URL has more bytes than the limit of {most}")
        self._num_bytes = max(self._num_bytes, num_bytes)
        failure: InvalidMedia | None = None
        for listener in list(self._listeners):
            try:
                listener.charge(num_bytes)
            except InvalidMedia as error:
                failure = error
                self._listeners.remove(listener)
                if not listener.landed.done():
                    listener.landed.set_exception(error)
        if failure is not None and not self._listeners:
            self.is_over = True
            raise failure

    # ------------------------------------------------------------ the end

    def succeed(self, medium: FetchedMedium) -> None:
        """Gives the file to every request that waits."""
        self.is_over = True
        listeners, self._listeners = self._listeners, []
        waiting = [listener for listener in listeners if not listener.landed.done()]
        self._num_holders = len(waiting)
        for listener in waiting:
            listener.landed.set_result(HeldFile(medium.file.share(), medium.is_cached, self.header, self._given_back))
        medium.file.close()
        if not waiting:
            self._release()

    def fail(self, error: WeftError) -> None:
        """Gives an error to the requests that still wait. It has no effect after the fetch has succeeded."""
        self.is_over = True
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            if not listener.landed.done():
                listener.landed.set_exception(type(error)(error.message, retry_after_s=error.retry_after_s))
        if not self._num_holders:
            self._release()

    def _given_back(self) -> None:
        self._num_holders -= 1
        if not self._num_holders:
            self._release()

    def _release(self) -> None:
        if self._number is not None:
            self._budget.give_back(self._number)
            self._number = None

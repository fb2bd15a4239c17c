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

from fabric.contracts import InvalidMedia, MediaUnreachable, Overloaded, WeftError
from router.fetch.fetch_budget import ByteAllowance, FetchBudget
from router.fetch.fetch_cache import FetchCache, UrlKey
from router.fetch.fetch_settings import MIB, FetchSettings
from router.fetch.fetching import FetchedMedium, MediumClient
from router.fetch.pinned_network import NameResolver
from router.fetch.stored_file import StoredFile
from router.fetch.url_policy import FetchUrl

_LOG = logging.getLogger(__name__)
FIRST_BYTES = MIB
"""A file of unknown size takes this much of the budget first, and twice as much each time that it outgrows it."""


class HeldFile:
    """A `HeldFile` is a fetched file of one request, with the memory that it takes of the budget, until `close`."""

    def __init__(self, file: StoredFile, is_cached: bool, give_back: Callable[[], None]) -> None:
        self.file = file
        self.is_cached = is_cached
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

    def __init__(self, settings: FetchSettings, resolver: NameResolver, now: Callable[[], float]) -> None:
        """Raises OSError or ssl.SSLError if the file of certificates can't be read."""
        self._settings = settings
        self._resolver = resolver
        self._cache: FetchCache[StoredFile] = FetchCache(settings.cache_bytes)
        self._client = MediumClient(settings, resolver, self._cache, now)
        self._budget = FetchBudget(settings.in_flight_bytes)
        self._places = asyncio.Semaphore(settings.max_concurrent)
        self._shared: dict[UrlKey, _SharedFetch] = {}
        self._requests: dict[int, _OpenRequest] = {}

    @property
    def num_bytes(self) -> int:
        """Counts the bytes that fetches hold now, without the cache."""
        return self._budget.used

    @property
    def num_fetches(self) -> int:
        return len(self._shared)

    async def fetch(self, text: str, salt: str, request: int) -> HeldFile:
        """Fetches a URL for a request. The fetches of the same `request` that are open together share what one request
        may fetch. The caller closes the file. Raises UrlRefused, MediaUnreachable, InvalidMedia if it is too large, and
        Overloaded."""
        url = self._client.parse(text)
        key = UrlKey(salt, url.text)
        shared = self._shared.get(key)
        if shared is None or shared.is_over:
            shared = self._shared[key] = _SharedFetch(self._budget, self._settings)
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

    async def _run(self, key: UrlKey, url: FetchUrl, shared: _SharedFetch) -> None:
        """Fetches a URL, and ends the shared fetch with the medium or with an error."""
        settings = self._settings
        try:
            async with self._place(), asyncio.timeout(settings.total_timeout_s):
                medium = await self._client.fetch(url, key.salt, shared)
        except TimeoutError:
            shared.fail(MediaUnreachable(f"fetching the URL took more than {settings.total_timeout_s:g} s"))
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

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Holds one of the places. Raises Overloaded if none becomes free in time."""
        try:
            async with asyncio.timeout(self._settings.wait_s):
                await self._places.acquire()
        except TimeoutError as error:
            message = f"every place for fetching media was taken for {self._settings.wait_s:g} s"
            raise Overloaded(message, retry_after_s=self._settings.wait_s) from error
        try:
            yield
        finally:
            self._places.release()


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

    def __init__(self, budget: FetchBudget, settings: FetchSettings) -> None:
        self.task: asyncio.Task[None] | None = None
        self.is_over = False
        """This is True when no further request may join."""
        self._budget = budget
        self._settings = settings
        self._listeners: list[_Listener] = []
        self._num_bytes = 0
        """This is the size of the file as far as it is known."""
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
        await self._budget.take(wanted, self._settings.wait_s)
        self._reserved = wanted

    def grow(self, num_bytes: int) -> None:
        self._charge(num_bytes)
        if self._reserved and num_bytes > self._reserved:
            more = min(max(num_bytes, 2 * self._reserved), max(num_bytes, self._settings.max_item_bytes))
            self._budget.take_now(more - self._reserved)
            self._reserved = more

    def _charge(self, num_bytes: int) -> None:
        """Counts the bytes for every request that waits; one that may not have so many fails alone. Raises InvalidMedia
        if the file is too large for every request."""
        most = self._settings.max_item_bytes
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
            listener.landed.set_result(HeldFile(medium.file.share(), medium.is_cached, self._given_back))
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
        self._budget.give_back(self._reserved)
        self._reserved = 0

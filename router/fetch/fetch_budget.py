"""Counts the bytes that fetching takes: `FetchBudget` limits what all fetches hold at once, and `ByteAllowance` limits
what one request fetches.

A fetch whose size is known waits for its whole size before it reads on, in the order of arrival. One whose size is
unknown takes more as it grows, and fails as overloaded where it would have to wait: fetches that hold a part and wait
for the rest would otherwise wait for each other. The module knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from fabric.contracts import InvalidMedia, Overloaded

FULL = "the media that this server is fetching take all the memory that they may have"


class FetchBudget:
    """A `FetchBudget` belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, num_bytes: int, timeout_s: float) -> None:
        """Takes bytes, and waits for them if need be. Raises Overloaded if they are not free within the time."""
        if not self._waiting and self._fits(num_bytes):
            self.used += num_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (num_bytes, turn)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.done() and not turn.cancelled():
                self.give_back(num_bytes)
            else:
                with contextlib.suppress(ValueError):  # `_let_in` may have already removed it.
                    self._waiting.remove(entry)
                self._let_in()
            if isinstance(error, TimeoutError):
                raise Overloaded(FULL) from error
            raise

    def take_now(self, num_bytes: int) -> None:
        """Takes bytes. Raises Overloaded if they are not free."""
        if self._waiting or not self._fits(num_bytes):
            raise Overloaded(FULL)
        self.used += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.used -= num_bytes
        self._let_in()

    def _fits(self, num_bytes: int) -> bool:
        """Tells whether so many bytes are free; what is larger than the whole budget may be there alone."""
        return self.used + num_bytes <= self.limit or not self.used

    def _let_in(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            num_bytes, turn = self._waiting.popleft()
            if not turn.done():
                self.used += num_bytes
                turn.set_result(None)


class ByteAllowance:
    """A `ByteAllowance` is what one request may still fetch."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0

    def take(self, num_bytes: int) -> None:
        """Counts bytes of one of the request's media. Raises InvalidMedia if all of them together are too large."""
        if self._used + num_bytes > self._limit:
            raise InvalidMedia(f"the media of the request that are fetched have more than {self._limit} bytes together")
        self._used += num_bytes

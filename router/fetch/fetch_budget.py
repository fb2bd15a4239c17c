"""Makes fetches wait for what is shared: `FetchBudget` hands out places or memory, and `ByteAllowance` limits what one
request fetches.

`fair_shares` decides who gets what and who waits. A fetch whose size is known waits for its whole size before it reads
on. One whose size is unknown takes more as it grows, and fails as overloaded where it would have to wait: fetches that
hold a part and wait for the rest would otherwise wait for each other. The module knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import itertools

from fabric.contracts import InvalidMedia, Overloaded
from router.fetch.fair_shares import FairShares, Party


class FetchBudget:
    """A `FetchBudget` hands out the amount of a `FairShares`. It belongs to one event loop."""

    def __init__(self, shares: FairShares, full: str) -> None:
        """`full` is the message for a fetch that has waited in vain."""
        self._shares = shares
        self._full = full
        self._numbers = itertools.count(1)
        self._number_to_turn: dict[int, asyncio.Future[None]] = {}
        """Holds the fetches that wait, or that have not noticed yet that it is their turn."""

    @property
    def used(self) -> int:
        return self._shares.used

    async def take(self, party: Party, amount: int, timeout_s: float) -> int:
        """Takes an amount, and waits for it if need be. Returns the number by which it is given back. Raises
        Overloaded if too many wait, or if the amount is not there within the time."""
        number = next(self._numbers)
        if self._shares.enter(number, party, amount):
            return number
        turn = self._number_to_turn[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except TimeoutError as error:
            self.give_back(number)
            raise Overloaded(self._full, retry_after_s=timeout_s) from error
        except asyncio.CancelledError:
            self.give_back(number)
            raise
        finally:
            del self._number_to_turn[number]
        return number

    def take_more(self, number: int, more: int) -> None:
        """Takes more for what `take` has returned. Raises Overloaded if that is not there now."""
        if not self._shares.grow(number, more):
            raise Overloaded(self._full)

    def give_back(self, number: int) -> None:
        """Gives all of it back, and wakes the fetches that get it. Idempotent."""
        for served in self._shares.leave(number):
            turn = self._number_to_turn[served]
            if not turn.done():
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

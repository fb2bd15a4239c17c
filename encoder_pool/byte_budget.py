"""Shares a fixed number of bytes among many takers. A taker that finds too few bytes left waits; takers are served in
order of arrival.

The budget lives in one event loop. It knows nothing of what the bytes are for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque


class Hold:
    """A `Hold` is a number of taken bytes. `release` returns them and may be called twice."""

    def __init__(self, budget: ByteBudget, num_bytes: int) -> None:
        self._budget: ByteBudget | None = budget
        self._num_bytes = num_bytes

    def release(self) -> None:
        budget, self._budget = self._budget, None
        if budget is not None:
            budget.give_back(self._num_bytes)


class ByteBudget:
    """A `ByteBudget` hands out at most `num_bytes` bytes at a time."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, num_bytes: int) -> Hold:
        """Waits until `num_bytes` are left and no earlier taker waits, then takes them. Callers must not ask for more
        than the whole budget. A cancelled call has taken nothing."""
        assert num_bytes <= self.num_bytes, "it would wait for ever"
        if self._waiting or not self._fits(num_bytes):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((num_bytes, turn))
            try:
                await turn  # `_serve` has already taken the bytes for this call
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.num_taken -= num_bytes
                else:
                    with contextlib.suppress(ValueError):  # `_serve` may already have removed it
                        self._waiting.remove((num_bytes, turn))
                self._serve()
                raise
        else:
            self.num_taken += num_bytes
        return Hold(self, num_bytes)

    def give_back(self, num_bytes: int) -> None:
        """Returns bytes to the budget; only holds call it."""
        self.num_taken -= num_bytes
        self._serve()

    def _fits(self, num_bytes: int) -> bool:
        return self.num_taken + num_bytes <= self.num_bytes

    def _serve(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            num_bytes, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.num_taken += num_bytes
                turn.set_result(None)

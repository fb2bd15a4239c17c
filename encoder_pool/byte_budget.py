"""Bytes that many may take from, and that are never exceeded. Who finds too few left waits, first come, first served.

Lives in one event loop. Knows nothing of what the bytes are for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque


class Hold:
    """Bytes that were taken, until `release`, which may be called twice."""

    def __init__(self, budget: ByteBudget, num_bytes: int) -> None:
        self._budget: ByteBudget | None = budget
        self._num_bytes = num_bytes

    def release(self) -> None:
        budget, self._budget = self._budget, None
        if budget is not None:
            budget.give_back(self._num_bytes)


class ByteBudget:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, num_bytes: int) -> Hold:
        """Waits until so many are left and nobody waits who came before. More than the budget has is never asked for.
        Cancelled, it has taken nothing."""
        assert num_bytes <= self.num_bytes, "it would wait for ever"
        if self._waiting or not self._fits(num_bytes):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((num_bytes, turn))
            try:
                await turn  # what is given to it is taken for it, in `_serve`
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.num_taken -= num_bytes
                else:
                    with contextlib.suppress(ValueError):  # `_serve` may have passed it over in the same turn
                        self._waiting.remove((num_bytes, turn))
                self._serve()
                raise
        else:
            self.num_taken += num_bytes
        return Hold(self, num_bytes)

    def give_back(self, num_bytes: int) -> None:
        """Called by holds."""
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

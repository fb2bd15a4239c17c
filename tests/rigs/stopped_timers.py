"""Holds timers whose time a test sets, for code that waits for slow clients. It knows nothing of clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class StoppedTimers:
    """Implements `Timers` with a time that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.calls: list[SetTimer] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], object], /) -> SetTimer:
        self.calls.append(SetTimer(self.now + delay, callback))
        return self.calls[-1]

    async def pass_s(self, seconds: float) -> None:
        """Lets time pass, runs what is due in its order, and lets tasks run."""
        end = self.now + seconds
        while due := [each for each in self.calls if each.at_s <= end]:
            first = min(due, key=lambda each: each.at_s)
            self.calls.remove(first)
            self.now = max(self.now, first.at_s)
            if not first.is_cancelled:
                first.callback()
            await turns()
        self.now = end


class SetTimer:
    def __init__(self, at_s: float, callback: Callable[[], object]) -> None:
        self.at_s, self.callback, self.is_cancelled = at_s, callback, False

    def cancel(self) -> None:
        self.is_cancelled = True


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)

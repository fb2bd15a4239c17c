"""Starts tasks that run on their own, outside the context of the request that started them.

Two concurrent calls to one Ray Serve deployment from one HTTP request share an internal request id, which Serve keeps
in a context variable; the second call then hangs. So every dispatch runs in an empty context. The module knows nothing
of what the tasks do.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """Keeps tasks referenced until they end. A task whose outcome is not awaited ends without a warning: the code that
    started it learns the outcome in another way, or has ended."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Starts `work` in an empty context."""
        task = asyncio.create_task(work, name=name, context=contextvars.Context())
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def __len__(self) -> int:
        return len(self._running)

    async def cancel_all(self, timeout_s: float) -> None:
        """Cancels all running tasks and waits until they have ended, at most `timeout_s`."""
        running = set(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=timeout_s)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()

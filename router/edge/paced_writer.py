"""Writes an answer to a client that may be slow: `PacedWriter` ends the wait for a client that takes nothing or too
little, and sends a comment when a streamed answer pauses, so that proxies and clients don't take the connection for
dead.

One timer per stream serves both, because a timer per written event would cost more than the event. The module knows
nothing of what is written.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

from starlette.types import Send

from fabric.contracts import Aborted

KEEP_ALIVE_S = 10.0
"""A stream that has been idle for this long sends a comment."""
COMMENT = b": keep-alive\n\n"


class TimerHandle(Protocol):
    def cancel(self) -> None: ...


class Timers(Protocol):
    """Tells the time in seconds, and calls a function later; an event loop implements it."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[[], object], /) -> TimerHandle: ...


class PacedWriter:
    """A `PacedWriter` writes the body of one response, from one task. It must be closed in any case."""

    def __init__(
        self,
        send: Send,
        write_timeout_s: float,
        keep_alive_s: float = KEEP_ALIVE_S,
        timers: Timers | None = None,
        limit_s: float = math.inf,
    ) -> None:
        """Sends no comments if `keep_alive_s` is infinite. `limit_s` is the time from now in which everything must
        be written."""
        self._send = send
        self._write_timeout_s, self._keep_alive_s = write_timeout_s, keep_alive_s
        self._timers: Timers = timers or asyncio.get_running_loop()
        self._limit_s, self._ends_at_s = limit_s, self._timers.time() + limit_s
        self._changed_at_s = 0.0
        """This is the time at which the last write began or ended."""
        self._writer: asyncio.Task[object] | None = None
        """Holds the task of the write that is under way."""
        self._is_stalled = False
        self._timer: TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    async def write(self, data: bytes, is_last: bool = False) -> None:
        """Sends `data`, and waits while the socket is full. Raises Aborted if the client takes nothing for too
        long, or if the time for all is over."""
        if not data and not is_last:
            return
        self._check_pace()
        if is_last and self._comment is not None:
            self._comment.cancel()
        timers = self._timers
        self._changed_at_s = timers.time()
        self._writer = asyncio.current_task()
        if self._timer is None:
            self._arm()
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
        except asyncio.CancelledError:
            if self._writer is not None and self._is_stalled and not self._writer.uncancel():
                raise self._stalled() from None
            raise
        finally:
            self._writer = None
        self._changed_at_s = timers.time()

    def close(self) -> None:
        """Ends the timer, and a comment that waits for the socket."""
        if self._timer is not None:
            self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()

    def _check_pace(self) -> None:
        if self._is_stalled:
            raise self._stalled()

    def _stalled(self) -> Aborted:
        if self._timers.time() >= self._ends_at_s:
            return Aborted(f"the client has not taken the whole answer in {self._limit_s:g} s")
        return Aborted(f"the client has read nothing for {self._write_timeout_s:g} s")

    def _arm(self) -> None:
        """Sets the timer to the next moment at which a comment or the end of the wait may be due."""
        now = self._timers.time()
        at_s = self._changed_at_s + min(self._keep_alive_s, self._write_timeout_s)
        if at_s <= now:
            at_s = min(self._changed_at_s + self._write_timeout_s, now + self._keep_alive_s)
        at_s = min(at_s, self._ends_at_s)
        self._timer = self._timers.call_later(max(0.0, at_s - now), self._check)

    def _check(self) -> None:
        """Looks whether a write takes too long, or none has come for too long."""
        now = self._timers.time()
        passed_s = now - self._changed_at_s
        is_waiting = self._writer is not None
        if now >= self._ends_at_s or (is_waiting and passed_s >= self._write_timeout_s):
            self._is_stalled = True
            if self._writer is not None:
                self._writer.cancel()
            return
        if not is_waiting and passed_s >= self._keep_alive_s:
            self._changed_at_s = now
            if self._comment is None or self._comment.done():
                self._comment = asyncio.ensure_future(self._send_comment())
        self._arm()

    async def _send_comment(self) -> None:
        await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})

"""Messages on their last step: from any thread into one event loop, in order. What both planes end in.

Knows nothing of addresses or of how a message got here.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable

from fabric.messages import PlaneMessage

_LOG = logging.getLogger(__name__)
_MESSAGES_PER_TURN = 256
"""Delivered in one turn of the loop; then other callbacks get theirs."""


def _nothing() -> None:
    pass


class Mailbox:
    """A bounded queue with one reader. Keeps what arrives before `open`."""

    def __init__(self, max_messages: int, on_room: Callable[[], None] = _nothing) -> None:
        """`on_room` is called (in the loop) when a full mailbox has become empty again."""
        self._max_messages = max_messages
        self._on_room = on_room
        self._lock = threading.Lock()
        self._messages: deque[PlaneMessage] = deque()
        self._handler: Callable[[PlaneMessage], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_scheduled = False
        self._is_closed = False
        self._was_full = False

    def open(self, handler: Callable[[PlaneMessage], None]) -> None:
        """Begins delivery in the running loop. Raises RuntimeError without a loop, or the second time."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._handler is not None:
                raise RuntimeError("delivery has already begun")
            self._handler, self._loop = handler, loop
            self._schedule()

    def put(self, message: PlaneMessage) -> bool:
        """From any thread; False when full or closed."""
        with self._lock:
            if self._is_closed:
                return False
            if len(self._messages) >= self._max_messages:
                return False
            self._messages.append(message)
            self._was_full |= len(self._messages) == self._max_messages
            self._schedule()
            return True

    def is_full(self) -> bool:
        with self._lock:
            return len(self._messages) >= self._max_messages

    def close(self) -> None:
        """Ends delivery and drops what was not delivered. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._messages.clear()

    def _schedule(self) -> None:
        """Asks the loop for a turn unless one is coming. Called with the lock held."""
        if self._loop is None or self._is_scheduled or not self._messages:
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop was closed: nobody will read any more
            self._is_closed = True
            return
        self._is_scheduled = True

    def _deliver(self) -> None:
        """One turn, in the loop."""
        assert self._handler is not None
        for _ in range(_MESSAGES_PER_TURN):
            with self._lock:
                if not self._messages:
                    break
                message = self._messages.popleft()
            try:
                self._handler(message)
            except Exception:  # delivery is a process's loop: one bad message must not end it
                _LOG.exception("handler failed on %s", type(message).__name__)
        with self._lock:
            self._is_scheduled = False
            self._schedule()
            has_room_again = self._was_full and not self._messages
            if has_room_again:
                self._was_full = False
        if has_room_again:
            self._on_room()

"""Takes messages on their last step: from any thread into one event loop, in order. Both planes end in it.

It knows nothing of addresses or of how a message arrived.
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
"""Limits the messages that one turn of the loop delivers; other callbacks run before the next turn."""


def _nothing() -> None:
    pass


class Mailbox:
    """A `Mailbox` is a bounded queue with one reader. It keeps messages that arrive before `open`."""

    def __init__(self, max_messages: int, on_room: Callable[[], None] = _nothing) -> None:
        """Creates a closed mailbox. `on_room` is called (in the loop) when a full mailbox has become empty again."""
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
        """Begins delivery in the running loop. Raises RuntimeError without a loop, or if delivery has already begun."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._handler is not None:
                raise RuntimeError("delivery has already begun")
            self._handler, self._loop = handler, loop
            self._schedule()

    def put(self, message: PlaneMessage) -> bool:
        """Adds a message, from any thread. Returns False when the mailbox is full or closed."""
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
        """Ends delivery and drops the messages that were not delivered. It is idempotent."""
        with self._lock:
            self._is_closed = True
            self._messages.clear()

    def _schedule(self) -> None:
        """Asks the loop for a turn unless one is already scheduled. The caller must hold the lock."""
        if self._loop is None or self._is_scheduled or not self._messages:
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # The loop was closed, so no reader will come.
            self._is_closed = True
            return
        self._is_scheduled = True

    def _deliver(self) -> None:
        """Delivers the messages of one turn, in the loop."""
        assert self._handler is not None
        for _ in range(_MESSAGES_PER_TURN):
            with self._lock:
                if not self._messages:
                    break
                message = self._messages.popleft()
            try:
                self._handler(message)
            except Exception:  # This loop runs as long as the process, so one bad message must not end it.
                _LOG.exception("handler failed on %s", type(message).__name__)
        with self._lock:
            self._is_scheduled = False
            self._schedule()
            has_room_again = self._was_full and not self._messages
            if has_room_again:
                self._was_full = False
        if has_room_again:
            self._on_room()

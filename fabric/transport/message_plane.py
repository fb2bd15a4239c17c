"""Defines the contract of the message plane, which carries small typed messages, one way, by address, and implements it
inside one process.

Each member owns one endpoint, a `Plane`. The endpoint has an address at which other members reach it, and it sends to
the addresses of others. Messages between one pair arrive in order. No message is acknowledged, and a dead peer loses
what was on its way (leases and terminal events cover that). `LocalPlane` is the endpoint inside one process, and
`zmq_plane` implements the one between processes; one suite of tests checks both. In both, one turn of the event loop
delivers a few messages (`MESSAGES_PER_TURN`, `TURN_S`), each by `deliver`.

This module knows nothing of what the messages mean.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from fabric.contracts import PlaneMessage, decode_message, encode_message

_LOG = logging.getLogger(__name__)


# ------------------------------------------------------------ the contract

Handler = Callable[[PlaneMessage], None]


class Plane(Protocol):
    """A `Plane` is one member's endpoint."""

    @property
    def address(self) -> str:
        """Returns the address to which other members send; it is valid from construction on."""
        ...

    def start(self, handler: Handler) -> None:
        """Begins delivery: `handler` runs in the event loop that called `start`, one message at a time. Messages that
        arrived before `start` are kept and delivered first. An exception of the handler is logged and does not stop
        delivery."""
        ...

    def send(self, address: str, message: PlaneMessage) -> bool:
        """Queues a message. It never blocks and may be called from any thread. Returns False if the peer's queue is
        full or the endpoint is closed (counted in `num_dropped`)."""
        ...

    def forget(self, address: str) -> None:
        """Closes the connection to a peer that has left, and drops the messages that are queued for it."""
        ...

    @property
    def num_dropped(self) -> int: ...

    @property
    def is_alive(self) -> bool:
        """Returns False once the endpoint was closed or its own thread has died; nothing is sent or delivered any
        more."""
        ...

    def close(self) -> None:
        """Ends delivery and frees sockets and threads. It is idempotent."""
        ...


MESSAGES_PER_TURN = 256
"""Limits the messages that one turn of the loop delivers; other callbacks run before the next turn."""
TURN_S = 0.005
"""Ends a turn early once it has taken this long, because some messages (a snapshot of a cache) take a thousand times as
long as others."""


def deliver(handler: Handler, message: PlaneMessage) -> None:
    """Passes a message to its handler. An exception of the handler is logged with the request that the message
    concerns."""
    try:
        handler(message)
    except Exception:
        # The loop that delivers messages runs as long as the process, so one bad message must not end it.
        concerned = {"request_id": getattr(message, "request_id", None)}
        _LOG.exception("the handler failed on a message of type %s", type(message).__name__, extra=concerned)


# ------------------------------------------------------------ the plane inside one process


class LocalPlane:
    """A `LocalPlane` is a `Plane` on a hub. Messages pass through their wire form, so what works here also works
    between processes: the same types arrive, and what cannot be encoded fails at the sender."""

    def __init__(self, hub: LocalHub, address: str) -> None:
        self._hub = hub
        self._address = address
        self._mailbox = hub.bind(address)
        self._lock = threading.Lock()
        self._num_dropped = 0
        self._is_closed = False

    @property
    def address(self) -> str:
        return self._address

    def start(self, handler: Handler) -> None:
        self._mailbox.open(handler)

    def send(self, address: str, message: PlaneMessage) -> bool:
        received = decode_message(encode_message(message))
        if not self._is_closed and self._hub.put(address, received):
            return True
        with self._lock:
            self._num_dropped += 1
        return False

    def forget(self, address: str) -> None:
        self._hub.forget(address)

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    @property
    def is_alive(self) -> bool:
        return not self._is_closed

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._mailbox.close()
        self._hub.unbind(self._address)


class LocalHub:
    """A `LocalHub` lets the endpoints of one process find each other. As with sockets, a sender may come before its
    receiver; the hub keeps what it sends, up to `max_messages` per receiver."""

    def __init__(self, max_messages: int = 10_000) -> None:
        self._max_messages = max_messages
        self._lock = threading.Lock()
        self._address_to_mailbox: dict[str, Mailbox] = {}
        self._bound: set[str] = set()

    def bind(self, address: str) -> Mailbox:
        """Returns the mailbox of a new endpoint. Raises ValueError when the address is taken."""
        with self._lock:
            if address in self._bound:
                raise ValueError(f"the address {address!r} is already taken by another endpoint")
            self._bound.add(address)
            return self._mailbox(address)

    def unbind(self, address: str) -> None:
        """Removes an endpoint. Messages that arrive from now on wait for a new endpoint of that address, until `forget`
        drops them."""
        with self._lock:
            self._bound.discard(address)
            self._address_to_mailbox.pop(address, None)

    def put(self, address: str, message: PlaneMessage) -> bool:
        with self._lock:
            mailbox = self._mailbox(address)
        return mailbox.put(message)

    def forget(self, address: str) -> None:
        """Drops the messages that wait for an address without an endpoint."""
        with self._lock:
            if address not in self._bound:
                self._address_to_mailbox.pop(address, None)

    def _mailbox(self, address: str) -> Mailbox:
        return self._address_to_mailbox.setdefault(address, Mailbox(self._max_messages))


class Mailbox:
    """A `Mailbox` is a bounded queue with one reader. It takes messages from any thread and delivers them in one event
    loop, in order. It keeps messages that arrive before `open`. It does not know how a message arrived."""

    def __init__(self, max_messages: int) -> None:
        """Creates a mailbox whose delivery has not begun."""
        self._max_messages = max_messages
        self._lock = threading.Lock()
        self._messages: deque[PlaneMessage] = deque()
        self._handler: Handler | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_scheduled = False
        self._is_closed = False

    def open(self, handler: Handler) -> None:
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
            self._schedule()
            return True

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
        end_s = time.perf_counter() + TURN_S
        for _ in range(MESSAGES_PER_TURN):
            with self._lock:
                if not self._messages:
                    break
                message = self._messages.popleft()
            deliver(self._handler, message)
            if time.perf_counter() >= end_s:
                break
        with self._lock:
            self._is_scheduled = False
            self._schedule()

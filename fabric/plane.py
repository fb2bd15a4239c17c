"""Defines the contract of the message plane, which carries small typed messages, one way, by address.
`plane_local` and `plane_zmq` implement it.

Each member owns one endpoint. The endpoint has an address at which other members reach it, and it sends to the
addresses of others. Messages between one pair arrive in order. No message is acknowledged, and a dead peer loses what
was on its way (leases and terminal events cover that). This module knows nothing of what the messages mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fabric.messages import PlaneMessage

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

"""The message plane: small typed messages, one way, by address. The contract; `plane_local` and `plane_zmq` keep it.

Each member owns one endpoint. It has an address where others reach it and sends to the addresses of others.
Messages between one pair arrive in order; nothing is acknowledged; a dead peer loses what was on its way (leases
and terminal events cover that). Knows nothing of what the messages mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fabric.messages import PlaneMessage

Handler = Callable[[PlaneMessage], None]


class Plane(Protocol):
    """One member's endpoint."""

    @property
    def address(self) -> str:
        """Where others send to, valid from construction on."""
        ...

    def start(self, handler: Handler) -> None:
        """Begins delivery: `handler` runs in the event loop that called `start`, one message at a time.
        Messages that arrived before `start` are kept and delivered first. An exception of the handler is logged
        and does not stop delivery."""
        ...

    def send(self, address: str, message: PlaneMessage) -> bool:
        """Queues a message; never blocks; callable from any thread. False if the peer's queue is full or the
        endpoint is closed (counted in `num_dropped`)."""
        ...

    def forget(self, address: str) -> None:
        """Closes the way to a peer that has left and drops what is queued for it."""
        ...

    @property
    def num_dropped(self) -> int: ...

    @property
    def is_alive(self) -> bool:
        """False once it was closed, or its own thread has died: nothing is sent or delivered any more."""
        ...

    def close(self) -> None:
        """Ends delivery and frees sockets and threads. Idempotent."""
        ...

"""Implements the message plane inside one process. Messages pass through their wire form, so what works here also
works between processes: the same types arrive, and what cannot be encoded fails at the sender. It knows nothing of what
the messages mean."""

from __future__ import annotations

import threading

from fabric.mailbox import Mailbox
from fabric.messages import PlaneMessage, decode_message, encode_message
from fabric.plane import Handler


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
                raise ValueError(f"address {address!r} is taken")
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


class LocalPlane:
    """A `LocalPlane` is an endpoint on a hub; it implements `fabric.plane.Plane`."""

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

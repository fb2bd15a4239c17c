"""The message plane inside one process. Messages pass through their wire form, so what works here works between
processes: the same types arrive, and what can't be encoded fails at the sender."""

from __future__ import annotations

import threading

from fabric.mailbox import Mailbox
from fabric.messages import PlaneMessage, decode_message, encode_message
from fabric.plane import Handler


class LocalHub:
    """Where the endpoints of one process find each other. As with sockets, a sender may come before its receiver,
    and what it sends is kept, up to `max_messages` per receiver."""

    def __init__(self, max_messages: int = 10_000) -> None:
        self._max_messages = max_messages
        self._lock = threading.Lock()
        self._address_to_mailbox: dict[str, Mailbox] = {}
        self._bound: set[str] = set()

    def bind(self, address: str) -> Mailbox:
        """The mailbox of a new endpoint. Raises ValueError when the address is taken."""
        with self._lock:
            if address in self._bound:
                raise ValueError(f"address {address!r} is taken")
            self._bound.add(address)
            return self._mailbox(address)

    def unbind(self, address: str) -> None:
        """What arrives from now on waits for a new endpoint of that address, or is forgotten."""
        with self._lock:
            self._bound.discard(address)
            self._address_to_mailbox.pop(address, None)

    def put(self, address: str, message: PlaneMessage) -> bool:
        with self._lock:
            mailbox = self._mailbox(address)
        return mailbox.put(message)

    def forget(self, address: str) -> None:
        """Drops what waits for an address that has no endpoint."""
        with self._lock:
            if address not in self._bound:
                self._address_to_mailbox.pop(address, None)

    def _mailbox(self, address: str) -> Mailbox:
        return self._address_to_mailbox.setdefault(address, Mailbox(self._max_messages))


class LocalPlane:
    """An endpoint on a hub; keeps `fabric.plane.Plane`."""

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

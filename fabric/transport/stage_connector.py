"""Defines the contract of the stage connector, which moves the data of requests from one stage of a pipeline to the
next, and implements it inside one process.

Each replica of a stage owns one connector of each kind that leads to it. A connector has an inbox, whose address other
replicas put data into, and it puts data into the inboxes of others. Data lies in the inbox under the stage that it
comes from and a key, until the owner of the inbox gets or discards it. `LocalStageConnector` works inside one process,
`shm_stage_connector` between the processes of one host, and `nixl_stage_connector` between hosts; one suite of tests
checks all of them.

A connector is transport only: it holds no state of requests, and knows nothing of chunks, of their order, or of what
the data means. The owner of the keys (the transfer adapter of a stage) orders and ends what belongs to a request.
"""

from __future__ import annotations

import secrets
import threading
from typing import NamedTuple, Protocol

from fabric.contracts import ArenaFull, TransferFailed

MAX_UNREAD = 8192
"""Limits how many pieces of data lie in one inbox at a time."""
INBOX_FULL = f"the inbox holds {MAX_UNREAD} pieces of data that were not read yet"
INBOX_GONE = "no replica of this {place} owns the inbox {inbox!r}"


class InboxEntry(NamedTuple):
    """An `InboxEntry` names a piece of data in an inbox."""

    from_stage: int
    key: str


class StageConnector(Protocol):
    """A `StageConnector` is one replica's end of the transport. `put`, `discard`, `wake` and `close` may be called from
    any thread; only one thread calls `get` and `arrivals`."""

    @property
    def inbox(self) -> str:
        """Returns the address under which others put data into this connector's inbox. It is valid from construction on
        and never comes again."""
        ...

    def put(self, from_stage: int, to_stage: str, key: str, data: bytes) -> None:
        """Puts data into the inbox `to_stage`. When it returns, the data is complete and the owner is notified. Data
        that lies there under the same stage and key is replaced, so a call may be repeated. Raises TransferFailed if
        the inbox is gone or can't be reached, ArenaFull if there is no room now, and UnitTooLarge if there is never
        room."""
        ...

    def get(self, from_stage: int, to_stage: str, key: str, timeout: float) -> bytes | None:
        """Takes data out of the own inbox, `to_stage`. Returns None if it has not come within `timeout` seconds (0 only
        looks), or if the connector is closed. Raises TransferFailed if the data was
        announced but can't be read any more."""
        ...

    def arrivals(self, timeout: float) -> list[InboxEntry]:
        """Returns the data that has come into the own inbox since the last call. It waits at most `timeout` seconds for
        some, and may return an empty list earlier, for example after a call of `wake`."""
        ...

    def wake(self) -> None:
        """Ends the wait of `arrivals` that is running, or the next one."""
        ...

    def discard(self, prefix: str) -> int:
        """Drops the unread data of the own inbox whose key begins with `prefix`. Returns how many pieces it dropped."""
        ...

    @property
    def is_alive(self) -> bool:
        """Returns False once the connector was closed or its own thread has died."""
        ...

    def close(self) -> None:
        """Closes the inbox and drops what is in it. It is idempotent."""
        ...


def new_inbox() -> str:
    """Returns a name for an inbox that never comes again."""
    return secrets.token_hex(8)


class LocalStageHub:
    """A `LocalStageHub` lets the stage connectors of one process find each other. It is thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inbox_to_owner: dict[str, LocalStageConnector] = {}

    def register(self, owner: LocalStageConnector) -> None:
        with self._lock:
            self._inbox_to_owner[owner.inbox] = owner

    def unregister(self, inbox: str) -> None:
        with self._lock:
            self._inbox_to_owner.pop(inbox, None)

    def find(self, inbox: str) -> LocalStageConnector | None:
        with self._lock:
            return self._inbox_to_owner.get(inbox)


class LocalStageConnector:
    """Implements `StageConnector` inside one process: an inbox is a dictionary with a condition."""

    def __init__(self, hub: LocalStageHub) -> None:
        self._hub = hub
        self._inbox = new_inbox()
        self._changed = threading.Condition()
        self._entries: dict[InboxEntry, bytes] = {}
        self._fresh: dict[InboxEntry, None] = {}
        self._is_woken = self._is_closed = False
        hub.register(self)

    @property
    def inbox(self) -> str:
        return self._inbox

    def put(self, from_stage: int, to_stage: str, key: str, data: bytes) -> None:
        owner = self._hub.find(to_stage)
        if owner is None:
            raise TransferFailed(INBOX_GONE.format(place="process", inbox=to_stage))
        owner._take(InboxEntry(from_stage, key), bytes(data))

    def get(self, from_stage: int, to_stage: str, key: str, timeout: float) -> bytes | None:
        check_own(self, to_stage)
        entry = InboxEntry(from_stage, key)
        with self._changed:
            self._changed.wait_for(lambda: entry in self._entries or self._is_closed, timeout)
            self._fresh.pop(entry, None)
            return self._entries.pop(entry, None)

    def arrivals(self, timeout: float) -> list[InboxEntry]:
        with self._changed:
            self._changed.wait_for(lambda: self._fresh or self._is_woken or self._is_closed, timeout)
            self._is_woken = False
            fresh, self._fresh = list(self._fresh), {}
            return fresh

    def wake(self) -> None:
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def discard(self, prefix: str) -> int:
        with self._changed:
            dropped = [entry for entry in self._entries if entry.key.startswith(prefix)]
            for entry in dropped:
                del self._entries[entry]
                self._fresh.pop(entry, None)
            return len(dropped)

    @property
    def is_alive(self) -> bool:
        return not self._is_closed

    def close(self) -> None:
        self._hub.unregister(self._inbox)
        with self._changed:
            self._is_closed = True
            self._entries.clear()
            self._fresh.clear()
            self._changed.notify_all()

    def _take(self, entry: InboxEntry, data: bytes) -> None:
        with self._changed:
            if self._is_closed:
                raise TransferFailed(INBOX_GONE.format(place="process", inbox=self._inbox))
            if len(self._entries) >= MAX_UNREAD:
                raise ArenaFull(INBOX_FULL)
            self._entries[entry] = data
            self._fresh[entry] = None
            self._changed.notify_all()


def check_own(connector: StageConnector, to_stage: str) -> None:
    """Raises ValueError if `to_stage` is not the inbox of this connector, because only its owner reads an inbox."""
    if to_stage != connector.inbox:
        raise ValueError(f"the inbox {to_stage!r} belongs to another connector")

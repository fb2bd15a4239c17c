"""Implements the feature channel inside one process. It copies bytes, with the same tickets, generations and
quarantine as between two processes.

The hub can freeze and kill a source, so that tests of other parts can see what a bad peer does without having one. The
module knows nothing of what the bytes mean.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from fabric.contracts import Clock, FeatureTicket, SystemClock, TransferFailed
from fabric.transport.feature_channel import SlotMemory, SourceMemory
from fabric.transport.pulling import PullingSink, ReadState


class LocalChannelHub:
    """A `LocalChannelHub` lets sinks find the sources of their process by name. It is thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: dict[str, SourceMemory] = {}
        self._frozen: set[str] = set()

    def register(self, source: SourceMemory) -> None:
        """Registers a source. Raises ValueError when its name is taken."""
        with self._lock:
            if source.name in self._sources:
                raise ValueError(f"a feature source {source.name!r} exists already")
            self._sources[source.name] = source

    def kill(self, name: str) -> None:
        """Makes all reads from the source fail from now on, including those under way. Unknown names are ignored."""
        with self._lock:
            self._sources.pop(name, None)
            self._frozen.discard(name)

    def freeze(self, name: str) -> None:
        """Makes reads from the source stay pending until `thaw` or `kill`. It is for tests of faults."""
        with self._lock:
            self._frozen.add(name)

    def thaw(self, name: str) -> None:
        with self._lock:
            self._frozen.discard(name)

    def find(self, name: str) -> SourceMemory | None:
        with self._lock:
            return self._sources.get(name)

    def is_frozen(self, name: str) -> bool:
        with self._lock:
            return name in self._frozen


class LocalFeatureSource(SourceMemory):
    """Implements `fabric.transport.feature_channel.FeatureSource`: the hub leads readers to the memory."""

    def __init__(self, hub: LocalChannelHub, name: str, total_bytes: int) -> None:
        super().__init__(name, total_bytes)
        self._hub = hub
        hub.register(self)

    @property
    def is_alive(self) -> bool:
        return self._hub.find(self.name) is not None

    def close(self) -> None:
        self._hub.kill(self.name)


class _Copy(NamedTuple):
    source: str
    address: int
    offset: int
    nbytes: int


class _CopyReader:
    """Copies the bytes only when the state of the read is queried, so a frozen source's bytes come late, as real ones
    do."""

    def __init__(self, hub: LocalChannelHub, slots: SlotMemory) -> None:
        self._hub = hub
        self._slots = slots

    def post(self, ticket: FeatureTicket, address: int, offset: int, nbytes: int) -> _Copy:
        if self._hub.find(ticket.source) is None:
            raise TransferFailed(f"the feature source {ticket.source} does not exist in this process")
        return _Copy(ticket.source, address, offset, nbytes)

    def state(self, read: _Copy) -> ReadState:
        source = self._hub.find(read.source)
        if source is None:
            return ReadState.FAILED
        if self._hub.is_frozen(read.source):
            return ReadState.PENDING
        start = read.address - source.slots.address
        end = start + read.nbytes
        if start < 0 or end > source.slots.memory.size:
            return ReadState.FAILED
        self._slots.memory[read.offset : read.offset + read.nbytes] = source.slots.memory[start:end]
        return ReadState.DONE

    def release(self, read: _Copy) -> None:
        """Does nothing, because a copy has no handle."""

    def disconnect(self, source: str) -> None:
        """Does nothing, because a copy has no connection: the state of a released read is never queried again, so the
        read never lands."""

    def close(self) -> None:
        """Does nothing, because there is nothing to free."""


class LocalFeatureSink(PullingSink):
    """A `LocalFeatureSink` is the pulling sink with a copy as its read."""

    def __init__(self, hub: LocalChannelHub, name: str, total_bytes: int, clock: Clock | None = None) -> None:
        slots = SlotMemory(total_bytes)
        super().__init__(name, slots, _CopyReader(hub, slots), clock or SystemClock())

"""Implements the feature channel inside one process. It copies bytes, with the same tickets, generations and
quarantine as between two processes.

The hub can freeze and kill a source, so that tests of other parts can see what a bad peer does without having one. The
module knows nothing of what the bytes mean.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from fabric.contracts import Clock, FeatureTicket, SystemClock, TransferFailed
from fabric.transport.feature_channel import SlotMemory, SourceMemory
from fabric.transport.pulling import PullingSink, ReadState
from fabric.transport.transfer_memory import CopyEvent, HostMemory, MakeMemory, MemoryPlace, SlotView, begin_copy


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

    def __init__(
        self,
        hub: LocalChannelHub,
        name: str,
        total_bytes: int,
        make_memory: MakeMemory = HostMemory,
        spill: SlotMemory | None = None,
    ) -> None:
        super().__init__(name, total_bytes, make_memory, spill)
        self._hub = hub
        hub.register(self)

    @property
    def is_alive(self) -> bool:
        return self._hub.find(self.name) is not None

    def close(self) -> None:
        self._hub.kill(self.name)


@dataclass(slots=True)
class _Copy:
    source: str
    place: MemoryPlace
    target: SlotView
    event: CopyEvent | None = None


class _CopyReader:
    """Copies the bytes only when the state of the read is queried, so a frozen source's bytes come late, as real ones
    do."""

    def __init__(self, hub: LocalChannelHub, memories: tuple[SlotMemory, ...]) -> None:
        self._hub = hub
        self._memories = memories

    def post(self, ticket: FeatureTicket, source: MemoryPlace, target: MemoryPlace) -> _Copy:
        if self._hub.find(ticket.source) is None:
            raise TransferFailed(f"the feature source {ticket.source} does not exist in this process")
        view = _find(self._memories, target)
        assert view is not None, "a sink reads into its own memory alone"
        return _Copy(ticket.source, source, view)

    def state(self, read: _Copy) -> ReadState:
        source = self._hub.find(read.source)
        if source is None:
            if read.event is not None:
                read.event.wait()  # After the end of a read, nothing is written any more.
            return ReadState.FAILED
        if self._hub.is_frozen(read.source):
            return ReadState.PENDING
        if read.event is None:
            payload = _find(source.arenas, read.place)
            if payload is None:
                return ReadState.FAILED
            read.event = begin_copy(payload, read.target)
        return ReadState.DONE if read.event.is_done() else ReadState.PENDING

    def release(self, read: _Copy) -> None:
        """Does nothing, because a copy has no handle."""

    def disconnect(self, source: str) -> None:
        """Does nothing, because a copy has no connection: the state of a released read is never queried again, so the
        read never lands."""

    def close(self) -> None:
        """Does nothing, because there is nothing to free."""


def _find(memories: tuple[SlotMemory, ...], place: MemoryPlace) -> SlotView | None:
    """Returns the bytes of a range that lies in one of the memories, or None."""
    return next((view for memory in memories if (view := memory.view(place)) is not None), None)


class LocalFeatureSink(PullingSink):
    """A `LocalFeatureSink` is the pulling sink with a copy as its read."""

    def __init__(
        self,
        hub: LocalChannelHub,
        name: str,
        total_bytes: int,
        clock: Clock | None = None,
        make_memory: MakeMemory = HostMemory,
        staging: SlotMemory | None = None,
    ) -> None:
        slots = SlotMemory(total_bytes, make_memory=make_memory)
        memories = (slots,) if staging is None else (slots, staging)
        super().__init__(name, slots, _CopyReader(hub, memories), clock or SystemClock(), staging)

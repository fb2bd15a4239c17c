"""Implements the feature channel between processes: NIXL READ over UCX, between memory of hosts and of devices.

Each side registers its memory once, each block by its kind (`DRAM` or `VRAM`) and its device. Tickets carry the agent's
metadata (about a kilobyte), and a sink connects to a source at its first pull. NIXL writes logs of its own; the
deployment sets `NIXL_LOG_LEVEL`. This module knows nothing of what the bytes mean.

One thread alone uses each agent after construction. NIXL's own progress thread spins on a core even when idle (measured
with 1.5.1), so it is off. The sink's thread polls while it has transfers. The source's thread calls UCX every
millisecond while tickets are fresh, because connecting, and reads over TCP, need the peer's help (reads over shared
memory or RDMA do not).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import logging.config
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fabric.contracts import Clock, ConfigError, FeatureTicket, SystemClock, TransferFailed
from fabric.transport.feature_channel import SlotMemory, SourceMemory, SourceSlot
from fabric.transport.pulling import PullingSink, ReadState
from fabric.transport.transfer_memory import HostMemory, MakeMemory, MemoryPlace

_LOG = logging.getLogger(__name__)
_MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
_BUSY_PAUSE_S = 1e-3
_IDLE_PAUSE_S = 20e-3
_FRESH_TICKET_S = 5.0
"""A ticket is usually pulled within this time after it was written."""


_MISSING = (
    "the package nixl-cu12 is not installed; NIXL transfers features between the processes of a cluster, and it exists "
    "for Linux only; install the package, or use `weft serve --in-process`, which works without it"
)


def check_installed() -> None:
    """Raises ConfigError if no wheel of NIXL is installed. It imports no wheel, because that loads UCX."""
    for name in _MODULES:
        try:
            if importlib.util.find_spec(name.partition(".")[0]) is not None:
                return
        except ImportError:
            continue
    raise ConfigError(_MISSING)


@contextlib.contextmanager
def _logging_as_it_is() -> Iterator[None]:
    """Keeps the block from configuring the process's logging. The wheel does so when it is imported, which closes every
    handler of the process. Ray Serve then can't find a replica's log any more, and stops the replica as soon as Serve's
    controller has restarted."""
    configure = logging.config.dictConfig
    logging.config.dictConfig = lambda config: None
    try:
        yield
    finally:
        logging.config.dictConfig = configure


def _load_nixl() -> Any:
    """Returns NIXL's Python API, from the wheel that is installed. Raises ConfigError if there is none."""
    for name in _MODULES:
        try:
            with _logging_as_it_is():
                return importlib.import_module(name)
        except ImportError:
            continue
    raise ConfigError(_MISSING)


class _Agent:
    """An `_Agent` is a NIXL agent with registered memory. It is not thread-safe."""

    def __init__(self, name: str, memories: tuple[SlotMemory, ...]) -> None:
        """Starts the agent, which takes about half a second. Raises ConfigError when UCX cannot start, or cannot reach
        a device's memory."""
        self._api = _load_nixl()
        bindings = self._api.nixlBind
        self.errors: tuple[type[Exception], ...] = tuple(
            kind for kind in vars(bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)
        )
        self.disconnected: type[Exception] = bindings.nixlRemoteDisconnectError
        config = self._api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            self.nixl = self._api.nixl_agent(name, config)
            self._registrations = [
                self.nixl.register_memory([(place.address, place.nbytes, place.device_id, "")], mem_type=place.kind)
                for memory in memories
                for place in memory.places
            ]
            self.metadata: bytes = self.nixl.get_agent_metadata()
        except self.errors as error:
            raise ConfigError(f"the NIXL agent {name} can't start: {error}") from error
        self._memories = memories
        """This reference keeps the memory alive as long as its registration."""

    def progress(self) -> None:
        """Lets UCX make progress; the notifications of NIXL itself are not used."""
        self.nixl.get_new_notifs()

    def close(self) -> None:
        try:
            for registration in self._registrations:
                self.nixl.deregister_memory(registration)
        except self.errors as error:
            _LOG.warning("NIXL can't deregister the memory of its agent: %s", error)
        del self.nixl


class NixlFeatureSource(SourceMemory):
    """Implements `fabric.transport.feature_channel.FeatureSource`: an agent leads readers to the memory. `name` is the
    agent's name; it is unique in the cluster and never reused."""

    def __init__(
        self,
        name: str,
        total_bytes: int,
        clock: Clock | None = None,
        make_memory: MakeMemory = HostMemory,
        spill: SlotMemory | None = None,
    ) -> None:
        super().__init__(name, total_bytes, make_memory, spill)
        self._clock = clock or SystemClock()
        self._agent = _Agent(name, self.arenas)
        self.metadata = self._agent.metadata
        self._last_ticket_s = self._clock.now()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"{name}-progress", daemon=True)
        self._thread.start()

    def ticket(self, slot: SourceSlot, shape: tuple[int, int, int], dtype: str, lease_s: float) -> FeatureTicket:
        ticket = super().ticket(slot, shape, dtype, lease_s)
        self._last_ticket_s = self._clock.now()
        self._wake.set()
        return ticket

    @property
    def is_alive(self) -> bool:
        return not self._stop.is_set() and self._thread.is_alive()

    def close(self) -> None:
        """Ends the agent, so readers' transfers fail. It is idempotent."""
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def _serve(self) -> None:
        failures: tuple[type[Exception], ...] = (*self._agent.errors, TransferFailed)
        try:
            self.slots.backing.enter_thread()
            while not self._stop.is_set():
                self._turn()
                self._wake.wait(_BUSY_PAUSE_S if self._is_busy() else _IDLE_PAUSE_S)
                self._wake.clear()
            self._turn()
        except failures:
            _LOG.exception("the progress thread of %s failed, so its features can't be read any more", self.name)
        finally:
            self._agent.close()

    def _turn(self) -> None:
        """Does what the thread does in each round of its loop; a subclass that uses notifications of NIXL does more."""
        self._agent.progress()

    def _is_busy(self) -> bool:
        """Returns whether the next round is due soon, because a reader may need this side's help."""
        return self._clock.now() - self._last_ticket_s < _FRESH_TICKET_S


_ABANDONED: list[_Agent] = []


class _NixlReader:
    """Implements `fabric.transport.pulling.Reader` over an agent. A source is identified by its name and its metadata:
    if one comes back under the same name with other metadata, the reader connects to it again."""

    def __init__(self, agent: _Agent) -> None:
        self._agent = agent
        self._source_to_metadata: dict[str, bytes] = {}
        self._lost: set[str] = set()
        """Holds the sources whose connection broke; the next read connects again."""
        self._num_under_way: Counter[str] = Counter()
        """Counts, for each source, the reads whose handle is not released."""

    def post(self, ticket: FeatureTicket, source: MemoryPlace, target: MemoryPlace) -> Any:
        self._connect(ticket)
        nixl = self._agent.nixl
        try:
            local = nixl.get_xfer_descs([(target.address, target.nbytes, target.device_id)], target.kind)
            remote = nixl.get_xfer_descs([(source.address, source.nbytes, source.device_id)], source.kind)
            handle = nixl.initialize_xfer("READ", local, remote, ticket.source)
        except self._agent.errors as error:
            raise TransferFailed(f"NIXL can't read from {ticket.source}: {error}") from error
        read = (ticket.source, handle)
        self._num_under_way[ticket.source] += 1
        try:
            nixl.transfer(handle)
        except self._agent.errors as error:
            self._note(ticket.source, error)
            self.release(read)
            raise TransferFailed(f"NIXL can't read from {ticket.source}: {error}") from error
        return read

    def state(self, read: Any) -> ReadState:
        source, handle = read
        try:
            state = self._agent.nixl.check_xfer_state(handle)
        except self._agent.errors as error:
            self._note(source, error)
            return ReadState.FAILED
        return {"DONE": ReadState.DONE, "PROC": ReadState.PENDING}.get(state, ReadState.FAILED)

    def release(self, read: Any) -> None:
        source, handle = read
        self._num_under_way[source] -= 1
        try:
            self._agent.nixl.release_xfer_handle(handle)
        except self._agent.errors as error:
            # NIXL refuses only a read that has not ended, which happens when the agent is about to close.
            _LOG.warning("NIXL can't release a read from %s: %s", source, error)

    def disconnect(self, source: str) -> None:
        self._lost.discard(source)
        del self._num_under_way[source]
        if self._source_to_metadata.pop(source, None) is None:
            return
        try:
            self._agent.nixl.remove_remote_agent(source)
        except self._agent.errors as error:
            _LOG.warning("NIXL can't remove the connection to %s: %s", source, error)

    def close(self) -> None:
        """Closes the agent. With reads under way it keeps the agent and its memory until the process ends, because a
        frozen peer's bytes may still arrive, and memory that was given back by then could belong to other code (this
        has been seen to crash the interpreter)."""
        if any(self._num_under_way.values()):
            _ABANDONED.append(self._agent)
            return
        for source in list(self._source_to_metadata):
            self.disconnect(source)
        self._agent.close()

    def _connect(self, ticket: FeatureTicket) -> None:
        source = ticket.source
        if source in self._lost or self._source_to_metadata.get(source, ticket.metadata) != ticket.metadata:
            if self._num_under_way[source]:
                raise TransferFailed(
                    f"the connection to {source} is broken, and earlier reads over it have not ended yet"
                )
            self.disconnect(source)
        if source in self._source_to_metadata:
            return
        try:
            name = self._agent.nixl.add_remote_agent(ticket.metadata)
        except self._agent.errors as error:
            raise TransferFailed(f"NIXL can't connect to {source}: {error}") from error
        if name.decode() != source:
            if name.decode() not in self._source_to_metadata:
                self._agent.nixl.remove_remote_agent(name.decode())
            raise TransferFailed(f"a ticket of {source} carries the metadata of {name.decode()}")
        self._source_to_metadata[source] = ticket.metadata

    def _note(self, source: str, error: Exception) -> None:
        if isinstance(error, self._agent.disconnected):
            self._lost.add(source)


class NixlFeatureSink(PullingSink):
    """A `NixlFeatureSink` is the pulling sink with NIXL's READ. Its slots are registered once, at construction, and so
    is the staging memory, if its slots are on a device and it has some."""

    def __init__(
        self,
        name: str,
        total_bytes: int,
        clock: Clock | None = None,
        make_memory: MakeMemory = HostMemory,
        staging: SlotMemory | None = None,
    ) -> None:
        slots = SlotMemory(total_bytes, make_memory=make_memory)
        memories = (slots,) if staging is None else (slots, staging)
        super().__init__(name, slots, _NixlReader(_Agent(name, memories)), clock or SystemClock(), staging)

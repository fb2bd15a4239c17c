"""Provides the sources that a sink's tests need: each fills slots, frees them, freezes, thaws and dies on command. One
kind lives in this process, the other in a spawned process of its own, so that signals can stop and kill it. The slots
of sources and sinks lie in the host's memory, or on a device that is simulated (`fake_device`)."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from functools import partial
from typing import Any, Protocol

import numpy as np
from fake_device import FakeDeviceMemory, registered_as_host

from fabric.contracts import Clock, FeatureTicket, WeftError
from fabric.transport import (
    FeatureSink,
    FeatureSource,
    HostMemory,
    LandedFeature,
    LocalChannelHub,
    LocalFeatureSink,
    LocalFeatureSource,
    MakeMemory,
    SlotMemory,
    SourceSlot,
    begin_copy,
    device_memory,
    pinned_bytes,
)
from fabric.transport.routes import Route

Shape = tuple[int, int, int]
ARENA_BYTES = 8 << 20
STAGING_BYTES = 1 << 20
_NAMES = itertools.count()


def payload(seed: int, nbytes: int) -> np.ndarray:
    """Returns the bytes that a peer writes into the slot of `seed`: uint8 `(nbytes,)`."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def landed_bytes(landed: LandedFeature) -> np.ndarray:
    """Returns what a consumer finds in the slot: uint8 `(nbytes,)`."""
    return landed.view.copy()


def memory_maker(transport: str, memory: str) -> MakeMemory:
    """Returns what allocates the memory of a source or a sink (see `World`). A real device has the granules of the host
    here, because tests count the bytes of slots."""
    if memory in ("host", "cuda"):
        return HostMemory if memory == "host" else partial(device_memory(0), granule_bytes=64)
    return FakeDeviceMemory if transport == "local" else registered_as_host


class Stock:
    """Holds a source and its offers by seed."""

    def __init__(self, source: FeatureSource) -> None:
        self._source = source
        self._slots: dict[int, SourceSlot] = {}

    def offer(self, seed: int, shape: Shape, is_claimed: bool = False) -> FeatureTicket:
        nbytes = 4 * shape[0] * shape[1] * shape[2]
        slot = self._source.allocate(nbytes, is_claimed=is_claimed)
        begin_copy(payload(seed, nbytes), slot.view).wait()
        self._slots[seed] = slot
        return self._source.ticket(slot, shape, "float32", lease_s=60.0)

    def free(self, seed: int) -> None:
        self._source.free(self._slots[seed])

    def set_idle(self, seed: int, is_idle: bool) -> None:
        (self._source.set_idle if is_idle else self._source.set_busy)(self._slots[seed])

    def victims(self, nbytes: int) -> list[int] | None:
        """Returns the seeds of the slots that have to be freed to make room for `nbytes`."""
        return self._seeds(self._source.victims(nbytes))

    def claim(self, nbytes: int) -> list[int] | None:
        """Claims a range and returns the seeds of the slots that lie in it."""
        return self._seeds(self._source.claim(nbytes))

    def unclaim(self) -> None:
        self._source.unclaim()

    def _seeds(self, slot_ids: list[int] | None) -> list[int] | None:
        slot_id_to_seed = {slot.slot_id: seed for seed, slot in self._slots.items()}
        return None if slot_ids is None else [slot_id_to_seed[slot_id] for slot_id in slot_ids]

    def clear(self) -> None:
        """Frees every slot for the next test."""
        for slot in self._slots.values():
            self._source.free(slot)
        self._slots.clear()

    def close(self) -> None:
        self._source.close()


class Peer(Protocol):
    name: str
    """This is the name of its transfer agent."""

    def offer(self, seed: int, shape: Shape, is_claimed: bool = False) -> FeatureTicket: ...

    def free(self, seed: int) -> None: ...

    def set_idle(self, seed: int, is_idle: bool) -> None: ...

    def victims(self, nbytes: int) -> list[int] | None: ...

    def claim(self, nbytes: int) -> list[int] | None: ...

    def unclaim(self) -> None: ...

    def clear(self) -> None: ...

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class LocalPeer(Stock):
    """A `LocalPeer` is a source in this process; the hub makes it freeze and die."""

    def __init__(self, hub: LocalChannelHub, make_memory: MakeMemory = HostMemory) -> None:
        self.name = f"enc-{next(_NAMES)}"
        self._hub = hub
        super().__init__(LocalFeatureSource(hub, self.name, ARENA_BYTES, make_memory))

    def freeze(self) -> None:
        self._hub.freeze(self.name)

    def thaw(self) -> None:
        self._hub.thaw(self.name)

    def kill(self) -> None:
        self._hub.kill(self.name)


def _serve(connection: Any, name: str, memory: str) -> None:
    """Serves a source in the other process: it receives commands and sends results until the pipe ends."""
    from fabric.transport import NixlFeatureSource

    stock = Stock(NixlFeatureSource(name, ARENA_BYTES, make_memory=memory_maker("nixl", memory)))
    try:
        while True:
            command, arguments = connection.recv()
            try:
                connection.send(getattr(stock, command)(*arguments))
            except WeftError as error:
                connection.send(error)
    except EOFError:
        stock.close()


class ProcessPeer:
    """A `ProcessPeer` is a NIXL source in a spawned process; signals make it freeze and die."""

    def __init__(self, memory: str = "host") -> None:
        self.name = f"enc-{os.getpid()}-{next(_NAMES)}"
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, self.name, memory), daemon=True)
        self._process.start()
        theirs.close()

    def offer(self, seed: int, shape: Shape, is_claimed: bool = False) -> FeatureTicket:
        return self._ask("offer", seed, shape, is_claimed)

    def free(self, seed: int) -> None:
        self._ask("free", seed)

    def set_idle(self, seed: int, is_idle: bool) -> None:
        self._ask("set_idle", seed, is_idle)

    def victims(self, nbytes: int) -> list[int] | None:
        return self._ask("victims", nbytes)

    def claim(self, nbytes: int) -> list[int] | None:
        return self._ask("claim", nbytes)

    def unclaim(self) -> None:
        self._ask("unclaim")

    def clear(self) -> None:
        self._ask("clear")

    def freeze(self) -> None:
        """Stops the process, and returns when all of its threads stand still: until then its transfer thread may go on
        sending."""
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._pid, os.WSTOPPED)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.join()

    def close(self) -> None:
        self._connection.close()
        if self._process.is_alive():
            self.thaw()
            self._process.join(10.0)
            self._process.kill()
        self._process.join()
        self._process.close()

    def _ask(self, command: str, *arguments: Any) -> Any:
        self._connection.send((command, arguments))
        assert self._connection.poll(60.0), f"{self.name} does not answer"
        result = self._connection.recv()
        if isinstance(result, WeftError):
            raise result
        return result

    def _signal(self, number: int) -> None:
        os.kill(self._pid, number)

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid


class World:
    """Makes the peers of one transport. They are slow to make, so tests share two; only tests that kill a peer make
    their own."""

    def __init__(self, transport: str, memory: str = "host") -> None:
        """`memory` says where slots lie: `host`, `device` (which is simulated), `staged` (on a device that is reached
        over the host) or `cuda` (on a real device, with both routes)."""
        self.transport, self.memory = transport, memory
        self.hub = LocalChannelHub()
        self.shared: list[Peer] = []

    def make_peer(self) -> Peer:
        if self.transport == "local":
            return LocalPeer(self.hub, memory_maker("local", self.memory))
        return ProcessPeer(self.memory)

    def make_sink(self, total_bytes: int, clock: Clock) -> FeatureSink:
        from fabric.transport import NixlFeatureSink

        staging = None
        if self.memory in ("staged", "cuda"):
            allocate = pinned_bytes if self.memory == "cuda" else None
            staging = SlotMemory(STAGING_BYTES, make_memory=partial(HostMemory, allocate=allocate))
        options = {"make_memory": memory_maker(self.transport, self.memory), "staging": staging}
        if self.transport == "local":
            sink = LocalFeatureSink(self.hub, "worker", total_bytes, clock, **options)
        else:
            sink = NixlFeatureSink("worker", total_bytes, clock, **options)
        if self.memory == "staged":
            sink._routes.route = lambda key: Route.STAGED
        return sink

    def shared_peer(self, index: int) -> Peer:
        while len(self.shared) <= index:
            self.shared.append(self.make_peer())
        self.shared[index].clear()
        return self.shared[index]

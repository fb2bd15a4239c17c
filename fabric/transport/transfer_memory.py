"""Describes the memory in which slots lie: the memory of the host, or that of a device.

A `TransferMemory` is one block of memory that a transport registers once. `HostMemory` is the block that the processor
reads and writes itself. A block on a device (`cuda_memory`) is written and read by copies that end later than they
begin; each returns a `CopyEvent`, which says when it has ended. So nothing here waits unless the caller asks for it.

The module knows nothing of slots, transports or CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from fabric.contracts import MemoryKind

HostBytes: TypeAlias = npt.NDArray[np.uint8]
"""Stands for bytes in the host's memory, with shape `(nbytes,)`."""
HOST_GRANULE_BYTES = 64


class MemoryPlace(NamedTuple):
    """A `MemoryPlace` is a range of registered memory, in the form in which transports name it."""

    kind: MemoryKind
    address: int
    nbytes: int
    device_id: int = 0
    """Numbers the device among those that its process sees; it is 0 for host memory."""

    def holds(self, other: MemoryPlace) -> bool:
        """Returns whether the other range lies in this one."""
        is_same = (self.kind, self.device_id) == (other.kind, other.device_id)
        return is_same and 0 <= other.address - self.address <= self.nbytes - other.nbytes


class CopyEvent(Protocol):
    """A `CopyEvent` says when a copy to or from a device has ended. Until then the memory that it writes must not be
    read, and the memory that it reads must not be written."""

    def is_done(self) -> bool:
        """Returns whether the copy has ended, without a wait. Raises TransferFailed if the device has failed."""
        ...

    def wait(self) -> None:
        """Returns when the copy has ended. Raises TransferFailed if the device has failed."""
        ...


class _EndedCopy:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        """Returns at once."""


ENDED_COPY: CopyEvent = _EndedCopy()
"""Stands for a copy that ended before its call returned."""


class TransferMemory(Protocol):
    """A `TransferMemory` is one block of memory that a transport may register. It lives as long as something refers to
    it or to a view of it. It is thread-safe, except that the holder of a range alone reads and writes the range."""

    @property
    def place(self) -> MemoryPlace:
        """Returns the whole block."""
        ...

    @property
    def granule_bytes(self) -> int:
        """Returns the unit of which every slot is a whole number. The block's address and size are multiples of it."""
        ...

    def view(self, offset: int, nbytes: int) -> SlotView:
        """Returns a range of the block. It keeps the block alive."""
        ...

    def write(self, offset: int, payload: HostBytes) -> CopyEvent:
        """Begins to copy bytes of the host to `offset`."""
        ...

    def read(self, offset: int, into: HostBytes) -> CopyEvent:
        """Begins to copy the bytes at `offset` to the host."""
        ...

    def enter_thread(self) -> None:
        """Prepares the calling thread for calls of a transport on this memory. A thread that belongs to a transport
        calls it once; it changes which device is current there."""
        ...


MakeMemory: TypeAlias = Callable[[int], TransferMemory]
"""Allocates a block of at least so many bytes. Raises ConfigError if the host or the device has no room for it."""


class DeviceView:
    """A `DeviceView` is a range of a device's memory. Libraries that compute on CUDA devices read it without a copy,
    over `__cuda_array_interface__` (version 3): `torch.as_tensor(view, device=...)`. Nothing else may look at its
    bytes; `copy` brings them to the host."""

    __slots__ = ("_memory", "_offset", "nbytes")

    def __init__(self, memory: TransferMemory, offset: int, nbytes: int) -> None:
        self._memory, self._offset, self.nbytes = memory, offset, nbytes

    @property
    def place(self) -> MemoryPlace:
        whole = self._memory.place
        return whole._replace(address=whole.address + self._offset, nbytes=self.nbytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Describes the bytes as a vector. There is no stream to wait for: whoever has a view has memory that no copy
        of this package writes any more."""
        data = (self.place.address, False)
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": data, "strides": None, "stream": None, "version": 3}

    def copy(self) -> HostBytes:
        """Returns the bytes in new memory of the host. It waits for the copy."""
        into = np.empty(self.nbytes, dtype=np.uint8)
        self.read(into).wait()
        return into

    def read(self, into: HostBytes) -> CopyEvent:
        """Begins to copy the bytes to the host."""
        assert into.nbytes == self.nbytes, "a copy must have the size of the range"
        return self._memory.read(self._offset, into)

    def write(self, payload: HostBytes) -> CopyEvent:
        """Begins to copy bytes of the host to this range."""
        assert payload.nbytes == self.nbytes, "a copy must have the size of the range"
        return self._memory.write(self._offset, payload)


SlotView: TypeAlias = HostBytes | DeviceView
"""Stands for the bytes of a slot. Both kinds have `nbytes` and `copy()`, which returns them in new memory of the
host."""


class HostMemory:
    """Implements `TransferMemory` with an array of the host, whose views are writable arrays."""

    granule_bytes = HOST_GRANULE_BYTES

    def __init__(self, nbytes: int, allocate: Callable[[int], HostBytes | None] | None = None) -> None:
        """Allocates `nbytes`, rounded down to whole granules. `allocate` may give memory that a device reads and writes
        faster (`cuda_memory.pinned_bytes`); if it returns None, the memory is plain."""
        nbytes -= nbytes % HOST_GRANULE_BYTES
        wanted = nbytes + HOST_GRANULE_BYTES
        found = None if allocate is None else allocate(wanted)
        raw = np.empty(wanted, dtype=np.uint8) if found is None else found
        skip = -raw.ctypes.data % HOST_GRANULE_BYTES
        self.array: HostBytes = raw[skip : skip + nbytes]
        self.place = MemoryPlace("DRAM", self.array.ctypes.data, nbytes)

    def view(self, offset: int, nbytes: int) -> HostBytes:
        return self.array[offset : offset + nbytes]

    def write(self, offset: int, payload: HostBytes) -> CopyEvent:
        self.array[offset : offset + payload.nbytes] = payload
        return ENDED_COPY

    def read(self, offset: int, into: HostBytes) -> CopyEvent:
        into[:] = self.array[offset : offset + into.nbytes]
        return ENDED_COPY

    def enter_thread(self) -> None:
        """Does nothing: any thread may read and write the host's memory."""


def begin_copy(source: SlotView, target: SlotView) -> CopyEvent:
    """Begins to copy one range to another of the same size. A copy between two devices passes the host and waits for
    its first half; transports move such bytes themselves."""
    if isinstance(target, DeviceView):
        return target.write(source.copy() if isinstance(source, DeviceView) else source)
    if isinstance(source, DeviceView):
        return source.read(target)
    target[:] = source
    return ENDED_COPY

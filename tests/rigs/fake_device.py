"""Provides the memory of a device that does not exist: a block of the host behind the interface of a device's memory.

Its copies begin late and show what a real device would spoil by chance. The bytes that a copy will write are *poison*
until the copy has ended, and the copy takes its bytes only then. So whatever is read before the event, or whatever is
given to something else before it, makes a test fail every time. Transports that know nothing of devices may read and
write the block directly, as RDMA does with a real one.
"""

from __future__ import annotations

import threading
from functools import partial

import numpy as np

from fabric.contracts import MemoryKind, TransferFailed
from fabric.transport import DeviceView, HostBytes, MemoryPlace

POISON = 0xA5


class FakeCopy:
    """A `FakeCopy` ends after it was asked a few times whether it has, or when something waits for it."""

    def __init__(self, source: HostBytes, target: HostBytes, num_polls: int) -> None:
        self._source, self._target = source, target
        self._num_polls = num_polls
        self._lock = threading.Lock()
        self._is_done = False
        self.error: TransferFailed | None = None
        target[:] = POISON

    def is_done(self) -> bool:
        with self._lock:
            self._num_polls -= 1
            if self._num_polls >= 0 and self.error is None:
                return self._is_done
        self.wait()
        return True

    def wait(self) -> None:
        with self._lock:
            if self.error is not None:
                raise self.error
            if not self._is_done:
                self._target[:] = self._source
                self._is_done = True


class FakeDeviceMemory:
    """Implements `fabric.transport.TransferMemory`. Its kind may be `DRAM`, for a transport that must not take it for a
    real device."""

    def __init__(
        self, nbytes: int, kind: MemoryKind = "VRAM", device_id: int = 0, num_polls: int = 3, granule_bytes: int = 64
    ) -> None:
        nbytes -= nbytes % granule_bytes
        raw = np.empty(nbytes + granule_bytes, dtype=np.uint8)
        skip = -raw.ctypes.data % granule_bytes
        self.bytes: HostBytes = raw[skip : skip + nbytes]
        self.bytes[:] = POISON
        self.place = MemoryPlace(kind, self.bytes.ctypes.data, nbytes, device_id)
        self.granule_bytes = granule_bytes
        self.num_polls = num_polls
        self.copies: list[FakeCopy] = []
        """Holds all copies, the oldest first."""
        self.threads: set[str] = set()
        """Holds the names of the threads that were prepared for transports."""

    def view(self, offset: int, nbytes: int) -> DeviceView:
        return DeviceView(self, offset, nbytes)

    def write(self, offset: int, payload: HostBytes) -> FakeCopy:
        return self._copy(payload, self.bytes[offset : offset + payload.nbytes])

    def read(self, offset: int, into: HostBytes) -> FakeCopy:
        return self._copy(self.bytes[offset : offset + into.nbytes], into)

    def enter_thread(self) -> None:
        self.threads.add(threading.current_thread().name)

    def _copy(self, source: HostBytes, target: HostBytes) -> FakeCopy:
        self.copies.append(FakeCopy(source, target, self.num_polls))
        return self.copies[-1]


registered_as_host = partial(FakeDeviceMemory, kind="DRAM")
"""Makes a fake device that a real transport takes for memory of the host."""

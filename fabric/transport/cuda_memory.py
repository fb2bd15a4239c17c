"""Provides memory of CUDA devices, and memory of the host that they copy fast. Every call of CUDA that transports need
is in this module.

`CudaMemory` is one block from plain `cudaMalloc`. Memory of torch's allocator may come in segments that are mapped
piece by piece (`expandable_segments`); such memory can't be shared between processes by handle, so UCX silently reads
it over TCP. `pinned_bytes` allocates page-locked memory of the host: only that is copied while the caller goes on. It
consists of ordinary pages that are registered with CUDA, because the kernel lets other processes and RDMA devices read
those, and not surely what CUDA would allocate itself.

Copies run on a stream of the block's own that does not wait for the streams of a model. So a copy *to* the device must
not begin before the model's kernels have read what it replaces, and a copy *from* it not before they have written: the
owners of slots see to that.

CUDA's runtime library is loaded at the first use, and found where the system or the packages of NVIDIA keep it. Without
it, `num_devices` is 0, and nothing else may be called. The module knows nothing of slots or transports.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import mmap
import threading
import weakref
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np

from fabric.contracts import ConfigError, TransferFailed, WeftError
from fabric.transport.transfer_memory import DeviceView, HostBytes, MemoryPlace

_LIBRARIES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")
_GRANULE_BYTES = 4096
"""Slots on a device are whole numbers of this. Each granule has a word of 8 bytes in the host's memory."""

# Constants of the runtime's header files (driver_types.h), which never change.
_SUCCESS, _NOT_READY = 0, 600
_COPY_BY_ADDRESSES = 4  # cudaMemcpyDefault: the addresses say which way the bytes go
_STREAM_WITHOUT_WAITS = 1  # cudaStreamNonBlocking: it does not wait for the default stream
_EVENT_WITHOUT_TIMES = 2  # cudaEventDisableTiming
_PINNED_FOR_ALL = 1  # cudaHostRegisterPortable: pinned for every device of the process
_CAPTURE_RELAXED = 2  # cudaStreamCaptureModeRelaxed: the recording of a graph in another thread forbids no call here


# ------------------------------------------------------------ the library


@cache
def _runtime() -> ctypes.CDLL | None:
    """Returns the first of CUDA's runtime libraries that finds a device; a library may be too new for the driver.
    Returns None if there is no device or no library."""
    for name in (*_LIBRARIES, *_packaged()):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(name)
            if _count(library) > 0:
                return library
    return None


def _count(library: ctypes.CDLL) -> int:
    number = ctypes.c_int(0)
    return number.value if library.cudaGetDeviceCount(ctypes.byref(number)) == _SUCCESS else 0


def _packaged() -> Iterator[str]:
    """Yields the runtime libraries in NVIDIA's Python packages, which torch brings with it; the newest come first."""
    try:
        found = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return
    for folder in (found and found.submodule_search_locations) or ():
        yield from (str(path) for path in sorted(Path(folder).glob("*/lib/libcudart.so.*"), reverse=True))


def _call(name: str, *arguments: object, error: type[WeftError] = TransferFailed) -> None:
    """Calls a function of the runtime that returns a `cudaError_t`. Raises `error` if it does not succeed."""
    library = _runtime()
    if library is None:
        raise ConfigError("there is no CUDA device, or CUDA's runtime library is not installed")
    code = getattr(library, name)(*arguments)
    if code != _SUCCESS:
        raise error(f"{name} failed: {_reason(library, code)}")


def _reason(library: ctypes.CDLL, code: int) -> str:
    library.cudaGetErrorString.restype = ctypes.c_char_p
    text = library.cudaGetErrorString(code)
    library.cudaGetLastError()  # The library forgets the error, so that it does not fail a later call too.
    return f"{text.decode() if text else 'unknown error'} ({code})"


def num_devices() -> int:
    """Returns how many CUDA devices this process sees. It is 0 without CUDA."""
    library = _runtime()
    return 0 if library is None else _count(library)


@contextlib.contextmanager
def _on_device(device_id: int, error: type[WeftError] = TransferFailed) -> Iterator[None]:
    """Makes the device current for the calling thread during the block, and then the one that was current before.
    Raises `error` if that is impossible."""
    before = ctypes.c_int(0)
    _call("cudaGetDevice", ctypes.byref(before), error=error)
    _call("cudaSetDevice", ctypes.c_int(device_id), error=error)
    try:
        yield
    finally:
        _call("cudaSetDevice", before)


# ------------------------------------------------------------ memory


def pinned_bytes(nbytes: int) -> HostBytes:
    """Allocates page-locked memory of the host, all of it at once. It is freed when no array refers to it any more.
    Raises ConfigError if the system does not lock so much."""
    memory = (ctypes.c_uint8 * nbytes).from_buffer(mmap.mmap(-1, nbytes))
    address = ctypes.addressof(memory)
    size, flags = ctypes.c_size_t(nbytes), ctypes.c_uint(_PINNED_FOR_ALL)
    _call("cudaHostRegister", ctypes.c_void_p(address), size, flags, error=ConfigError)
    # The finalizer runs before the pages are given back. At the exit of the process, its memory goes without a call,
    # and the driver may be gone by then.
    weakref.finalize(memory, _free, "cudaHostUnregister", address).atexit = False
    return np.ctypeslib.as_array(memory)


def _free(function: str, pointer: int) -> None:
    library = _runtime()
    if library is not None:
        getattr(library, function)(ctypes.c_void_p(pointer))


class CudaMemory:
    """Implements `fabric.transport.TransferMemory` with one block on a device."""

    def __init__(self, nbytes: int, device_id: int = 0, granule_bytes: int = _GRANULE_BYTES) -> None:
        """Allocates at least `nbytes`, in whole granules. Raises ConfigError if the device has no room for them."""
        self.granule_bytes = granule_bytes
        nbytes += -nbytes % granule_bytes
        pointer, stream = ctypes.c_void_p(), ctypes.c_void_p()
        self._lock = threading.Lock()
        with _on_device(device_id, ConfigError):
            _call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(nbytes), error=ConfigError)
            assert pointer.value is not None
            # Freeing waits for the device, so no copy that is under way writes into memory of another owner.
            weakref.finalize(self, _free, "cudaFree", pointer.value).atexit = False
            without_waits = ctypes.c_uint(_STREAM_WITHOUT_WAITS)
            _call("cudaStreamCreateWithFlags", ctypes.byref(stream), without_waits, error=ConfigError)
            weakref.finalize(self, _free, "cudaStreamDestroy", stream.value or 0).atexit = False
        self._stream = stream
        self.place = MemoryPlace("VRAM", pointer.value, nbytes, device_id)

    def view(self, offset: int, nbytes: int) -> DeviceView:
        return DeviceView(self, offset, nbytes)

    def write(self, offset: int, payload: HostBytes) -> CudaCopy:
        return self._copy(self.place.address + offset, payload.ctypes.data, payload)

    def read(self, offset: int, into: HostBytes) -> CudaCopy:
        return self._copy(into.ctypes.data, self.place.address + offset, into)

    def enter_thread(self) -> None:
        """Makes the device current for the calling thread from now on; UCX needs that in each thread that calls it.
        While another thread records a CUDA graph, CUDA refuses calls such as the question whether an event is over, and
        spoils the recording; the thread leaves that rule, because its calls have nothing to do with graphs."""
        _call("cudaSetDevice", ctypes.c_int(self.place.device_id))
        _call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_CAPTURE_RELAXED)))

    def _copy(self, target: int, source: int, host: HostBytes) -> CudaCopy:
        """Begins a copy; the event of the copy keeps the host's memory alive."""
        assert host.flags.c_contiguous, "a copy takes consecutive bytes"
        event = ctypes.c_void_p()
        with self._lock, _on_device(self.place.device_id):
            _call("cudaEventCreateWithFlags", ctypes.byref(event), ctypes.c_uint(_EVENT_WITHOUT_TIMES))
            copy = CudaCopy(event, self, host)
            addresses = (ctypes.c_void_p(target), ctypes.c_void_p(source))
            _call(
                "cudaMemcpyAsync",
                *addresses,
                ctypes.c_size_t(host.nbytes),
                ctypes.c_int(_COPY_BY_ADDRESSES),
                self._stream,
            )
            _call("cudaEventRecord", event, self._stream)
        return copy


class CudaCopy:
    """Implements `fabric.transport.CopyEvent` with an event on the stream of a block."""

    def __init__(self, event: ctypes.c_void_p, memory: CudaMemory, host: HostBytes) -> None:
        self._event = event
        self._kept = (memory, host)
        """These references keep both ends of the copy alive."""
        weakref.finalize(self, _free, "cudaEventDestroy", event.value or 0).atexit = False

    def is_done(self) -> bool:
        library = _runtime()
        assert library is not None, "there is no event without the library"
        code = library.cudaEventQuery(self._event)
        if code not in (_SUCCESS, _NOT_READY):
            raise TransferFailed(f"a copy on a device failed: {_reason(library, code)}")
        return bool(code == _SUCCESS)

    def wait(self) -> None:
        _call("cudaEventSynchronize", self._event)


def device_memory(device_id: int) -> partial[CudaMemory]:
    """Returns what allocates memory on a device, in the form that sources and sinks take."""
    return partial(CudaMemory, device_id=device_id)

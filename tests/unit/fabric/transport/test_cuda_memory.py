"""Tests the module with all calls of CUDA against a library that keeps `device` memory on the host and notes its calls.
`tests/gpu/test_gpu_transfer.py` tests it on a device."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fabric.contracts import ConfigError, TransferFailed
from fabric.transport import cuda_memory
from fabric.transport.cuda_memory import CudaMemory, device_memory, num_devices, pinned_bytes

OUT_OF_MEMORY, INVALID_DEVICE, NOT_READY, LAUNCH_FAILED = 2, 101, 600, 719


class FakeRuntime:
    """A `FakeRuntime` has the functions of `libcudart`. A copy happens when its event is waited for or found done."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.num_devices = 2
        self.device = 0
        self.blocks: dict[int, Any] = {}
        self.pending: list[tuple[int, int, int]] = []
        self.code = 0
        """Is what copies and events return."""
        self.room_bytes = 1 << 20
        self.last_id = 0
        self.cudaGetErrorString = lambda code: b"the reason"
        self.cudaGetErrorString.restype = None

    def __getattr__(self, name: str) -> Any:
        """Returns a function that only notes its call, such as one that destroys a stream."""
        if not name.startswith("cuda"):
            raise AttributeError(name)

        def call(*arguments: object) -> int:
            self.calls.append(name)
            return 0

        return call

    def cudaGetDeviceCount(self, number: Any) -> int:
        number._obj.value = self.num_devices
        return 0 if self.num_devices else 100

    def cudaGetDevice(self, number: Any) -> int:
        number._obj.value = self.device
        return 0

    def cudaSetDevice(self, number: Any) -> int:
        if number.value >= self.num_devices:
            return INVALID_DEVICE
        self.device = number.value
        return 0

    def _allocate(self, pointer: Any, nbytes: int) -> int:
        if nbytes > self.room_bytes:
            return OUT_OF_MEMORY
        block = (ctypes.c_uint8 * (nbytes + 4096))()
        pointer._obj.value = ctypes.addressof(block) + -ctypes.addressof(block) % 4096
        self.blocks[pointer._obj.value] = block
        return 0

    def cudaMalloc(self, pointer: Any, nbytes: Any) -> int:
        self.calls.append(f"cudaMalloc on {self.device}")
        return self._allocate(pointer, nbytes.value)

    def cudaHostRegister(self, pointer: Any, nbytes: Any, flags: Any) -> int:
        assert flags.value == 1
        assert pointer.value % mmap.PAGESIZE == 0
        if nbytes.value > self.room_bytes:
            return OUT_OF_MEMORY
        self.blocks[pointer.value] = nbytes.value
        return 0

    def cudaFree(self, pointer: Any) -> int:
        del self.blocks[pointer.value]
        return 0

    def cudaHostUnregister(self, pointer: Any) -> int:
        ctypes.memset(pointer, 0, self.blocks[pointer.value])  # The pages are still there.
        return self.cudaFree(pointer)

    def _make(self, handle: Any, flags: Any, expected: int) -> int:
        assert flags.value == expected
        self.last_id += 1
        handle._obj.value = self.last_id
        return 0

    def cudaStreamCreateWithFlags(self, stream: Any, flags: Any) -> int:
        return self._make(stream, flags, 1)

    def cudaEventCreateWithFlags(self, event: Any, flags: Any) -> int:
        return self._make(event, flags, 2)

    def cudaMemcpyAsync(self, target: Any, source: Any, nbytes: Any, kind: Any, stream: Any) -> int:
        assert kind.value == 4
        assert stream.value
        self.calls.append(f"cudaMemcpyAsync on {self.device}")
        self.pending.append((target.value, source.value, nbytes.value))
        return self.code

    def cudaEventQuery(self, event: Any) -> int:
        if self.code == 0:
            self.cudaEventSynchronize(event)
        return self.code

    def cudaEventSynchronize(self, event: Any) -> int:
        for target, source, nbytes in self.pending:
            ctypes.memmove(target, source, nbytes)
        self.pending.clear()
        return self.code


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    runtime = FakeRuntime()
    monkeypatch.setattr(cuda_memory, "_runtime", lambda: runtime)
    yield runtime
    gc.collect()
    assert runtime.blocks == {}, "all memory is freed with what refers to it"


def test_a_block_is_allocated_on_its_device_and_the_thread_keeps_its_own(runtime: FakeRuntime) -> None:
    memory = device_memory(1)(5000)
    assert memory.place == ("VRAM", next(iter(runtime.blocks)), 8192, 1)
    assert runtime.calls == ["cudaMalloc on 1"]
    assert runtime.device == 0
    memory.enter_thread()
    assert runtime.device == 1
    assert "cudaThreadExchangeStreamCaptureMode" in runtime.calls


def test_copies_bring_bytes_both_ways_and_end_with_their_event(runtime: FakeRuntime) -> None:
    memory = CudaMemory(4096, device_id=1)
    payload = np.arange(100, dtype=np.uint8)
    event = memory.write(64, payload)
    runtime.code = NOT_READY
    assert not event.is_done()
    runtime.code = 0
    assert event.is_done()
    view = memory.view(64, 100)
    del memory
    gc.collect()
    assert view.copy().tolist() == payload.tolist()
    assert runtime.calls.count("cudaMemcpyAsync on 1") == 2
    assert runtime.device == 0
    assert runtime.calls.count("cudaEventDestroy") >= 1
    del event


def test_errors_name_the_call_and_the_reason(runtime: FakeRuntime) -> None:
    with pytest.raises(ConfigError, match=r"cudaMalloc failed: the reason \(2\)"):
        CudaMemory(1 << 21)
    with pytest.raises(ConfigError, match="cudaHostRegister failed"):
        pinned_bytes(1 << 21)
    with pytest.raises(ConfigError, match=r"cudaSetDevice failed: the reason \(101\)"):
        CudaMemory(4096, device_id=2)
    memory = CudaMemory(4096)
    event = memory.write(0, np.zeros(8, np.uint8))
    runtime.code = LAUNCH_FAILED
    with pytest.raises(TransferFailed, match=r"a copy on a device failed: the reason \(719\)"):
        event.is_done()
    with pytest.raises(TransferFailed, match="cudaEventSynchronize failed"):
        event.wait()
    with pytest.raises(TransferFailed, match="cudaMemcpyAsync failed"):
        memory.write(0, np.zeros(8, np.uint8))
    assert runtime.calls.count("cudaGetLastError") == 6
    runtime.pending.clear()


def test_pinned_memory_lives_as_long_as_an_array_refers_to_it(runtime: FakeRuntime) -> None:
    part = pinned_bytes(128)[64:]
    part[:] = 3
    gc.collect()
    assert len(runtime.blocks) == 1
    assert part.tolist() == [3] * 64
    del part


def test_devices_are_counted_with_and_without_a_library(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_devices() == 2
    monkeypatch.setattr(cuda_memory, "_runtime", lambda: None)
    assert num_devices() == 0
    with pytest.raises(ConfigError, match="there is no CUDA device"):
        CudaMemory(4096)


def test_a_library_without_a_device_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = {"libcudart.so.13": FakeRuntime(), "libcudart.so": FakeRuntime()}
    libraries["libcudart.so.13"].num_devices = 0

    def load(name: str) -> FakeRuntime:
        if name not in libraries:
            raise OSError(name)
        return libraries[name]

    monkeypatch.setattr(ctypes, "CDLL", load)
    find = cuda_memory._runtime.__wrapped__
    assert find() is libraries["libcudart.so"]
    del libraries["libcudart.so"]
    assert find() is None

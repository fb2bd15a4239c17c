"""Tests where the memory for features lies and how large it is, for each place that a config can name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deploy.config import ClusterConfig
from deploy.feature_memory import encoder_memory, worker_memory
from deploy.sizing import arena_bytes, inbox_bytes, spill_bytes, staging_bytes
from fabric.contracts import ConfigError
from fabric.transport import FeatureMemory, HostMemory
from fabric.transport.cuda_memory import CudaMemory

GPU = {"device": "cuda", "gpus_per_replica": 1}
SMALL = {"arena_bytes": 4096, "spill_bytes": 8192}


def config(encoders: dict[str, Any], workers: dict[str, Any]) -> ClusterConfig:
    return ClusterConfig.model_validate({"encoders": encoders, "workers": workers})


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the sizes that were pinned; no device is needed."""
    sizes: list[int] = []

    def pin(nbytes: int) -> np.ndarray:
        sizes.append(nbytes)
        return np.empty(nbytes, np.uint8)

    monkeypatch.setattr("fabric.transport.member_memory.pinned_bytes", pin)
    return sizes


def test_features_lie_on_the_host_unless_a_config_says_otherwise() -> None:
    for encoders, workers in (({}, {}), (GPU, GPU)):
        plain = config(encoders, workers)
        assert not plain.is_arena_on_device
        assert not plain.is_inbox_on_device
        assert spill_bytes(plain) == staging_bytes(plain) == 0


@pytest.mark.parametrize(
    ("encoders", "workers", "are_on_device"),
    [
        (GPU, GPU, True),
        (GPU, {}, False),
        ({}, GPU, False),
        ({}, {}, False),
    ],
)
def test_auto_means_the_gpu_where_both_sides_have_one(
    encoders: dict[str, Any], workers: dict[str, Any], are_on_device: bool
) -> None:
    found = config(encoders | {"arena_device": "auto"}, workers | {"inbox_device": "auto"})
    assert (found.is_arena_on_device, found.is_inbox_on_device) == (are_on_device, are_on_device)


@pytest.mark.parametrize("name", ["encoders.arena_device", "workers.inbox_device"])
def test_a_processor_has_no_device_memory(name: str) -> None:
    section, _, key = name.partition(".")
    with pytest.raises(ValueError, match=f"{key} is device, but device is cpu"):
        ClusterConfig.model_validate({section: {key: "device"}})


def test_memory_of_the_host_is_plain_beside_a_processor_and_pinned_beside_a_gpu(pinned: list[int]) -> None:
    for device, num_pinned in (({}, 0), (GPU, 1)):
        pinned.clear()
        found = config({**device, "arena_bytes": 4096}, {**device, "inbox_bytes": 8192})
        for memory, nbytes in ((encoder_memory(found), 4096), (worker_memory(found), 8192)):
            pinned.clear()
            made = memory.make(memory.nbytes)
            assert isinstance(made, HostMemory)
            assert memory == FeatureMemory(nbytes, memory.make, None)
            assert len(pinned) == num_pinned


def test_a_host_that_pins_nothing_gives_plain_memory_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def pin(nbytes: int) -> np.ndarray:
        raise ConfigError("cudaHostRegister failed: out of memory (2)")

    monkeypatch.setattr("fabric.transport.member_memory.pinned_bytes", pin)
    memory = encoder_memory(config({**GPU, "arena_bytes": 4096}, GPU))
    assert memory.make(4096).place.nbytes == 4096
    assert "cudaHostRegister failed: out of memory (2)" in caplog.text


def test_a_gpu_has_pinned_memory_of_the_host_beside_it(pinned: list[int]) -> None:
    found = config({**GPU, **SMALL, "arena_device": "device"}, {**GPU, "inbox_bytes": "1GiB", "inbox_device": "device"})
    arena, inbox = encoder_memory(found), worker_memory(found)
    assert (arena.nbytes, inbox.nbytes) == (4096, 2**30)
    assert arena.beside is not None
    assert inbox.beside is not None
    assert arena.beside.usage().total_bytes == 8192
    assert inbox.beside.usage().total_bytes == staging_bytes(found) == 64 * 2**20
    assert len(pinned) == 2
    assert arena.make.func is inbox.make.func is CudaMemory
    assert arena.make.keywords == {"device_id": 0}


def test_defaults_on_a_device_leave_room_for_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.sizing.budget.machine_bytes", lambda: 10**12)
    found = config({**GPU, "replicas": 2, "arena_device": "device"}, {**GPU, "inbox_device": "device"})
    assert (arena_bytes(found), spill_bytes(found)) == (2 * 10**9, 8 * 10**9)
    assert (inbox_bytes(found), staging_bytes(found)) == (10**9, 64 * 2**20)
    small = config({**GPU, "replicas": 2}, {**GPU, "inbox_bytes": "1MiB", "inbox_device": "device"})
    assert (arena_bytes(small), spill_bytes(small)) == (8 * 10**9, 0)
    assert staging_bytes(small) == 2**20

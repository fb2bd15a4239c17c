"""Checks memory of a CUDA device, and features that travel to and from it. The tests are skipped without one.

The suite of the feature channel runs on a device too (`tests/contract/test_fabric_channel.py`, `-k cuda`).
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import threading
import time
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from fabric.contracts import ConfigError, FeatureTicket
from fabric.transport import HostMemory, NixlFeatureSink, SlotMemory, device_memory, num_devices, pinned_bytes
from fabric.transport.cuda_memory import CudaMemory
from fabric.transport.routes import LinkKey
from llm_workers.compute.runner import ended_reads
from modalities.slot_tensors import slot_tensor, write_slot

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WAIT_S = 60.0
NBYTES = 32 << 20
SHAPE = (1, NBYTES // 4096, 1024)


def random_bytes(nbytes: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, nbytes, dtype=np.uint8)


def test_a_device_is_found_and_counted() -> None:
    assert num_devices() == torch.cuda.device_count()


def test_bytes_go_to_the_device_and_back_and_torch_sees_them_there() -> None:
    memory, payload = CudaMemory(NBYTES), random_bytes(NBYTES // 2)
    event = memory.write(4096, payload)
    event.wait()
    assert event.is_done()
    view = memory.view(4096, payload.nbytes)
    tensor = slot_tensor(view)
    assert tensor.device == torch.device("cuda", 0)
    assert tensor.data_ptr() == view.place.address
    assert torch.equal(tensor.cpu(), torch.from_numpy(payload))
    assert np.array_equal(view.copy(), payload)
    write_slot(view, torch.full((view.nbytes,), 3, dtype=torch.uint8, device="cuda"))
    assert set(view.copy().tolist()) == {3}


def test_the_memory_is_freed_with_its_last_view() -> None:
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    tensor = slot_tensor(CudaMemory(1 << 30).view(0, 64))
    gc.collect()
    assert torch.cuda.mem_get_info()[0] <= free_bytes - (1 << 30)
    del tensor
    gc.collect()
    assert torch.cuda.mem_get_info()[0] > free_bytes - (1 << 29)


def test_a_device_that_is_full_is_an_error_of_the_config() -> None:
    with pytest.raises(ConfigError, match="cudaMalloc failed: out of memory"):
        CudaMemory(1 << 46)
    torch.ones(8, device="cuda").sum().item()  # The error is forgotten.


def test_pinned_memory_is_pinned() -> None:
    assert torch.from_numpy(pinned_bytes(4096)).is_pinned()
    assert not torch.from_numpy(np.empty(4096, np.uint8)).is_pinned()


def test_copies_go_on_while_another_thread_records_a_graph() -> None:
    """CUDA refuses the question after an event during a recording, unless the thread that asks is excepted."""
    memory, payload = CudaMemory(NBYTES), pinned_bytes(NBYTES)
    failures: list[Exception] = []

    def copy() -> None:
        try:
            memory.enter_thread()
            event = memory.write(0, payload)
            while not event.is_done():
                time.sleep(1e-4)
        except Exception as error:
            failures.append(error)

    x, graph = torch.zeros(1024, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()
        x += 1
    graph.replay()
    assert x.sum().item() == 2 * 1024
    assert failures == []


def test_a_feature_is_read_before_the_block_ends() -> None:
    """The slot is overwritten right after the block, although the device is still busy with what came before it."""
    memory, payload = CudaMemory(NBYTES), random_bytes(NBYTES)
    memory.write(0, payload).wait()
    embeddings = torch.empty(NBYTES, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(200_000_000)
    embeddings.copy_(slot_tensor(memory.view(0, NBYTES)))
    with ended_reads(embeddings):
        torch.cuda._sleep(200_000_000)
    memory.write(0, np.zeros(NBYTES, np.uint8)).wait()
    assert np.array_equal(embeddings.cpu().numpy(), payload)


# ---------------------------------------------------------------- between processes


def publish(pipe: Connection, name: str, kind: str) -> None:
    """Runs in a process of its own: it offers one feature and waits."""
    from fabric.transport import NixlFeatureSource

    source = NixlFeatureSource(name, 2 * NBYTES, make_memory=device_memory(0) if kind == "VRAM" else HostMemory)
    slot = source.allocate(NBYTES)
    write_slot(slot.view, torch.from_numpy(random_bytes(NBYTES)))
    pipe.send(source.ticket(slot, SHAPE, "float32", 600.0))
    pipe.recv()
    source.close()


@pytest.mark.nixl
@pytest.mark.parametrize(("source_kind", "sink_kind"), [*itertools.product(["DRAM", "VRAM"], repeat=2)])
def test_features_land_on_every_pair_of_memories(source_kind: str, sink_kind: str) -> None:
    """Prints the rates of the link, which say how UCX reads here."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    name = f"enc-{source_kind}-{sink_kind}"
    process = spawn.Process(target=publish, args=(there, name, source_kind), daemon=True)
    process.start()
    staging, make_memory = None, HostMemory
    if sink_kind == "VRAM":
        staging, make_memory = SlotMemory(2 * NBYTES, make_memory=pinned), device_memory(0)
    sink = NixlFeatureSink(f"worker-{source_kind}-{sink_kind}", 2 * NBYTES, make_memory=make_memory, staging=staging)
    try:
        assert here.poll(WAIT_S)
        ticket: FeatureTicket = here.recv()
        assert ticket.memory_kind == source_kind
        for _ in range(5):
            landed = sink.pull(ticket, WAIT_S).result(WAIT_S)
            assert slot_tensor(landed.view).is_cuda == (sink_kind == "VRAM")
            assert np.array_equal(landed.view.copy(), random_bytes(NBYTES))
            print(f"{source_kind} to {sink_kind}, staged: {landed.is_staged}, {NBYTES / landed.read_s / 1e9:.2f} GB/s")
            sink.free(landed.slot_id)
        for route, rate in sink._routes.rates(LinkKey(name, ticket.memory_kind)).items():
            print(f"{source_kind} to {sink_kind}, {route.name} was measured at {rate / 1e9:.2f} GB/s")
    finally:
        sink.close()
        here.send(None)
        process.join(WAIT_S)
        process.kill()


def pinned(nbytes: int) -> HostMemory:
    return HostMemory(nbytes, pinned_bytes)

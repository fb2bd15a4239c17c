"""Tests the measurement of the largest step: the step fills its budget, its peak memory is counted, and a worker
refuses to start if it does not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from worker_rig import loaded, rig

from deploy.sizing.budget import machine_bytes
from fabric.contracts import ConfigError
from llm_workers.compute import PagedKV, device_memory, fit_blocks, record_decodes, select_backend
from llm_workers.compute import boot_measurements as workspace
from llm_workers.compute.runner import Runner
from llm_workers.scheduling import DeviceRoom, block_bytes, most_blocks, worker_bytes
from llm_workers.worker_config import Speculation, WorkerConfig

pytestmark = pytest.mark.torch
MIB = 2**20


def measured(config: WorkerConfig) -> workspace.Workspace:
    parts, shape = loaded(), loaded().family.shape
    heads = (shape.num_kv_heads, shape.head_dim)
    kv = PagedKV(shape.num_layers, config.num_blocks, config.block_size, heads, torch.float32, torch.device("cpu"))
    return workspace.measure_workspace(parts.model, kv, select_backend("auto", kv), parts.family, config)


@pytest.mark.parametrize(
    "config",
    [
        WorkerConfig(),
        WorkerConfig(speculation=Speculation(4)),
        WorkerConfig(max_step_tokens=8, max_sequences=64),
        WorkerConfig(num_blocks=2, block_size=4),
        WorkerConfig(num_blocks=1, block_size=1),
        WorkerConfig(max_sequences=1, max_step_tokens=100, speculation=Speculation(9)),
    ],
)
def test_the_largest_step_is_one_that_the_scheduler_could_plan(config: WorkerConfig) -> None:
    family = loaded().family
    plan = workspace.largest_step(family, config)
    capacity = config.num_blocks * config.block_size
    assert len(plan.chunks) == min(config.max_sequences, config.max_step_tokens, capacity)
    assert plan.num_tokens <= config.max_step_tokens
    assert plan.num_tokens == config.max_step_tokens or plan.chunks[0].start == 0, "tokens are left, and room for them"
    for chunk in plan.chunks:
        assert 0 <= chunk.start < chunk.end <= min(capacity, family.shape.max_model_len)
        assert chunk.num_drafts <= config.speculation.max_tokens
        assert chunk.num_tokens == chunk.positions.shape[1] == len(chunk.token_ids)
        assert len(np.unique(chunk.block_ids)) == len(chunk.block_ids) == -(-chunk.end // config.block_size)
        assert chunk.block_ids.max() < config.num_blocks
    assert sum(splice.length for splice in plan.chunks[0].splices) == plan.chunks[0].num_tokens


def test_the_peak_is_that_of_what_lives_at_once() -> None:
    def run() -> None:
        first = torch.ones(MIB, dtype=torch.uint8)
        second = first + 1
        del first
        third = second + 1
        del second, third
        torch.ones(MIB, dtype=torch.uint8)

    assert 0 <= workspace.peak_bytes(run, torch.device("cpu")) - 2 * MIB < 1024


def test_larger_steps_take_more_and_the_estimate_is_not_far_below() -> None:
    small, large = WorkerConfig(max_step_tokens=32, max_sequences=4), WorkerConfig(max_step_tokens=256, max_sequences=4)
    first, second = measured(small), measured(large)
    assert 0 < first.num_bytes < second.num_bytes < second.num_bytes_left
    for config, found in ((small, first), (large, second)):
        estimate = worker_bytes(loaded().family.shape, config, 0, "float32").workspace
        assert estimate >= found.num_bytes // 2


def test_where_the_system_does_not_say_what_is_left_the_whole_memory_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    left = workspace.bytes_left(cpu)
    monkeypatch.setattr(device_memory, "_read_number", lambda path, name="": 0)
    assert workspace.bytes_left(cpu) >= machine_bytes() >= left > 0


async def test_a_worker_without_room_for_its_largest_step_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "bytes_left", lambda device: MIB)
    with pytest.raises(
        ConfigError, match=r"the largest step takes \d+ bytes \(measured\), but cpu has only 1048576 bytes left"
    ):
        async with rig(is_workspace_measured=True, max_step_tokens=128):
            pass


async def test_measuring_leaves_the_pages_fit_for_use() -> None:
    from test_worker_parity import ONE, assert_parity
    from worker_rig import prompt

    of = prompt(*ONE)
    async with rig(is_workspace_measured=True, max_step_tokens=64) as r:
        request = r.request(of, 12)
        assert (await r.run(request, of)).error is None
        assert assert_parity(r.tokens(request), of) == 0


FITTED = WorkerConfig(are_blocks_fitted=True, max_step_tokens=64, max_sequences=4)


def fitted(config: WorkerConfig, room: DeviceRoom, monkeypatch: pytest.MonkeyPatch) -> WorkerConfig:
    monkeypatch.setattr(workspace, "device_room", lambda device: room)
    return fit_blocks(loaded().model, loaded().family, config)


def test_blocks_fill_what_the_largest_step_leaves_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = loaded().family.shape
    per_block = block_bytes(shape, FITTED, "float32")
    room = DeviceRoom(100 * MIB, 120 * MIB, 20 * MIB)
    found = fitted(FITTED, room, monkeypatch)
    assert not found.are_blocks_fitted
    assert 2 < found.num_blocks < most_blocks(shape, FITTED)
    step = measured(found).num_bytes
    assert found.num_blocks * per_block + step <= 100 * MIB
    half = fitted(
        WorkerConfig(are_blocks_fitted=True, max_step_tokens=64, max_sequences=4, device_share=0.5), room, monkeypatch
    )
    assert half.num_blocks < found.num_blocks / 2


def test_a_large_device_gets_no_more_blocks_than_can_be_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fitted(FITTED, DeviceRoom(2**50, 2**50, 0), monkeypatch)
    assert found.num_blocks == most_blocks(loaded().family.shape, FITTED)


def test_a_device_without_room_for_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="there is no room for KV blocks of 16 tokens: cpu has 1 MiB left"):
        fitted(FITTED, DeviceRoom(MIB, MIB, 0), monkeypatch)


def test_a_stated_number_of_blocks_is_left_alone() -> None:
    assert fit_blocks(loaded().model, loaded().family, WorkerConfig()) == WorkerConfig()


def test_a_decode_step_of_each_recorded_size_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, config = loaded(), WorkerConfig(max_sequences=6, num_blocks=8)
    shape, sizes = parts.family.shape, []
    heads = (shape.num_kv_heads, shape.head_dim)
    kv = PagedKV(shape.num_layers, config.num_blocks, config.block_size, heads, torch.float32, torch.device("cpu"))
    runner = Runner(parts.model, kv, workspace._MadeUpFeatures(shape, 1, torch.float32), select_backend("auto", kv))
    execute = runner.execute
    monkeypatch.setattr(runner, "execute", lambda plan: (sizes.append(len(plan.chunks)), execute(plan))[1])
    record_decodes(runner, parts.family, config, (1, 2, 4, 8, 16))
    assert sizes == [1, 2, 4, 6]

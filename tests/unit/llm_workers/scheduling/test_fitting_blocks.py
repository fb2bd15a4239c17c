"""Tests how many KV blocks a device has room for, as arithmetic on bytes."""

from __future__ import annotations

import pytest

from llm_workers.scheduling import (
    USABLE_SHARE,
    DeviceRoom,
    block_bytes,
    fitting_blocks,
    most_blocks,
    reads_in_place,
    worker_bytes,
)
from llm_workers.worker_config import WorkerConfig
from modalities.family import ModelShape

GIB = 2**30
SHAPE = ModelShape(
    hidden_size=64, num_layers=3, num_kv_heads=2, head_dim=16, vocab_size=100, num_levels=1, max_model_len=1000
)


def test_blocks_take_the_usable_share_of_what_is_free_without_the_workspace() -> None:
    room = DeviceRoom(60 * GIB, 80 * GIB, 16 * GIB)
    assert fitting_blocks(room, 1.0, 4 * GIB, GIB) == int(60 * USABLE_SHARE) - 4


def test_a_process_that_shares_its_device_takes_its_share_however_much_is_free() -> None:
    room = DeviceRoom(60 * GIB, 80 * GIB, 16 * GIB)
    assert fitting_blocks(room, 0.5, 0, GIB) == int((40 - 16) * USABLE_SHARE)
    assert fitting_blocks(DeviceRoom(10 * GIB, 80 * GIB, 16 * GIB), 0.5, 0, GIB) == 9, "others took more than theirs"


@pytest.mark.parametrize("room", [DeviceRoom(GIB, 80 * GIB, 0), DeviceRoom(60 * GIB, 80 * GIB, 79 * GIB)])
def test_there_is_no_negative_number_of_blocks(room: DeviceRoom) -> None:
    assert fitting_blocks(room, 1.0, 2 * GIB, GIB) == 0


def test_a_block_holds_keys_values_and_side_rows_of_one_rank() -> None:
    plain = block_bytes(SHAPE, WorkerConfig(block_size=8), "bfloat16")
    assert plain == 2 * 3 * 2 * 16 * 8 * 2
    assert plain * 10 == worker_bytes(SHAPE, WorkerConfig(block_size=8, num_blocks=10), 0, "bfloat16").kv
    assert block_bytes(SHAPE, WorkerConfig(block_size=8, num_ranks=2), "bfloat16") == plain // 2
    assert block_bytes(SHAPE, WorkerConfig(block_size=8), "bfloat16", is_in_place=False) == plain // 3 * 5
    with_rows = WorkerConfig(block_size=8, side_layers=(("talker", 1),))
    assert block_bytes(SHAPE, with_rows, "bfloat16") == plain + 8 * 64 * 2


def test_the_most_blocks_hold_all_sequences_of_a_step() -> None:
    assert most_blocks(SHAPE, WorkerConfig(block_size=16, max_sequences=4)) == 250
    assert most_blocks(SHAPE._replace(max_model_len=1), WorkerConfig(max_sequences=1)) == 2


def test_only_the_kernels_pages_are_read_in_place() -> None:
    assert reads_in_place("cuda", "bfloat16", 256)
    assert reads_in_place("cuda", "float16", 512)
    assert not reads_in_place("cuda", "bfloat16", 16)
    assert not reads_in_place("cuda", "float32", 256)
    assert not reads_in_place("cpu", "bfloat16", 256)


def test_pages_that_are_read_in_place_need_no_gathered_copy() -> None:
    config = WorkerConfig(block_size=256, num_blocks=40)
    gathered = worker_bytes(SHAPE, config, 0, "bfloat16")
    in_place = worker_bytes(SHAPE, config, 0, "bfloat16", is_in_place=True)
    assert gathered.workspace - in_place.workspace == gathered.kv // 3 + config.max_step_tokens * 1000 * 4
    assert gathered.kv == in_place.kv

"""Tests the tables of holders: what a set costs, how a member is forgotten, and which table is chosen."""

import logging
from pathlib import Path

import numpy as np
import pytest
from block_trees import native_table, path_hash, path_hashes, twin

from kv_index import holder_table
from kv_index.holder_table import HolderTable, NativeTable, PlainTable, new_table


@pytest.fixture(params=["native", "plain"])
def table(request: pytest.FixtureRequest) -> HolderTable:
    return native_table(4096) if request.param == "native" else PlainTable(4096, 1)


def depths_of(table: HolderTable, hashes: bytes, num_slots: int) -> list[int]:
    depths = np.zeros(num_slots, dtype=np.int32)
    table.lookup(hashes, depths)
    return depths.tolist()


def test_equal_sets_of_many_holders_exist_once(table: HolderTable) -> None:
    """The members grow beyond several words of bits, in the middle of what is known."""
    chain = path_hashes((0,) * 64)
    for slot in range(1000):
        table.store(table.join(slot), None, chain[: 16 * (1 + slot % 64)])
    table.check_invariants()
    assert depths_of(table, chain, 1000) == [1 + slot % 64 for slot in range(1000)]
    assert table.stats().num_keys == 64


def test_sets_are_bounded_too_and_take_room_from_old_blocks() -> None:
    table = native_table(4096)
    members = [table.join(slot) for slot in range(1000)]
    rng = np.random.default_rng(1)
    for number in range(1500):
        for member in rng.choice(members, 3, replace=False):
            table.store(int(member), None, path_hash((number,)))
    table.check_invariants()
    stats = table.stats()
    assert stats.num_sets <= 4096 * 10 / (16 + 8 * 16) + 64
    assert (stats.num_evicted, stats.num_refused) == (1500 - stats.num_keys, 0)
    assert sum(depths_of(table, path_hash((1499,)), 1000)) == 3
    assert sum(depths_of(table, path_hash((0,)), 1000)) == 0
    assert stats.num_bytes < 75 * 4096 + 200_000


def test_members_that_left_are_swept_out_in_pieces_and_their_numbers_used_again(table: HolderTable) -> None:
    first, second = table.join(0), table.join(1)
    table.store(first, None, path_hashes((0,) * 100))
    table.store(second, None, path_hashes((0,) * 10))
    table.leave(first)
    assert depths_of(table, path_hashes((0,) * 100), 2) == [0, 10]
    assert table.stats().num_keys == 100
    third = table.join(0)
    assert third not in (first, second), "the table still knows blocks of the first"
    for _ in range(11):
        table.sweep(10)
        table.check_invariants()
    assert table.stats().num_keys == 10
    assert table.join(2) == first
    assert depths_of(table, path_hashes((0,) * 100), 3) == [0, 10, 0]


def test_a_member_that_leaves_during_a_sweep_is_swept_out_of_the_set_that_the_sweep_saw_last(
    table: HolderTable,
) -> None:
    first, second = table.join(0), table.join(1)
    table.store(first, None, path_hash((0,)))
    table.store(second, None, path_hashes((0, 0)))
    table.leave(first)
    table.leave(second)
    table.sweep()
    table.check_invariants()
    assert table.stats().num_keys == 0, "nobody holds a block"


def test_a_member_that_stored_nothing_costs_no_sweep(table: HolderTable) -> None:
    member = table.join(0)
    for _ in range(1000):
        table.leave(member)
        assert table.join(0) == member


def test_a_deep_chain_is_evicted_from_its_end_though_only_its_end_was_looked_up() -> None:
    for table in (native_table(100), PlainTable(100, 1)):
        member = table.join(0)
        for number in range(5):
            table.store(member, None, path_hashes((number, *[0] * 19)))
        for number in range(5):
            depths_of(table, path_hashes((number, *[0] * 19)), 1)
        for number in range(5, 8):
            table.store(member, None, path_hashes((number, *[0] * 9)))
            table.check_invariants()
        depths = [depths_of(table, path_hashes((number, *[0] * 19)), 1)[0] for number in range(5)]
        assert sum(depths) == 70
        assert table.stats().num_evicted == 30


def test_blocks_with_equal_keys_are_never_taken_for_each_other(table: HolderTable) -> None:
    member = table.join(0)
    chain = path_hashes((0, 0, 0))
    double = twin(chain[16:32])
    assert double != chain[16:32]
    table.store(member, None, chain)
    table.store(member, None, double)
    assert table.stats().num_refused == 1
    assert depths_of(table, double, 1) == [0]
    assert depths_of(table, chain, 1) == [3]


def test_an_index_of_no_block_records_none(table: HolderTable) -> None:
    for empty in (native_table(0), PlainTable(0, 1)):
        empty.store(empty.join(0), None, path_hashes((0, 0)))
        assert depths_of(empty, path_hashes((0, 0)), 1) == [0]
        empty.check_invariants()


def test_the_table_is_in_python_where_there_is_no_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(source: Path) -> None:
        assert source.name == "holder_table.c"

    caplog.set_level(logging.INFO, "kv_index")
    monkeypatch.setattr(holder_table, "load_c_library", missing)
    holder_table._library.cache_clear()
    try:
        first, second = new_table(100), new_table(100, stride=1)
        assert isinstance(first, PlainTable)
        assert isinstance(second, PlainTable)
        assert (first.stride, first.max_keys, second.stride, second.max_keys) == (4, 25, 1, 100)
        assert [record.getMessage() for record in caplog.records] == [
            "the index of prefixes runs in Python and knows every 4th block of a prompt"
        ]
    finally:
        holder_table._library.cache_clear()
    monkeypatch.undo()
    assert isinstance(new_table(100), NativeTable)

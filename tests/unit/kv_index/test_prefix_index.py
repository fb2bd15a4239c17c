"""Tests the prefix index and the feature index: holes, pages, epochs, what is evicted, and forgetting."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from block_trees import BlockPath, native_table, path_hash, path_hashes, stored_event

from fabric.contracts import BlocksCleared, BlocksRemoved, BlocksStored, FeatureEvents, KvSnapshot, MemberId, MmHash
from kv_index import ApplyResult, FeatureIndex, PrefixIndex
from kv_index.holder_table import HolderTable, PlainTable

A, B = MemberId("worker-a"), MemberId("worker-b")
TableMaker = Callable[[int], HolderTable]


def chain(num_blocks: int, first: int = 0) -> BlockPath:
    return (first, *[0] * (num_blocks - 1))


@pytest.fixture(params=["native", "plain"])
def new(request: pytest.FixtureRequest) -> TableMaker:
    """Returns a function that makes a table; the one in Python knows every fourth block."""
    return native_table if request.param == "native" else lambda max_keys: PlainTable(max_keys, 4)


def index_with(new: TableMaker, max_blocks: int = 1000, **worker_to_chain: BlockPath) -> PrefixIndex:
    """Returns an index in which the workers have the slots 0, 1, ... in the order of their names."""
    index = PrefixIndex(max_blocks, new(max_blocks))
    for slot, (name, path) in enumerate(worker_to_chain.items()):
        index.add_worker(MemberId(name), slot)
        page = KvSnapshot(MemberId(name), 1, 0, (stored_event(path, 0),) if path else ())
        assert index.load_snapshot(page) is ApplyResult.OK
    return index


def found(index: PrefixIndex, path: BlockPath, num_slots: int = 5) -> list[int]:
    depths = np.full(num_slots, -1, dtype=np.int32)
    index.lookup(path_hashes(path), depths)
    index.check_invariants()
    return depths.tolist()


def test_lookup_counts_leading_blocks_per_slot(new: TableMaker) -> None:
    index = index_with(new, a=chain(40), b=chain(16), c=chain(4), d=chain(40, 1), e=())
    assert found(index, chain(40)) == [40, 16, 4, 0, 0]
    assert found(index, chain(8)) == [8, 8, 4, 0, 0]
    assert found(index, chain(40, 1)) == [0, 0, 0, 40, 0]
    assert found(index, ()) == found(index, chain(40, 2)) == [0] * 5


@pytest.mark.parametrize("length", range(1, 14))
def test_a_prefix_may_end_anywhere(new: TableMaker, length: int) -> None:
    index = index_with(new, a=chain(20), b=chain(length))
    stride = index._table.stride
    assert found(index, chain(20), 2) == [20, length // stride * stride]


def test_a_hole_ends_the_prefix_until_it_is_filled(new: TableMaker) -> None:
    """Two sequences that compute one prefix at once can leave a child at a worker without its parent. The index in
    Python sees such a hole if it is a block that it knows."""
    blocks = chain(32)
    index = index_with(new, a=blocks, b=blocks[:20])
    index.apply(MemberId("a"), 1, 1, [BlocksRemoved(path_hash(blocks[:12]))])
    expected = 11 if index._table.stride == 1 else 8
    assert found(index, blocks, 2) == [expected, 20]
    index.apply(MemberId("b"), 1, 1, [BlocksRemoved(path_hash(blocks[:12]))])
    assert found(index, blocks, 2) == [expected, expected]
    index.apply(MemberId("a"), 1, 2, [stored_event(blocks[:12], 11)])
    assert found(index, blocks, 2) == [32, expected]


def test_clearing_keeps_other_workers(new: TableMaker) -> None:
    index = index_with(new, a=chain(8), b=chain(8))
    index.apply(MemberId("a"), 1, 1, [BlocksCleared(), stored_event(chain(4), 0)])
    assert found(index, chain(8), 2) == [4, 8]


def test_during_a_gap_the_old_knowledge_answers_and_a_new_epoch_voids_it(new: TableMaker) -> None:
    index, blocks = index_with(new, a=chain(4)), chain(4)
    assert index.apply(MemberId("a"), 1, 5, [BlocksCleared()]) is ApplyResult.GAP
    assert found(index, blocks, 1) == [4]
    assert index.apply(MemberId("a"), 2, 0, [stored_event(blocks, 0)]) is ApplyResult.GAP
    assert found(index, blocks, 1) == [0]
    assert index.stats().num_out_of_step == 1
    assert index.load_snapshot(KvSnapshot(MemberId("a"), 2, -1, ())) is ApplyResult.OK
    assert found(index, blocks, 1) == [4]


def test_pages_are_known_as_they_come_and_events_after_the_last(new: TableMaker) -> None:
    blocks = chain(24)
    index = index_with(new, a=chain(24, 1), b=blocks)
    index.apply(MemberId("a"), 1, 9, [])
    pages = [
        KvSnapshot(MemberId("a"), 1, 20, (stored_event(blocks[: start + 8], start),), number, number == 2)
        for number, start in enumerate((0, 8, 16))
    ]
    assert index.load_snapshot(pages[0]) is ApplyResult.PARTIAL
    assert found(index, chain(24, 1), 2) == [0, 0], "what was known before may no longer be true"
    assert found(index, blocks, 2) == [8, 24]
    assert index.apply(MemberId("a"), 1, 21, [BlocksRemoved(path_hash(blocks))]) is ApplyResult.PARTIAL
    assert index.load_snapshot(pages[1]) is ApplyResult.PARTIAL
    assert (found(index, blocks, 2), index.is_in_step(MemberId("a"))) == ([16, 24], False)
    assert index.load_snapshot(pages[2]) is ApplyResult.OK
    stride = index._table.stride
    assert (found(index, blocks, 2), index.is_in_step(MemberId("a"))) == ([23 // stride * stride, 24], True)


def test_a_removed_worker_is_forgotten_and_its_slot_is_free(new: TableMaker) -> None:
    index = index_with(new, a=chain(4), b=chain(4))
    index.remove_worker(MemberId("a"))
    assert found(index, chain(4), 2) == [0, 4]
    assert not index.is_in_step(MemberId("a"))
    assert index.apply(MemberId("a"), 1, 1, [stored_event(chain(4), 0)]) is ApplyResult.STALE
    assert index.load_snapshot(KvSnapshot(MemberId("a"), 1, 0, ())) is ApplyResult.STALE
    index.add_worker(MemberId("c"), 0)
    assert found(index, chain(4), 2) == [0, 4], "the new worker has nothing of the one before it"
    assert index.apply(MemberId("c"), 1, 1, []) is ApplyResult.GAP
    index.remove_worker(MemberId("nobody"))


def test_a_full_index_evicts_the_tails_of_what_was_not_used(new: TableMaker) -> None:
    index = index_with(new, max_blocks=24, a=chain(12), b=chain(12, 1))
    assert found(index, chain(12), 2) == [12, 0], "this is now used later than the other chain"
    index.apply(MemberId("a"), 1, 1, [stored_event(chain(8, 2), 0)])
    assert found(index, chain(8, 2), 2) == [8, 0]
    assert found(index, chain(12), 2) == [12, 0]
    assert found(index, chain(12, 1), 2) == [0, 4]
    stats = index.stats()
    stride = index._table.stride
    assert (stats.num_keys, stats.max_keys, stats.num_evicted) == (24 // stride, 24 // stride, 8 // stride)
    index.apply(MemberId("b"), 1, 1, [stored_event((*chain(12, 1), 7, 7, 7, 7), 12)])
    assert found(index, chain(12, 1), 2) == [0, 4]
    assert index.stats().num_refused == 4 // stride, "the block ahead of them was evicted"


def test_a_chain_longer_than_the_index_keeps_its_beginning(new: TableMaker) -> None:
    index = index_with(new, max_blocks=16, a=chain(8, 1), b=chain(40))
    assert found(index, chain(40), 2) == [0, 16]
    assert found(index, chain(8, 1), 2) == [0, 0]


def test_a_full_index_first_takes_room_from_workers_that_left(new: TableMaker) -> None:
    index = index_with(new, max_blocks=16, a=chain(8), b=chain(8, 1))
    index.remove_worker(MemberId("b"))
    index.add_worker(MemberId("c"), 1)
    assert index.load_snapshot(KvSnapshot(MemberId("c"), 1, 0, (stored_event(chain(8, 2), 0),))) is ApplyResult.OK
    assert found(index, chain(8), 2) == [8, 0]
    assert found(index, chain(8, 2), 2) == [0, 8]
    assert index.stats()[:6] == (16 // index._table.stride, 16 // index._table.stride, 2, 0, 0, 0)
    assert index.stats().num_bytes > 0


def test_malformed_hashes_of_a_message_change_nothing(new: TableMaker) -> None:
    index = index_with(new, a=chain(8))
    events = [
        BlocksStored(b"short", path_hashes(chain(4, 1)), 4, b"short"),
        BlocksStored(None, b"short"),
        BlocksRemoved(b"short"),
    ]
    events.append(BlocksStored(path_hash(chain(8)), b"short", 8, b"x"))
    assert index.apply(MemberId("a"), 1, 1, events) is ApplyResult.OK
    assert found(index, chain(8), 1) == [8]
    depths = np.zeros(1, np.int32)
    index.lookup(path_hashes(chain(8)) + b"short", depths)
    assert depths.tolist() == [8]
    assert index.stats().num_keys == 8 // index._table.stride


def test_depths_must_have_an_entry_for_each_slot(new: TableMaker) -> None:
    index = index_with(new, a=chain(4), b=chain(4))
    for wrong in (np.zeros(1, np.int32), np.zeros(2, np.int64), np.zeros(4, np.int32)[::2], np.zeros((2, 2), np.int32)):
        with pytest.raises(ValueError, match="depths must be a contiguous int32 array with at least 2 entries"):
            index.lookup(path_hashes(chain(4)), wrong)
    depths = np.zeros(2, np.int32)
    index.lookup(path_hashes(chain(4)), depths)
    index.add_worker(MemberId("c"), 2)
    with pytest.raises(ValueError, match="at least 3 entries"):
        index.lookup(path_hashes(chain(4)), depths)


# ------------------------------------------------------------ features


@pytest.fixture(params=["native", "plain"])
def features(request: pytest.FixtureRequest) -> FeatureIndex:
    """Returns an index of at most three items with one encoder in slot 5."""
    index = FeatureIndex(3, native_table(3) if request.param == "native" else PlainTable(3, 1))
    index.add_member(MemberId("encoder-a"), 5)
    return index


def feature_events(seq: int, epoch: int = 1, name: str = "encoder-a", **kwargs: Any) -> FeatureEvents:
    return FeatureEvents(MemberId(name), epoch, seq, **kwargs)


def test_features_follow_their_encoder(features: FeatureIndex) -> None:
    assert features.apply(feature_events(0, stored=("x",))) is ApplyResult.GAP
    assert features.holders(MmHash("x")) == []
    assert features.apply(feature_events(4, stored=("x", "y"), is_snapshot=True)) is ApplyResult.OK
    assert features.apply(feature_events(5, stored=("z",), removed=("x",))) is ApplyResult.OK
    assert [features.holders(MmHash(key)) for key in "xyz"] == [[], [5], [5]]
    assert features.apply(feature_events(7, removed=("y",))) is ApplyResult.OK
    assert features.holders(MmHash("y")) == []
    assert features.apply(feature_events(9, stored=("y",))) is ApplyResult.GAP
    assert features.apply(feature_events(0, name="encoder-z", stored=("y",))) is ApplyResult.STALE


def test_a_restarted_or_removed_encoder_holds_nothing(features: FeatureIndex) -> None:
    features.apply(feature_events(0, stored=("x",), is_snapshot=True))
    features.apply(feature_events(0, epoch=2, stored=("y",)))
    assert features.holders(MmHash("x")) == []
    features.apply(feature_events(-1, epoch=2, is_snapshot=True))
    assert features.holders(MmHash("y")) == [5]
    assert features.is_in_step(MemberId("encoder-a"))
    features.remove_member(MemberId("encoder-a"))
    assert features.holders(MmHash("y")) == []
    assert not features.is_in_step(MemberId("encoder-a"))
    assert features.stats().num_sources == 0


def test_the_item_that_was_not_used_for_longest_makes_room(features: FeatureIndex) -> None:
    features.add_member(MemberId("encoder-b"), 0)
    features.apply(feature_events(0, stored=("x", "y", "z"), is_snapshot=True))
    features.apply(feature_events(0, name="encoder-b", stored=("z", "x"), is_snapshot=True))
    assert sorted(features.holders(MmHash("x"))) == [0, 5]
    features.apply(feature_events(1, stored=("v",)))
    assert [sorted(features.holders(MmHash(key))) for key in "xyzv"] == [[0, 5], [], [0, 5], [5]]
    stats = features.stats()
    assert (stats.num_keys, stats.max_keys, stats.num_evicted, stats.num_refused) == (3, 3, 1, 0)
    features.check_invariants()

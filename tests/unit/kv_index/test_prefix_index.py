"""Tests the prefix index: holes, bounds, forgetting, and how much a lookup reads."""

from typing import Any

from fabric.contracts import BlockHash, BlocksRemoved, BlocksStored, FeatureEvents, KvSnapshot, MemberId
from fabric.contracts.messages import BlocksCleared
from kv_index import ApplyResult, FeatureIndex, PrefixIndex
from kv_index.holder_index import FIRST_PIECE_BLOCKS, HolderMasks

A, B = MemberId("worker-a"), MemberId("worker-b")


def chain(num_blocks: int, seed: int = 0) -> list[BlockHash]:
    return [BlockHash(bytes([seed]) * 8 + index.to_bytes(8, "little")) for index in range(num_blocks)]


def stored(blocks: list[BlockHash]) -> BlocksStored:
    return BlocksStored(None, b"".join(blocks))


def index_with(**worker_to_blocks: list[BlockHash]) -> PrefixIndex:
    index = PrefixIndex(10_000)
    for name, blocks in worker_to_blocks.items():
        assert index.load_snapshot(KvSnapshot(MemberId(name), 1, 0, (stored(blocks),))) is ApplyResult.OK
    return index


def test_lookup_counts_leading_blocks_per_worker() -> None:
    blocks = chain(40)
    index = index_with(a=blocks, b=blocks[:17], c=blocks[:1], d=blocks[1:], e=chain(40, seed=1))
    assert index.lookup(blocks) == {"a": 40, "b": 17, "c": 1}
    assert index.lookup(blocks[:10]) == {"a": 10, "b": 10, "c": 1}
    assert index.lookup([]) == {}


def test_a_prefix_may_end_anywhere_also_where_the_walk_goes_on_in_another_piece() -> None:
    blocks = chain(10 * FIRST_PIECE_BLOCKS)
    for length in range(1, 5 * FIRST_PIECE_BLOCKS):
        index = index_with(all=blocks, some=blocks[:length])
        assert index.lookup(blocks) == {"all": len(blocks), "some": length}, length


def test_a_hole_ends_the_prefix_until_it_is_filled() -> None:
    blocks = chain(30)
    index = index_with(a=blocks)
    index.apply(MemberId("a"), 1, 1, [BlocksRemoved(blocks[12])])
    assert index.lookup(blocks) == {"a": 12}
    index.apply(MemberId("a"), 1, 2, [BlocksStored(blocks[11], blocks[12])])
    assert index.lookup(blocks) == {"a": 30}


def test_clearing_keeps_other_workers() -> None:
    blocks = chain(4)
    index = index_with(a=blocks, b=blocks)
    index.apply(MemberId("a"), 1, 1, [BlocksCleared(), stored(blocks[:1])])
    assert index.lookup(blocks) == {"a": 1, "b": 4}


def test_during_a_gap_the_old_knowledge_answers_and_a_new_epoch_voids_it() -> None:
    blocks = chain(4)
    index = index_with(a=blocks)
    assert index.apply(MemberId("a"), 1, 5, [BlocksCleared()]) is ApplyResult.GAP
    assert index.lookup(blocks) == {"a": 4}
    assert index.apply(MemberId("a"), 2, 0, [stored(blocks)]) is ApplyResult.GAP
    assert index.lookup(blocks) == {}
    assert index.stats().num_out_of_step == 1
    assert index.load_snapshot(KvSnapshot(MemberId("a"), 2, -1, ())) is ApplyResult.OK
    assert index.lookup(blocks) == {"a": 4}


def test_a_removed_worker_is_forgotten_and_starts_anew() -> None:
    blocks = chain(4)
    index = index_with(a=blocks, b=blocks)
    index.remove_worker(MemberId("a"))
    assert index.lookup(blocks) == {"b": 4}
    assert not index.is_in_step(MemberId("a"))
    assert index.apply(MemberId("a"), 1, 1, [stored(blocks)]) is ApplyResult.GAP


def test_memory_is_bounded_and_what_was_known_stays() -> None:
    index = PrefixIndex(max_blocks=10)
    first, second = chain(8, seed=0), chain(8, seed=1)
    index.load_snapshot(KvSnapshot(A, 1, 0, (stored(first),)))
    index.load_snapshot(KvSnapshot(B, 1, 0, (stored(second), stored(first))))
    assert index.stats().num_keys == 10
    assert index.stats().num_refused == 1
    assert index.lookup(first) == {A: 8, B: 8}
    assert index.lookup(second) == {B: 2}


def test_a_full_index_makes_room_from_workers_that_left() -> None:
    index = PrefixIndex(max_blocks=10)
    index.load_snapshot(KvSnapshot(A, 1, 0, (stored(chain(10)),)))
    index.remove_worker(A)
    fresh = chain(10, seed=2)
    index.load_snapshot(KvSnapshot(B, 1, 0, (stored(fresh),)))
    assert index.lookup(fresh) == {B: 10}
    assert index.stats() == (10, 10, 1, 0, 0)


def test_bits_are_used_again_so_masks_stay_short() -> None:
    masks: HolderMasks[str] = HolderMasks(100)
    for number in range(1000):
        masks.add(MemberId(f"worker-{number}"), "key")
        masks.forget(MemberId(f"worker-{number}"))
    masks.add(A, "key")
    assert list(masks.members(masks.key_to_mask["key"])) == [A]
    assert masks.key_to_mask["key"].bit_length() <= 32


class CountedHashes(list[BlockHash]):
    """Counts the blocks that a lookup takes out."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        piece = super().__getitem__(key)
        self.num_read += len(piece) if isinstance(key, slice) else 1
        return piece


def test_a_miss_looks_at_one_small_piece_and_a_hit_at_little_more_than_its_length() -> None:
    blocks = chain(2000)
    index = index_with(a=blocks[:100], b=blocks[:20])
    miss = CountedHashes(chain(2000, seed=9))
    assert index.lookup(miss) == {}
    assert miss.num_read == FIRST_PIECE_BLOCKS
    hit = CountedHashes(blocks)
    assert index.lookup(hit) == {"a": 100, "b": 20}
    assert hit.num_read <= 2 * 100 + FIRST_PIECE_BLOCKS


def feature_events(seq: int, epoch: int = 1, **kwargs: Any) -> FeatureEvents:
    return FeatureEvents(MemberId("encoder-a"), epoch, seq, **kwargs)


def test_features_follow_their_encoder() -> None:
    index = FeatureIndex(100)
    assert index.apply(feature_events(0, stored=("x",))) is ApplyResult.GAP
    assert index.holders("x") == frozenset()
    assert index.apply(feature_events(4, stored=("x", "y"), is_snapshot=True)) is ApplyResult.OK
    assert index.apply(feature_events(5, stored=("z",), removed=("x",))) is ApplyResult.OK
    assert [index.holders(key) for key in "xyz"] == [frozenset(), {"encoder-a"}, {"encoder-a"}]
    assert index.apply(feature_events(7, removed=("y",))) is ApplyResult.OK
    assert index.holders("y") == frozenset()
    assert index.apply(feature_events(9, stored=("y",))) is ApplyResult.GAP


def test_a_restarted_or_removed_encoder_holds_nothing() -> None:
    index = FeatureIndex(100)
    index.apply(feature_events(0, stored=("x",), is_snapshot=True))
    index.apply(feature_events(0, epoch=2, stored=("y",)))
    assert index.holders("x") == frozenset()
    index.apply(feature_events(-1, epoch=2, is_snapshot=True))
    assert index.holders("y") == {"encoder-a"}
    index.remove_encoder(MemberId("encoder-a"))
    assert index.holders("y") == frozenset()

"""Tests the block pool: references, what is evicted first, and which events routers receive."""

from __future__ import annotations

import pytest
from scheduling_cases import sequence_id

from fabric.contracts import BlockHash, BlocksRemoved, BlocksStored, SequenceId
from llm_workers.scheduling import BlockPool
from llm_workers.scheduling.blocks import KvEventLog

A, B = sequence_id("a"), sequence_id("b")


def joined(text: str) -> bytes:
    return b"".join(hashes(text))


def hashes(text: str) -> list[BlockHash]:
    return [BlockHash(letter.encode() * 16) for letter in text]


def stored(pool: BlockPool, owner: SequenceId, text: str, parent: BlockHash | None = None) -> list[int]:
    """Allocates blocks of `owner`, publishes them under one letter of `text` each, and returns them."""
    return pool.publish(owner, parent, pool.allocate(owner, len(text)), hashes(text))


def test_freeing_twice_changes_nothing() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(A, 3)
    pool.free(A, blocks)
    pool.free(A, blocks)
    assert pool.num_free == 4
    taken = pool.allocate(B, 4)
    pool.free(A, blocks)
    assert pool.num_free == 0
    pool.check_invariants({B: taken})


def test_a_shared_block_stays_until_the_last_sequence_leaves() -> None:
    pool = BlockPool(4)
    blocks = stored(pool, A, "xy")
    pool.acquire(B, pool.lookup(hashes("xy")))
    pool.free(A, blocks)
    assert pool.num_used == 2
    pool.check_invariants({B: blocks})
    pool.free(B, blocks)
    assert (pool.num_used, pool.num_cached) == (0, 2)


def test_blocks_without_content_go_first_then_the_oldest_tail() -> None:
    pool = BlockPool(5)
    first = stored(pool, A, "xy")
    second = stored(pool, B, "uv")
    pool.free(A, first)
    pool.free(B, second)
    pool.drain_events()
    plain = pool.allocate(A, 1)
    assert pool.drain_events()[1] == []
    assert set(plain).isdisjoint(first + second)
    assert pool.allocate(A, 3) == [first[1], first[0], second[1]]
    assert pool.drain_events()[1] == [BlocksRemoved(joined("yxv"))]
    assert pool.lookup(hashes("uv")) == [second[0]]


def test_a_block_that_was_freed_without_content_is_given_away_before_cached_ones() -> None:
    pool = BlockPool(3)
    cached = stored(pool, A, "xy")
    plain = pool.allocate(B, 1)
    pool.free(A, cached)
    pool.free(B, plain)
    assert pool.allocate(A, 1) == plain
    assert pool.lookup(hashes("xy")) == cached


def test_equal_content_is_kept_once() -> None:
    pool = BlockPool(4)
    first = stored(pool, A, "xy")
    second = stored(pool, B, "xz")
    assert second[0] == first[0]
    assert pool.num_used == 3
    pool.check_invariants({A: first, B: second})
    events = pool.drain_events()[1]
    assert events == [BlocksStored(None, joined("xy")), BlocksStored(hashes("x")[0], joined("z"), 1)]


def test_event_numbers_are_consecutive_and_show_what_was_dropped() -> None:
    pool = BlockPool(8, KvEventLog(max_kept=2))
    assert pool.drain_events() == (1, [])
    parent = None
    for letter in "abc":
        stored(pool, A, letter, parent)
        parent = hashes(letter)[0]
    first_seq, events = pool.drain_events()
    assert first_seq == 2
    assert [event.hashes for event in events if isinstance(event, BlocksStored)] == [joined("b"), joined("c")]
    assert pool.drain_events() == (4, [])


def test_snapshot_has_parents_before_children() -> None:
    pool = BlockPool(8)
    stored(pool, A, "abc")
    stored(pool, B, "abde")
    (page,) = pool.snapshot(page_blocks=10)
    assert (page.last_seq, page.number, page.is_last) == (2, 0, True)
    assert page.chains == [BlocksStored(None, joined("abc")), BlocksStored(hashes("b")[0], joined("de"), 2)]


def test_a_snapshot_comes_in_pages_and_later_changes_do_not_reach_it() -> None:
    pool = BlockPool(16)
    first = stored(pool, A, "abcdefg")
    pages = pool.snapshot(page_blocks=3)
    c, f, d = hashes("c")[0], hashes("f")[0], hashes("d")[0]
    assert next(pages) == (1, [BlocksStored(None, joined("abc"))], 0, False)
    pool.free(A, first)
    pool.allocate(B, 16)
    assert next(pages) == (1, [BlocksStored(c, joined("def"), 3)], 1, False)
    assert next(pages) == (1, [BlocksStored(f, joined("g"), 6, d)], 2, True)
    assert next(pages, None) is None
    assert list(pool.snapshot(page_blocks=3)) == [(2, [], 0, True)]


def test_events_name_the_depth_and_the_last_block_of_the_group_ahead() -> None:
    pool = BlockPool(16)
    chain = "abcdefghij"
    for index, letter in enumerate(chain):
        stored(pool, A, letter, hashes(chain[index - 1])[0] if index else None)
    events = pool.drain_events()[1]
    assert [event.depth for event in events] == list(range(10))
    d, h = hashes("d")[0], hashes("h")[0]
    assert [event.anchor for event in events] == [None] * 4 + [d] * 4 + [h] * 2


def test_reclaimable_counts_what_others_do_not_share() -> None:
    pool = BlockPool(6)
    mine = stored(pool, A, "xy")
    theirs = stored(pool, B, "xzw")
    assert pool.num_reclaimable([mine]) == 1
    assert pool.num_reclaimable([theirs]) == 2
    assert pool.num_reclaimable([mine, theirs]) == 4


def test_invariants_see_a_forgotten_reference() -> None:
    pool = BlockPool(2)
    pool.allocate(A, 1)
    with pytest.raises(AssertionError, match="references differ"):
        pool.check_invariants({})


def _broken_at(block: int) -> BlockPool:
    """Returns a pool of eight cached blocks, of which one has lost its parent."""
    pool = BlockPool(8)
    chain = hashes("abcdefgh")
    blocks = pool.allocate(A, 8)
    pool.publish(A, None, blocks, chain)
    pool.free(A, blocks)
    pool._hash_to_parent[chain[block]] = hashes("z")[0]
    return pool


@pytest.mark.parametrize("block", range(8))
def test_at_rest_every_block_is_looked_at_in_turn(block: int) -> None:
    pool = _broken_at(block)
    for number in range(4):
        if number == block // 2:
            with pytest.raises(AssertionError, match="lost its parent"):
                pool.check_at_rest(2)
            return
        pool.check_at_rest(2)


def test_at_rest_a_forgotten_reference_is_seen_at_once() -> None:
    pool = BlockPool(1000)
    pool.check_at_rest(1)
    pool.allocate(A, 1)
    with pytest.raises(AssertionError, match="no sequence is there"):
        pool.check_at_rest(1)


def test_at_rest_a_pool_smaller_than_a_part_is_looked_at_once() -> None:
    pool = BlockPool(3)
    pool.check_at_rest(100)
    assert pool._num_checked == 3

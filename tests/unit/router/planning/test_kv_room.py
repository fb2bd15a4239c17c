"""Tests whether a request has room at a worker: by hand, against the worker's own scheduler, and at the cluster's
state."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from planning_samples import BLOCK_SIZE, SCHEME, SHAPE, query, worker_member, worker_report
from scheduling_cases import Bench, request, sequence_id

from fabric.contracts import BlocksStored, ContextLengthExceeded, FeatureStats, KvSnapshot, MemberId, WorkerReport
from router.planning import ClusterState
from router.planning.kv_room import BATCH_HEADROOM, RoomNeed, WorkerStocks, kv_room

W0, W1 = MemberId("w0"), MemberId("w1")


def stocks(*rows: tuple[int, int], **columns: list[float]) -> WorkerStocks:
    """Returns workers with (blocks in all, free blocks) and blocks of 4 tokens."""
    count = len(rows)

    def column(name: str, default: float, dtype: type) -> np.ndarray:
        return np.array(columns.get(name, [default] * count), dtype=dtype)

    return WorkerStocks(
        [MemberId(f"w{at}") for at in range(count)],
        column("block_sizes", 4, np.int64),
        np.array([total for total, _ in rows], dtype=np.int64),
        np.array([free for _, free in rows], dtype=np.int64),
        column("covered_blocks", 0, np.int64),
        column("blocks_per_s", 0, np.float64),
        column("inbox_bytes", 0, np.int64),
        column("is_usable", 1, np.bool_),
    )


def test_a_prompt_takes_whole_blocks_and_each_further_choice_one_more() -> None:
    assert kv_room(RoomNeed(9), stocks((10, 3))).verdict == "now"
    assert kv_room(RoomNeed(9), stocks((10, 2))).verdict == "later"
    assert kv_room(RoomNeed(8), stocks((10, 2))).verdict == "now"
    assert kv_room(RoomNeed(8, num_generated_tokens=1), stocks((10, 2))).verdict == "later"
    assert kv_room(RoomNeed(8, num_choices=3), stocks((10, 3))).verdict == "later"
    assert kv_room(RoomNeed(8, num_choices=3), stocks((10, 4))).verdict == "now"


def test_a_prompt_that_fills_the_whole_pool_waits_for_an_empty_worker() -> None:
    assert kv_room(RoomNeed(40), stocks((10, 9))).verdict == "later"
    assert kv_room(RoomNeed(40, 4), stocks((10, 10))).verdict == "now"
    assert kv_room(RoomNeed(41), stocks((10, 10))).verdict == "never"


def test_a_request_that_one_worker_could_never_take_goes_to_the_other() -> None:
    room = kv_room(RoomNeed(41), stocks((10, 10), (20, 3)))
    assert (room.verdict, room.too_small, room.nearest) == ("later", {W0}, W1)
    room = kv_room(RoomNeed(41), stocks((10, 10), (20, 3), block_sizes=[8, 4]))
    assert (room.verdict, room.too_small, room.nearest) == ("now", frozenset(), W0)


def test_the_wait_is_predicted_from_the_rate_at_which_blocks_come_back() -> None:
    """The prompt takes 6 blocks: the first worker lacks 4 at 2 per second, and the second one lacks 3 at 1."""
    room = kv_room(RoomNeed(23), stocks((10, 2), (10, 3), blocks_per_s=[2, 1]))
    assert (room.verdict, room.nearest, room.wait_s) == ("later", W1, 2.0)
    assert kv_room(RoomNeed(23), stocks((10, 2))).wait_s is None
    assert kv_room(RoomNeed(23), stocks((10, 6))).wait_s == 0.0


def test_cached_blocks_need_not_be_taken() -> None:
    assert kv_room(RoomNeed(23), stocks((10, 4), covered_blocks=[1])).verdict == "later"
    assert kv_room(RoomNeed(23), stocks((10, 4), covered_blocks=[2])).verdict == "now"


def test_a_feature_that_no_inbox_can_hold_is_refused() -> None:
    need = RoomNeed(4, max_unit_bytes=640)
    room = kv_room(need, stocks((10, 10), (10, 10), inbox_bytes=[512, 576]))
    assert (room.verdict, room.max_unit_bytes) == ("never", 576)
    assert kv_room(need, stocks((10, 10), (10, 10), inbox_bytes=[512, 640])).too_small == {W0}
    assert kv_room(need, stocks((10, 10))).verdict == "now", "the size of the inbox is unknown"


def test_unknown_sizes_and_missing_workers_block_nothing() -> None:
    assert kv_room(RoomNeed(1000), stocks()).verdict == "now"
    assert kv_room(RoomNeed(1000), stocks((10, 10), (0, 0))).verdict == "now"
    assert kv_room(RoomNeed(4), stocks((10, 10), is_usable=[False])).verdict == "later"


def test_a_batch_request_leaves_blocks_free() -> None:
    batch = RoomNeed(15, headroom=BATCH_HEADROOM)
    assert kv_room(batch, stocks((16, 5))).verdict == "later"
    assert kv_room(batch, stocks((16, 6))).verdict == "now"
    assert kv_room(RoomNeed(64, headroom=BATCH_HEADROOM), stocks((16, 16))).verdict == "now", (
        "an empty worker is enough"
    )


WORKER = st.tuples(st.integers(0, 40), st.integers(-10, 40), st.integers(0, 8), st.sampled_from([4, 16]))


@given(st.lists(WORKER, max_size=6), st.integers(1, 200), st.integers(1, 3))
def test_the_columns_equal_one_worker_after_another(
    workers: list[tuple[int, int, int, int]], num_tokens: int, num_choices: int
) -> None:
    """The model looks at one worker at a time, as a worker looks at its own pool."""
    verdicts = []
    for total, free, covered, block_size in workers:
        prompt = -(-num_tokens // block_size)
        if total and prompt > total:
            verdicts.append("never")
            continue
        fits = not total or min(max(0, prompt + num_choices - 1 - covered), total) <= free
        verdicts.append("now" if fits else "later")
    columns = stocks(
        *((total, free) for total, free, _, _ in workers),
        covered_blocks=[row[2] for row in workers],
        block_sizes=[row[3] for row in workers],
    )
    room = kv_room(RoomNeed(num_tokens, 0, num_choices), columns)
    expected = next((each for each in ("now", "later", "never") if each in verdicts), "now")
    assert room.verdict == expected
    assert room.too_small == {MemberId(f"w{at}") for at, each in enumerate(verdicts) if each == "never"}
    if room.verdict == "now" and workers:
        assert room.nearest is not None
        assert verdicts[int(room.nearest[1:])] == "now"


@given(st.integers(1, 3), st.integers(1, 30), st.integers(1, 45))
def test_a_worker_begins_at_once_what_has_room_now(num_running: int, length: int, num_tokens: int) -> None:
    """The real scheduler has requests that decode. It refuses a request for which no worker will ever have room, begins
    one for which there is room now, and lets any other wait."""
    bench = Bench(block_size=4, num_blocks=10, max_sequences=8, is_prefix_cache_enabled=False)
    for number in range(num_running):
        bench.add(request(f"runs-{number}", length, age=number))
        bench.step()
    stats = bench.scheduler.stats()
    assume(stats.num_decoding == num_running)
    free = stats.kv_blocks_total - stats.kv_blocks_used - stats.num_decoding
    total = stats.kv_blocks_total
    verdict = kv_room(RoomNeed(num_tokens), stocks((total, free))).verdict
    if verdict == "never":
        with pytest.raises(ContextLengthExceeded):
            bench.add(request("comes", num_tokens, age=100))
        return
    bench.add(request("comes", num_tokens, age=100))
    plan = bench.scheduler.plan_step()
    has_begun = sequence_id("comes") in {chunk.sequence_id for chunk in plan.chunks}
    if has_begun:
        assert verdict == "now"
    # A sequence whose last block is full takes one more in this very step, which no report can know.
    elif kv_room(RoomNeed(num_tokens), stocks((total, free - num_running))).verdict == "now":
        raise AssertionError("the worker lets a request wait that has room")


# ------------------------------------------------------------ the cluster's state


def sized(name: str, seq: int = 1, used: int = 0, queued: int = 0, total: int = 10, **fields: float) -> WorkerReport:
    return worker_report(name, seq, kv_blocks_used=used, kv_blocks_total=total, queued_tokens=queued, **fields)


def cluster(*names: str) -> ClusterState:
    state = ClusterState(SHAPE, BLOCK_SIZE, random.Random(1))
    state.update_members([worker_member(name) for name in names])
    return state


def blocks(count: int) -> RoomNeed:
    return RoomNeed(count * BLOCK_SIZE)


@pytest.mark.parametrize(("used", "queued", "most"), [(0, 0, 10), (4, 0, 6), (4, 3 * BLOCK_SIZE - 1, 3)])
def test_the_state_counts_what_is_used_and_what_is_queued(used: int, queued: int, most: int) -> None:
    state = cluster("w0")
    state.apply(sized("w0", used=used, queued=queued), 1.0)
    assert state.room(blocks(most), frozenset(), 1.0).verdict == "now"
    assert state.room(blocks(min(10, most + 1)), frozenset(), 1.0).verdict == ("now" if most == 10 else "later")
    assert state.room(blocks(12), frozenset(), 1.0).verdict == "never"


def test_what_was_dispatched_counts_until_a_report_contains_it() -> None:
    state = cluster("w0")
    state.apply(sized("w0"), 1.0)
    request = query(6 * BLOCK_SIZE)
    plan = state.plan(request, 1.0)
    state.note_dispatched(request, plan, 1.0)
    assert state.room(blocks(4), frozenset(), 1.0).verdict == "later"
    assert state.room(blocks(3), frozenset(), 1.0).verdict == "now"
    state.apply(sized("w0", 2, used=1, acknowledged=(request.attempt_id,)), 1.1)
    assert state.room(blocks(9), frozenset(), 1.1).verdict == "now"


def test_an_excluded_worker_may_have_room_later() -> None:
    state = cluster("w0", "w1")
    for name, total in (("w0", 10), ("w1", 20)):
        state.apply(sized(name, total=total), 1.0)
    assert state.room(blocks(15), frozenset({W1}), 1.0).verdict == "later"
    assert state.room(blocks(15), frozenset(), 1.0).too_small == {W0}
    state.exclude(W1, 5.0)
    assert state.room(blocks(15), frozenset(), 1.0).verdict == "later"
    assert state.room(blocks(15), frozenset(), 5.0).verdict == "now"


def test_cached_blocks_are_found_in_the_index() -> None:
    state = cluster("w0")
    state.apply(sized("w0", used=6, residence_s=2.0), 1.0)
    hashes = tuple(index.to_bytes(16, "little") for index in range(5))
    need = RoomNeed(6 * BLOCK_SIZE, scheme_to_hashes={SCHEME: b"".join(hashes)})
    room = state.room(need, frozenset(), 1.0)
    assert (room.verdict, room.wait_s) == ("later", pytest.approx(2 / 3))
    state.apply(KvSnapshot(W0, 1, 0, (BlocksStored(None, b"".join(hashes[:2])),)), 1.0)
    assert state.room(need, frozenset(), 1.0).verdict == "now"


def test_a_silent_worker_blocks_nothing_but_keeps_its_size() -> None:
    state = cluster("w0")
    state.apply(sized("w0", used=10), 1.0)
    assert state.room(blocks(4), frozenset(), 2.0).verdict == "later"
    assert state.room(blocks(4), frozenset(), 60.0).verdict == "now"
    assert state.room(blocks(12), frozenset(), 60.0).verdict == "never"


def test_an_inbox_limits_a_feature() -> None:
    state = cluster("w0")
    report = sized("w0")
    state.apply(msgspec.structs.replace(report, features=FeatureStats(inbox_bytes_total=1024)), 1.0)
    assert state.room(RoomNeed(4, max_unit_bytes=1088), frozenset(), 1.0).verdict == "never"
    assert state.room(RoomNeed(4, max_unit_bytes=1024), frozenset(), 1.0).verdict == "now"

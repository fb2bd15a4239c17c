"""Tests whether a request has room at a worker: by hand, against the worker's own scheduler, and at the cluster's
state."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from planning_samples import BLOCK_SIZE, SCHEME, SHAPE, encoder_member, image, query, worker_member, worker_report
from scheduling_cases import Bench, attempt_id, request, sequence_id, unit

from fabric.contracts import (
    BlocksStored,
    ContextLengthExceeded,
    FeatureStats,
    KvScheme,
    KvSnapshot,
    MemberId,
    WorkerReport,
)
from router.planning import ClusterState
from router.planning.kv_room import BATCH_HEADROOM, RoomColumns, RoomNeed, WorkerStocks, kv_room

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
        column("shared_blocks", 0, np.int64),
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


def test_the_rate_of_all_workers_counts_the_tokens_of_their_blocks() -> None:
    """One worker gives back 2 blocks of 4 tokens per second, the other one 1 block of 32."""
    unlike = {"blocks_per_s": [2, 1], "block_sizes": [4, 32]}
    assert kv_room(RoomNeed(23), stocks((10, 2), (10, 0), **unlike)).tokens_per_s == 40.0
    assert kv_room(RoomNeed(23), stocks((10, 2), (10, 0), is_usable=[1, 0], **unlike)).tokens_per_s == 8.0


def test_shared_blocks_need_not_be_taken() -> None:
    assert kv_room(RoomNeed(23), stocks((10, 4), shared_blocks=[1])).verdict == "later"
    assert kv_room(RoomNeed(23), stocks((10, 4), shared_blocks=[2])).verdict == "now"


def test_a_worker_takes_blocks_that_are_only_cached_from_the_free_ones() -> None:
    """The real scheduler has five blocks of the prompt cached, and the sequence that decodes uses four. The request
    takes seven: the cached ones and two more, but one of these is not there."""
    bench = Bench(block_size=4, num_blocks=10, max_sequences=8)
    bench.add(request("was-here", range(100, 120), age=0))
    bench.step()
    bench.scheduler.abort(attempt_id("was-here"))
    bench.add(request("runs", 13, age=1))
    bench.step()
    stats = bench.scheduler.stats()
    assert (stats.kv_blocks_used, stats.num_decoding) == (4, 1)
    bench.add(request("comes", range(100, 128), age=2))
    plan = bench.plan()
    assert sequence_id("comes") not in {chunk.sequence_id for chunk in plan.chunks}
    state = cluster("w0")
    state.apply(msgspec.structs.replace(sized("w0"), engine=stats), 1.0)
    hashes = b"".join(index.to_bytes(16, "little") for index in range(7))
    state.apply(KvSnapshot(W0, 1, 0, (BlocksStored(None, hashes[: 5 * 16]),)), 1.0)
    need = RoomNeed(7 * BLOCK_SIZE, scheme_to_hashes={SCHEME: hashes})
    assert state.room(need, frozenset(), 1.0).verdict == "later"


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
    for total, free, shared, block_size in workers:
        prompt = -(-num_tokens // block_size)
        if total and prompt > total:
            verdicts.append("never")
            continue
        fits = not total or min(max(0, prompt + num_choices - 1 - shared), total) <= free
        verdicts.append("now" if fits else "later")
    columns = stocks(
        *((total, free) for total, free, _, _ in workers),
        shared_blocks=[row[2] for row in workers],
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


def test_tokens_behind_a_missing_medium_count_once_until_they_are_computed() -> None:
    """The request takes three blocks of text ahead of the picture, and four for the picture and what follows."""
    state = cluster("w0")
    state.update_members([worker_member("w0"), encoder_member("e0")])
    state.apply(sized("w0"), 1.0)
    request = query(3 * BLOCK_SIZE, image(0, num_tokens=3 * BLOCK_SIZE), BLOCK_SIZE)

    def has(count: int) -> bool:
        return state.room(blocks(count), frozenset(), 1.0).verdict == "now"

    state.note_dispatched(request, state.plan(request, 1.0), 1.0)
    assert (has(2), has(3)) == (True, False), "one block more, because the sequence may take it"
    waiting = sized("w0", 2, used=3, behind_tokens=4 * BLOCK_SIZE, acknowledged=(request.attempt_id,))
    state.apply(waiting, 1.1)
    assert (has(3), has(4)) == (True, False)
    state.apply(sized("w0", 3, used=3, queued=4 * BLOCK_SIZE), 1.2)
    assert (has(3), has(4)) == (True, False), "the picture has come"
    state.apply(sized("w0", 4, used=7, num_decoding=1), 1.3)
    assert (has(2), has(3)) == (True, False)
    state.note_ended(request.attempt_id, 1.4)
    state.apply(sized("w0", 5), 1.4)
    assert has(10)


def test_another_routers_request_that_waits_for_a_feature_keeps_its_room() -> None:
    """The worker's reports say what it still has to compute, whichever router sent it."""
    bench = Bench(block_size=BLOCK_SIZE, num_blocks=10)
    bench.add(request("theirs", 7 * BLOCK_SIZE, [("cat", 2 * BLOCK_SIZE, BLOCK_SIZE)]))
    state, seen = cluster("w0"), []

    def report() -> None:
        stats = bench.scheduler.stats()
        seen.append((stats.kv_blocks_used, stats.queued_tokens // BLOCK_SIZE, stats.behind_tokens // BLOCK_SIZE))
        state.apply(msgspec.structs.replace(sized("w0", len(seen)), engine=stats), 1.0)

    report()
    assert state.room(blocks(3), frozenset(), 1.0).verdict == "now"
    assert state.room(blocks(4), frozenset(), 1.0).verdict == "later"
    bench.step()
    report()
    bench.land(unit("cat"))
    report()
    assert state.room(blocks(3), frozenset(), 1.0).verdict == "now"
    assert state.room(blocks(4), frozenset(), 1.0).verdict == "later"
    bench.step()
    report()
    assert seen == [(0, 2, 5), (2, 0, 5), (2, 5, 0), (7, 0, 0)]
    bench.scheduler.abort(attempt_id("theirs"))
    report()
    assert state.room(blocks(10), frozenset(), 1.0).verdict == "now"


def test_an_excluded_worker_may_have_room_later() -> None:
    state = cluster("w0", "w1")
    for name, total in (("w0", 10), ("w1", 20)):
        state.apply(sized(name, total=total), 1.0)
    assert state.room(blocks(15), frozenset({W1}), 1.0).verdict == "later"
    assert state.room(blocks(15), frozenset(), 1.0).too_small == {W0}
    state.exclude(W1, 5.0)
    assert state.room(blocks(15), frozenset(), 1.0).verdict == "later"
    assert state.room(blocks(15), frozenset(), 5.0).verdict == "now"


def test_cached_blocks_count_while_an_open_request_uses_them() -> None:
    """The worker knows ten blocks of the prompt. While a request that begins with eight of them is open there, these
    are in use, and the next request takes none for them."""
    state = cluster("w0")
    state.apply(sized("w0", total=20, used=12, residence_s=2.0), 1.0)
    hashes = b"".join(index.to_bytes(16, "little") for index in range(12))
    need = RoomNeed(12 * BLOCK_SIZE, scheme_to_hashes={SCHEME: hashes})
    room = state.room(need, frozenset(), 1.0)
    assert (room.verdict, room.wait_s) == ("later", pytest.approx(4 / 6))
    state.apply(KvSnapshot(W0, 1, 0, (BlocksStored(None, hashes[: 10 * 16]),)), 1.0)
    assert state.room(need, frozenset(), 1.0).verdict == "later", "no sequence is known to use them"
    request = query(8 * BLOCK_SIZE)
    state.note_dispatched(request, state.plan(request, 1.0), 1.0)
    state.apply(sized("w0", 2, total=20, used=12, acknowledged=(request.attempt_id,)), 1.1)
    assert state.room(need, frozenset(), 1.1).verdict == "now"
    state.note_ended(request.attempt_id, 1.1)
    assert state.room(need, frozenset(), 1.1).verdict == "later"


def test_workers_with_other_block_sizes_are_counted_in_their_own_blocks() -> None:
    """The second worker has blocks of twice the size, so ten of its blocks hold what twenty of the first one do."""
    state = ClusterState(SHAPE, BLOCK_SIZE, random.Random(1))
    large = msgspec.structs.replace(worker_member("w1"), kv_scheme=KvScheme("other", 2 * BLOCK_SIZE))
    state.update_members([worker_member("w0"), large])
    for name in ("w0", "w1"):
        state.apply(sized(name), 1.0)
    assert state.room(blocks(11), frozenset(), 1.0).too_small == {W0}
    assert state.room(blocks(20), frozenset(), 1.0).verdict == "now"
    assert state.room(blocks(21), frozenset(), 1.0).verdict == "never"
    hashes = b"".join(index.to_bytes(16, "little") for index in range(8))
    theirs = replace(query(16 * BLOCK_SIZE, excluded=["w0"]), scheme_to_hashes={large.kv_scheme: hashes})
    state.note_dispatched(theirs, state.plan(theirs, 1.0), 1.0)
    state.apply(sized("w1", 2, used=8, acknowledged=(theirs.attempt_id,)), 1.0)
    need = RoomNeed(20 * BLOCK_SIZE, scheme_to_hashes={large.kv_scheme: hashes})
    assert state.room(need, frozenset(), 1.0).verdict == "later"
    state.apply(KvSnapshot(W1, 1, 0, (BlocksStored(None, hashes),)), 1.0)
    assert state.room(need, frozenset(), 1.0).verdict == "now"


@pytest.mark.parametrize("second_size", [BLOCK_SIZE, 2 * BLOCK_SIZE])
def test_the_state_predicts_returned_tokens_by_the_block_size_of_each_worker(second_size: int) -> None:
    """Each worker uses 10 blocks for 20 s each, so it gives back half a block per second."""
    state = ClusterState(SHAPE, BLOCK_SIZE, random.Random(1))
    second = msgspec.structs.replace(worker_member("w1"), kv_scheme=KvScheme("other", second_size))
    state.update_members([worker_member("w0"), second])
    for name in ("w0", "w1"):
        state.apply(sized(name, used=10, residence_s=20.0), 1.0)
    waits = state.room(blocks(2), frozenset(), 1.0)
    assert (waits.verdict, waits.tokens_per_s) == ("later", 0.5 * BLOCK_SIZE + 0.5 * second_size)
    assert state.room(blocks(2), frozenset({W1}), 1.0).tokens_per_s == 0.5 * BLOCK_SIZE


def test_a_silent_worker_has_what_it_can_have_given_back() -> None:
    """It uses 10 blocks, each for 20 s, so it gives back one in 2 s."""
    state = cluster("w0", "w1")
    state.apply(sized("w0", used=10, residence_s=20.0), 1.0)
    state.apply(sized("w1", used=10), 1.0)
    assert state.room(blocks(4), frozenset(), 2.0).verdict == "later"
    assert state.room(blocks(4), frozenset(), 8.9).verdict == "later"
    assert state.room(blocks(4), frozenset(), 9.1).verdict == "now"
    assert state.room(blocks(4), frozenset({W0}), 1e6).verdict == "later", "nothing is known of its rate"
    assert state.room(blocks(10), frozenset(), 1e6).verdict == "now"
    assert state.room(blocks(12), frozenset(), 1e6).verdict == "never"


def test_an_inbox_limits_a_feature() -> None:
    state = cluster("w0")
    report = sized("w0")
    state.apply(msgspec.structs.replace(report, features=FeatureStats(inbox_bytes_total=1024)), 1.0)
    assert state.room(RoomNeed(4, max_unit_bytes=1088), frozenset(), 1.0).verdict == "never"
    assert state.room(RoomNeed(4, max_unit_bytes=1024), frozenset(), 1.0).verdict == "now"


NAMES = st.sampled_from(["w0", "w1", "w2", "w3"])
CHANGES = st.one_of(
    st.tuples(st.just("add"), NAMES, st.sampled_from([16, 16, 32])),
    st.tuples(st.just("remove"), NAMES, st.just(0)),
    st.tuples(st.just("report"), NAMES, st.integers(0, 40)),
    st.tuples(st.just("promise"), NAMES, st.integers(0, 200)),
    st.tuples(st.just("wait"), NAMES, st.integers(1, 5)),
)


@given(
    st.lists(CHANGES, max_size=40),
    st.integers(1, 700),
    st.integers(1, 2),
    st.sets(NAMES, max_size=1),
    st.dictionaries(NAMES, st.sampled_from([32, 96, 320])),
)
def test_columns_that_change_in_place_equal_columns_made_at_once(
    changes: list[tuple[str, str, int]], num_tokens: int, num_choices: int, barred: set[str], covered: dict[str, int]
) -> None:
    """The model keeps a dict of workers, and asks `kv_room` about columns that it makes of it. A worker that is silent
    for more than 3 s gives back a tenth of what it used, per second."""
    columns, now, seq = RoomColumns(3.0), 10.0, 0
    model: dict[str, dict[str, float]] = {}
    for what, name, number in changes:
        now += number if what == "wait" else 0.0
        if what == "add":
            columns.add(MemberId(name), number)
            model.pop(name, None)
            model[name] = {"size": number, "total": 0, "used": 0, "promised": 0, "at_s": now, "inbox": 0}
        elif what == "remove":
            columns.remove(MemberId(name))
            model.pop(name, None)
        elif what == "promise":
            columns.promise(MemberId(name), number, 1)
            if name in model:
                model[name]["promised"] = -(-number // model[name]["size"]) + 1
        elif what == "report" and name in model:
            seq += 1
            columns.report(sized(name, seq, used=number, total=40, queued=17, num_decoding=2, residence_s=10.0), now)
            used = number + -(-17 // model[name]["size"]) + 2
            model[name] |= {"total": 40, "used": used, "rate": number / 10, "at_s": now}
    rows = list(model.items())
    free = []
    for _, row in rows:
        silent_s = now - row["at_s"]
        back = int(row.get("rate", 0.0) * silent_s) if silent_s > 3.0 else 0
        free.append(min(row["total"], row["total"] - row["used"] - row["promised"] + back))
    expected = kv_room(
        RoomNeed(num_tokens, 0, num_choices),
        stocks(
            *((int(row["total"]), int(each)) for (_, row), each in zip(rows, free, strict=True)),
            block_sizes=[row["size"] for _, row in rows],
            is_usable=[name not in barred for name, _ in rows],
            shared_blocks=[covered.get(name, 0) // row["size"] for name, row in rows],
            blocks_per_s=[row.get("rate", 0.0) for _, row in rows],
        ),
    )
    need = RoomNeed(num_tokens, 0, num_choices)
    room = columns.room(need, covered, barred, now)
    assert room.verdict == expected.verdict
    if room.verdict == "later":
        # Rows have another order than the model's, so another one of equally near workers may be named.
        assert room.wait_s == (None if expected.wait_s is None else pytest.approx(expected.wait_s))
        assert (room.nearest is None) == (expected.nearest is None)
    assert {rows[int(each[1:])][0] for each in expected.too_small} == room.too_small
    at_once = columns.room_at_once(need, now)
    if at_once is not None and not barred:
        assert at_once.verdict == expected.verdict == "now"
        assert not room.too_small

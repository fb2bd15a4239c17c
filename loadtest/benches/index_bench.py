"""Runs `weft bench index`: measures what the router's index of prefixes takes, in processor time of one thread.

It fills indexes of 100,000 and of 1,000,000 blocks with chains of 128 blocks, of which one is held by every worker, and
times full hits, new blocks in an index with room and in a full one, a snapshot that comes in pages, and the forgetting
of a worker that held everything. The same work runs on Dynamo's `RadixTree` where `ai-dynamo-runtime` is installed, and
on the table in Python.

`measure_index` is for other benches that print these figures beside their own.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fabric.contracts import ANCHOR_STRIDE, BlockHash, BlocksStored, KvSnapshot, MemberId
from kv_index import PlainTable, PrefixIndex
from llm_workers.engine_thread import SNAPSHOT_PAGE_BLOCKS
from llm_workers.scheduling import chain_pages
from loadtest.bench_result import Bar, BenchResult

DEPTH = 128
"""Every chain has this many blocks."""
NUM_TIMED = 4000
EVENTS_AT_ONCE = 200
"""Dynamo's tree gets this many events before the bench waits for it."""
SNAPSHOT_BLOCKS = 100_000
MAX_HIT_US = {64: 6.0, 1000: 10.0}
MAX_APPLY_US = 20.0
MAX_BLOCK_BYTES = 60.0
MAX_STALL_MS = 1.0


class IndexCase(NamedTuple):
    num_workers: int
    num_blocks: int


CASES = (IndexCase(64, 100_000), IndexCase(64, 1_000_000), IndexCase(1000, 1_000_000))


class IndexFigures(NamedTuple):
    """Holds the rows of a table (the first is the heading) and the bars."""

    rows: list[list[str]]
    bars: list[Bar]
    notes: list[str]


class CallTimes(NamedTuple):
    """Holds percentiles of the microseconds of a call."""

    p50: float
    p99: float
    longest: float

    def __str__(self) -> str:
        return f"{self.p50:.1f} / {self.p99:.1f}"


def run(options: Sequence[str] = ()) -> BenchResult:
    parser = argparse.ArgumentParser(prog="weft bench index", allow_abbrev=False)
    parser.add_argument("--calls", type=int, default=NUM_TIMED, help="times this many calls of each kind")
    asked = parser.parse_args(options)
    return BenchResult(*measure_index(asked.calls))


def measure_index(num_timed: int = NUM_TIMED) -> IndexFigures:
    """Measures the index in C, the one in Python, and Dynamo's where it is installed."""
    rows = [
        [
            "index",
            "workers",
            "blocks",
            "full hit (us)",
            "hit elsewhere (us)",
            "128 new blocks (us)",
            "the same when full (us)",
            "bytes per block",
            "snapshot (ms)",
            "page (ms)",
            "longest call while forgetting (ms)",
        ]
    ]
    bars: list[Bar] = []
    for case in CASES:
        row, case_bars = _measure_weft("Weft", case, PrefixIndex(case.num_blocks), num_timed)
        rows.append(row)
        bars += case_bars
    plain = PrefixIndex(CASES[0].num_blocks, PlainTable(CASES[0].num_blocks, ANCHOR_STRIDE))
    rows.append(_measure_weft("Weft without a compiler", CASES[0], plain, num_timed)[0])
    notes = [
        "Times are p50 / p99 of one thread's processor time. Hits elsewhere are chains that one worker holds, each "
        "looked up once. A snapshot of 100,000 blocks comes in pages of 2,048 blocks; a page is p50 / p99.",
        f"A page takes the worker {_page_times()} ms to make (p50 / p99).",
    ]
    try:
        from dynamo._core import RadixTree  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        notes.append("Dynamo's RadixTree was not measured: `ai-dynamo-runtime` is not installed.")
    else:
        logging.getLogger(__name__).info("measuring Dynamo's RadixTree")
        rows += [_measure_dynamo(RadixTree, case, num_timed) for case in CASES]
        notes.append(
            "Dynamo's tree runs in a thread of its own, so its times are those of the whole process. It takes events "
            "as JSON, which is made outside of the times but read inside; 128 new blocks are the mean over all "
            "events of a filling."
        )
    return IndexFigures(rows, bars, notes)


# ------------------------------------------------------------ Weft


def _measure_weft(name: str, case: IndexCase, index: PrefixIndex, num_timed: int) -> tuple[list[str], list[Bar]]:
    rng = np.random.default_rng(7)
    workers = [MemberId(f"worker-{number}") for number in range(case.num_workers)]
    feed = _WeftFeed(index, workers)
    shared = rng.bytes(16 * DEPTH)
    for number in range(case.num_workers):
        feed.store(number, shared)
    chains: list[bytes] = []
    filling: list[float] = []
    for number in range(case.num_blocks // DEPTH - 1):
        chains.append(rng.bytes(16 * DEPTH))
        filling.append(feed.store(number % case.num_workers, chains[-1]))
    num_bytes = index.stats().num_bytes / case.num_blocks
    depths = np.zeros(case.num_workers, dtype=np.int32)
    hit = _times(_timed(lambda: index.lookup(shared, depths)) for _ in range(num_timed))
    assert depths.min() == DEPTH, "every worker holds the shared chain"
    elsewhere = _times(
        _timed(lambda at=at: index.lookup(chains[at], depths))  # type: ignore[misc]
        for at in rng.integers(0, len(chains), num_timed).tolist()
    )
    assert depths.max() == DEPTH, "the index has room for all chains"
    apply = _times(iter(filling[-num_timed:]))
    full = _times(feed.store(number % case.num_workers, rng.bytes(16 * DEPTH)) for number in range(num_timed))
    snapshot_ms, page = _load_snapshot(index, workers[0])
    forgetting_ms = _forget(index, feed, workers[0])
    sizes = [str(case.num_workers), f"{case.num_blocks:,}"]
    times = [str(hit), str(elsewhere), str(apply), str(full)]
    rest = [f"{snapshot_ms:.1f}", f"{page.p50 / 1000:.2f} / {page.p99 / 1000:.2f}", f"{forgetting_ms:.2f}"]
    label = f"{case.num_workers} workers, {case.num_blocks:,} blocks"
    bars = [
        Bar(f"full hit of 128 blocks, {label}", hit.p50, MAX_HIT_US[case.num_workers], "us", is_max=True),
        Bar(f"128 new blocks, {label}", apply.p50, MAX_APPLY_US, "us", is_max=True),
        Bar(f"bytes per block, {label}", num_bytes, MAX_BLOCK_BYTES, "bytes", is_max=True),
        Bar(f"longest call while forgetting, {label}", forgetting_ms, MAX_STALL_MS, "ms", is_max=True),
    ]
    return [name, *sizes, *times, f"{num_bytes:.0f}", *rest], bars


class _WeftFeed:
    """Feeds chains of the workers to an index as their events."""

    def __init__(self, index: PrefixIndex, workers: Sequence[MemberId]) -> None:
        self._index = index
        self._workers = workers
        self.next_seqs = [0] * len(workers)
        for slot, worker_id in enumerate(workers):
            index.add_worker(worker_id, slot)
            index.load_snapshot(KvSnapshot(worker_id, 1, -1, ()))

    def store(self, number: int, chain: bytes) -> float:
        """Returns the microseconds that the index took."""
        events = (BlocksStored(None, chain),)
        taken = _timed(lambda: self._index.apply(self._workers[number], 1, self.next_seqs[number], events))
        self.next_seqs[number] += 1
        return taken


def _snapshot_pages(worker_id: MemberId, num_blocks: int) -> Iterator[KvSnapshot]:
    parents: dict[BlockHash, BlockHash | None] = {}
    parent: BlockHash | None = None
    for number in range(num_blocks):
        block = BlockHash((number + 1).to_bytes(8, "little") + bytes(8))
        parents[block] = parent if number % DEPTH else None
        parent = block
    for page in chain_pages(0, parents, SNAPSHOT_PAGE_BLOCKS):
        yield KvSnapshot(worker_id, 2, page.last_seq, tuple(page.chains), page.number, page.is_last)


def _load_snapshot(index: PrefixIndex, worker_id: MemberId) -> tuple[float, CallTimes]:
    """Returns the milliseconds of all pages, and the times of a page."""
    pages = list(_snapshot_pages(worker_id, min(SNAPSHOT_BLOCKS, index.stats().max_keys)))
    taken = [_timed(lambda page=page: index.load_snapshot(page)) for page in pages]  # type: ignore[misc]
    assert index.is_in_step(worker_id), "all pages were loaded"
    return sum(taken) / 1000, _times(iter(taken))


def _forget(index: PrefixIndex, feed: _WeftFeed, worker_id: MemberId) -> float:
    """Removes the worker and sends empty messages of another one until the table is swept. Returns the milliseconds of
    the longest call."""
    other, calls = MemberId("another worker"), index.stats().max_keys // 1000
    index.add_worker(other, len(feed.next_seqs))
    index.load_snapshot(KvSnapshot(other, 1, -1, ()))
    taken = [_timed(lambda: index.remove_worker(worker_id))]
    taken += [_timed(lambda: index.apply(other, 1, 0, ())) for _ in range(calls)]
    return max(taken) / 1000


def _page_times() -> str:
    """Returns the milliseconds in which a worker makes a page of a snapshot of 100,000 blocks."""
    pages = _snapshot_pages(MemberId("worker"), SNAPSHOT_BLOCKS)
    next(pages)
    times = _times(_timed(lambda: next(pages, None)) for _ in range(SNAPSHOT_BLOCKS // SNAPSHOT_PAGE_BLOCKS))
    return f"{times.p50 / 1000:.2f} / {times.p99 / 1000:.2f}"


# ------------------------------------------------------------ Dynamo


def _measure_dynamo(tree_type: Callable[[], Any], case: IndexCase, num_timed: int) -> list[str]:
    rng = np.random.default_rng(7)
    tree, num_events = tree_type(), 0

    def event_of(hashes: Sequence[int]) -> bytes:
        nonlocal num_events
        num_events += 1
        blocks = [{"block_hash": block, "tokens_hash": block} for block in hashes]
        event = {"event_id": num_events, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
        return json.dumps(event).encode()

    def chain() -> list[int]:
        numbers: npt.NDArray[np.int64] = rng.integers(0, 1 << 62, DEPTH)
        hashes: list[int] = numbers.tolist()
        return hashes

    shared = chain()
    for worker in range(case.num_workers):
        tree.apply_event(worker, event_of(shared))
    chains: list[list[int]] = []
    apply_us = 0.0
    for _ in range(0, case.num_blocks // DEPTH - 1, EVENTS_AT_ONCE):
        fresh = [chain() for _ in range(EVENTS_AT_ONCE)]
        events = [event_of(each) for each in fresh]
        first = len(chains)
        chains += fresh

        def apply(first: int = first, events: list[bytes] = events) -> None:
            for number, event in enumerate(events, first):
                tree.apply_event(number % case.num_workers, event)
            tree.find_matches(shared[:1])  # The tree answers when it has taken in the events.

        apply_us += _timed(apply, time.process_time_ns)
    apply_us /= len(chains)
    hit = _times(_timed(lambda: tree.find_matches(shared), time.process_time_ns) for _ in range(num_timed))
    assert len(tree.find_matches(shared).scores) == case.num_workers, "every worker holds the shared chain"
    elsewhere = _times(
        _timed(lambda at=at: tree.find_matches(chains[at]), time.process_time_ns)  # type: ignore[misc]
        for at in rng.integers(0, len(chains), num_timed).tolist()
    )
    sizes = [str(case.num_workers), f"{case.num_blocks:,}"]
    return ["Dynamo RadixTree", *sizes, str(hit), str(elsewhere), f"{apply_us:.1f}", "-", "-", "-", "-", "-"]


# ------------------------------------------------------------ time


def _timed(call: Callable[[], object], clock_ns: Callable[[], int] = time.thread_time_ns) -> float:
    """Returns the microseconds of processor time that a call takes, in this thread or by another clock."""
    started = clock_ns()
    call()
    return (clock_ns() - started) / 1000


def _times(taken: Iterator[float]) -> CallTimes:
    p50, p99, longest = np.percentile(list(taken), [50, 99, 100]).tolist()
    return CallTimes(p50, p99, longest)

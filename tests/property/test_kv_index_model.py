"""Checks the indexes against a dict of sets: with a perfect transport, and with one that loses, repeats and
restarts."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fabric.contracts import (
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    FeatureEvents,
    KvEvent,
    KvSnapshot,
    MemberId,
    MmHash,
    split_hashes,
)
from fabric.contracts.messages import BlocksCleared
from kv_index import ApplyResult, FeatureIndex, PrefixIndex

BLOCKS = [BlockHash(bytes([number]) * 16) for number in range(24)]
"""The first 12 blocks are a chain in this order, and the others form chains that branch off it or stand alone."""
CHAINS = [BLOCKS[:12], BLOCKS[:4] + BLOCKS[12:18], BLOCKS[:8] + BLOCKS[18:24], BLOCKS[18:24]]
WORKERS = [MemberId(f"worker-{number}") for number in range(4)]

block_lists = st.lists(st.sampled_from(BLOCKS), max_size=8).map(b"".join)
chain_pieces = st.tuples(st.sampled_from(CHAINS), st.integers(0, 12), st.integers(0, 12)).map(
    lambda piece: b"".join(piece[0][piece[1] : piece[2]])
)
kv_events: st.SearchStrategy[KvEvent] = st.one_of(
    st.builds(BlocksStored, st.none(), chain_pieces),
    st.builds(BlocksRemoved, block_lists),
    st.builds(BlocksCleared),
)


def replay(held: set[BlockHash], events: Sequence[KvEvent]) -> None:
    for event in events:
        if isinstance(event, BlocksStored):
            held.update(split_hashes(event.hashes))
        elif isinstance(event, BlocksRemoved):
            held.difference_update(split_hashes(event.hashes))
        else:
            held.clear()


def leading(held: set[BlockHash], chain: Sequence[BlockHash]) -> int:
    return next((number for number, block in enumerate(chain) if block not in held), len(chain))


def expected(worker_to_held: dict[MemberId, set[BlockHash]], chain: Sequence[BlockHash]) -> dict[MemberId, int]:
    counts = {worker: leading(held, chain) for worker, held in worker_to_held.items()}
    return {worker: count for worker, count in counts.items() if count}


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(WORKERS), st.lists(kv_events, max_size=4)), max_size=25), st.integers(1, 30))
def test_lookup_equals_the_model_and_never_exceeds_its_bound(
    messages: list[tuple[MemberId, list[KvEvent]]], max_blocks: int
) -> None:
    exact, small = PrefixIndex(1000), PrefixIndex(max_blocks)
    worker_to_held: dict[MemberId, set[BlockHash]] = {worker: set() for worker in WORKERS}
    worker_to_seq = dict.fromkeys(WORKERS, 0)
    for index in (exact, small):
        for worker in WORKERS:
            index.load_snapshot(KvSnapshot(worker, 1, -1, ()))
    for worker, events in messages:
        for index in (exact, small):
            assert index.apply(worker, 1, worker_to_seq[worker], events) is ApplyResult.OK
        worker_to_seq[worker] += len(events)
        replay(worker_to_held[worker], events)
        for chain in CHAINS:
            truth = expected(worker_to_held, chain)
            assert exact.lookup(chain) == truth
            bounded = small.lookup(chain)
            assert all(count <= truth.get(worker, 0) for worker, count in bounded.items())
        assert small.stats().num_keys <= max_blocks


class LossyFeed(RuleBasedStateMachine):
    """Lets workers emit, restart and leave, while messages get lost and repeated. Whenever the index says that it is in
    step and no message is in transit, it knows exactly what the worker holds."""

    @initialize()
    def begin(self) -> None:
        self.index = PrefixIndex(1000)
        self.held: dict[MemberId, set[BlockHash]] = {worker: set() for worker in WORKERS}
        self.epoch = dict.fromkeys(WORKERS, 1)
        self.next_seq = dict.fromkeys(WORKERS, 0)
        self.on_the_way: dict[MemberId, list[tuple[int, int, tuple[KvEvent, ...]] | KvSnapshot]] = {
            worker: [] for worker in WORKERS
        }
        self.delivered: list[tuple[MemberId, tuple[int, int, tuple[KvEvent, ...]]]] = []
        self.behind: set[MemberId] = set(WORKERS)

    @rule(worker=st.sampled_from(WORKERS), events=st.lists(kv_events, min_size=1, max_size=3).map(tuple))
    def emit(self, worker: MemberId, events: tuple[KvEvent, ...]) -> None:
        self.on_the_way[worker].append((self.epoch[worker], self.next_seq[worker], events))
        self.next_seq[worker] += len(events)
        replay(self.held[worker], events)

    @rule(worker=st.sampled_from(WORKERS))
    def send_snapshot(self, worker: MemberId) -> None:
        chains = (BlocksStored(None, b"".join(self.held[worker])),)
        snapshot = KvSnapshot(worker, self.epoch[worker], self.next_seq[worker] - 1, chains)
        self.on_the_way[worker].append(snapshot)

    @rule(worker=st.sampled_from(WORKERS), is_overtaking=st.booleans())
    def deliver(self, worker: MemberId, is_overtaking: bool) -> None:
        if not self.on_the_way[worker]:
            return
        number = int(is_overtaking and len(self.on_the_way[worker]) > 1)
        message = self.on_the_way[worker].pop(number)
        if isinstance(message, KvSnapshot):
            self.index.load_snapshot(message)
        else:
            self.delivered.append((worker, message))
            self.index.apply(worker, *message)
        self.behind.discard(worker)

    @rule(worker=st.sampled_from(WORKERS))
    def deliver_all(self, worker: MemberId) -> None:
        while self.on_the_way[worker]:
            self.deliver(worker, is_overtaking=False)

    @rule(worker=st.sampled_from(WORKERS))
    def lose(self, worker: MemberId) -> None:
        if self.on_the_way[worker]:
            self.on_the_way[worker].pop(0)
            self.behind.add(worker)  # the index cannot detect a loss before the next message

    @rule(number=st.integers(0, 1000))
    def repeat(self, number: int) -> None:
        if self.delivered:
            worker, message = self.delivered[number % len(self.delivered)]
            self.index.apply(worker, *message)

    @rule(worker=st.sampled_from(WORKERS))
    def restart(self, worker: MemberId) -> None:
        self.epoch[worker] += 1
        self.next_seq[worker] = 0
        self.held[worker].clear()
        self.on_the_way[worker].clear()
        self.behind.add(worker)

    @rule(worker=st.sampled_from(WORKERS))
    def leave(self, worker: MemberId) -> None:
        self.index.remove_worker(worker)
        self.delivered = [each for each in self.delivered if each[0] != worker]
        self.behind.add(worker)

    @invariant()
    def knows_the_truth_when_in_step(self) -> None:
        if not hasattr(self, "index"):
            return
        current = {
            worker
            for worker in WORKERS
            if self.index.is_in_step(worker) and not self.on_the_way[worker] and worker not in self.behind
        }
        for chain in CHAINS:
            found = self.index.lookup(chain)
            truth = expected({worker: self.held[worker] for worker in current}, chain)
            assert {worker: found[worker] for worker in current if worker in found} == truth


LossyFeed.TestCase.settings = settings(deadline=None, max_examples=80, stateful_step_count=50)
TestLossyFeed = LossyFeed.TestCase


HASHES = [MmHash(letter * 32) for letter in "abcdef"]
hash_sets = st.frozensets(st.sampled_from(HASHES))
feature_messages = st.lists(st.tuples(st.sampled_from(WORKERS), hash_sets, hash_sets, st.booleans()), max_size=25)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from(WORKERS), hash_sets, hash_sets, st.booleans()), max_size=25), st.integers(1, 8)
)
def test_holders_equal_the_model_and_never_exceed_their_bound(
    messages: list[tuple[MemberId, frozenset[MmHash], frozenset[MmHash], bool]], max_items: int
) -> None:
    exact, small = FeatureIndex(1000), FeatureIndex(max_items)
    encoder_to_held: dict[MemberId, set[MmHash]] = {encoder: set() for encoder in WORKERS}
    encoder_to_last = dict.fromkeys(WORKERS, -1)
    for index in (exact, small):
        for encoder in WORKERS:
            index.apply(FeatureEvents(encoder, 1, -1, is_snapshot=True))
    for encoder, stored, removed, is_snapshot in messages:
        held = encoder_to_held[encoder]
        if is_snapshot:
            held.clear()
            held.update(stored)
            events = FeatureEvents(encoder, 1, encoder_to_last[encoder], tuple(stored), is_snapshot=True)
        else:
            held.update(stored)
            held.difference_update(removed)
            events = FeatureEvents(encoder, 1, encoder_to_last[encoder] + 1, tuple(stored), tuple(removed))
            encoder_to_last[encoder] += len(stored) + len(removed)
        for index in (exact, small):
            assert index.apply(events) is ApplyResult.OK
        for mm_hash in HASHES:
            truth = {encoder for encoder, held in encoder_to_held.items() if mm_hash in held}
            assert exact.holders(mm_hash) == truth
            assert small.holders(mm_hash) <= truth
        assert small.stats().num_keys <= max_items

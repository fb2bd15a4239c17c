"""Checks the indexes against a dict of sets: with a transport that loses, repeats and reorders messages, and with
members that restart, leave and come back in other slots."""

from __future__ import annotations

import numpy as np
import pytest
from block_trees import BlockPath, hash_to_parent, leading, native_table, path_hash, path_hashes, stored_event
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from fabric.contracts import BlocksRemoved, FeatureEvents, KvEvent, KvSnapshot, MemberId, MmHash
from fabric.contracts.messages import BlocksCleared
from kv_index import ApplyResult, FeatureIndex, PrefixIndex
from kv_index.holder_table import HolderTable, PlainTable
from llm_workers.scheduling.blocks import chain_pages

WORKERS = [MemberId(f"worker-{number}") for number in range(4)]
NUM_SLOTS = 6
MAX_BLOCKS = 12
chains = st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(1, 11)).map(
    lambda drawn: (drawn[0], 0, 0, 0, 0, drawn[1], *range(5))[: drawn[2]]
)
"""The chains fork at the root and behind the fifth block."""
ALL_CHAINS = [(first, 0, 0, 0, 0, other, *range(5)) for first in (0, 1) for other in (0, 1)]
workers = st.sampled_from(WORKERS)


class FedIndexes(RuleBasedStateMachine):
    """Lets workers emit, restart and leave, while messages get lost, repeated and reordered. Whenever an index says
    that it is in step and no message is in transit, it knows exactly what the worker holds, or no more than this if it
    is too small. Workers free the tails of chains first."""

    @initialize()
    def begin(self) -> None:
        kind = type(self)
        self.exact = PrefixIndex(1000, kind.large())
        self.small = PrefixIndex(MAX_BLOCKS, kind.little())
        self.held: dict[MemberId, set[BlockPath]] = {worker: set() for worker in WORKERS}
        self.epoch = dict.fromkeys(WORKERS, 1)
        self.next_seq = dict.fromkeys(WORKERS, 0)
        self.slot = {worker: number for number, worker in enumerate(WORKERS)}
        self.on_the_way: dict[MemberId, list[tuple[int, int, tuple[KvEvent, ...]] | KvSnapshot]] = {
            worker: [] for worker in WORKERS
        }
        self.delivered: list[tuple[MemberId, tuple[int, int, tuple[KvEvent, ...]]]] = []
        self.behind: set[MemberId] = set(WORKERS)
        for worker in WORKERS:
            self.exact.add_worker(worker, self.slot[worker])
            self.small.add_worker(worker, self.slot[worker])

    @staticmethod
    def large() -> HolderTable:
        return native_table(1000)

    @staticmethod
    def little() -> HolderTable:
        return native_table(MAX_BLOCKS)

    def emit(self, worker: MemberId, *events: KvEvent) -> None:
        self.on_the_way[worker].append((self.epoch[worker], self.next_seq[worker], events))
        self.next_seq[worker] += len(events)

    @rule(worker=workers, chain=chains, cut=st.integers(0, 11))
    def store(self, worker: MemberId, chain: BlockPath, cut: int) -> None:
        """Stores what the worker lacks of a chain, in one event or in two."""
        start = leading(self.held[worker], chain)
        cut = min(max(cut, start), len(chain))
        self.emit(
            worker,
            *(stored_event(path, first) for path, first in ((chain[:cut], start), (chain, cut)) if len(path) > first),
        )
        self.held[worker] |= {chain[: number + 1] for number in range(len(chain))}

    @rule(worker=workers, chain=chains)
    def free(self, worker: MemberId, chain: BlockPath) -> None:
        """Removes a block and all blocks behind it, tails first."""
        gone = [path for path in self.held[worker] if path[: len(chain)] == chain]
        gone.sort(key=len, reverse=True)
        self.emit(worker, BlocksRemoved(b"".join(path_hash(path) for path in gone)))
        self.held[worker] -= set(gone)

    @rule(worker=workers)
    def clear(self, worker: MemberId) -> None:
        self.emit(worker, BlocksCleared())
        self.held[worker].clear()

    @rule(worker=workers, page_blocks=st.integers(1, 9))
    def send_snapshot(self, worker: MemberId, page_blocks: int) -> None:
        for page in chain_pages(self.next_seq[worker] - 1, hash_to_parent(self.held[worker]), page_blocks):
            snapshot = KvSnapshot(
                worker, self.epoch[worker], page.last_seq, tuple(page.chains), page.number, page.is_last
            )
            self.on_the_way[worker].append(snapshot)

    @rule(worker=workers, is_overtaking=st.booleans())
    def deliver(self, worker: MemberId, is_overtaking: bool) -> None:
        if not self.on_the_way[worker]:
            return
        number = int(is_overtaking and len(self.on_the_way[worker]) > 1)
        message = self.on_the_way[worker].pop(number)
        if isinstance(message, KvSnapshot):
            results = [index.load_snapshot(message) for index in (self.exact, self.small)]
        else:
            self.delivered.append((worker, message))
            results = [index.apply(worker, *message) for index in (self.exact, self.small)]
        assert results[0] is results[1]
        self.behind.discard(worker)

    @rule(worker=workers)
    def deliver_all(self, worker: MemberId) -> None:
        while self.on_the_way[worker]:
            self.deliver(worker, is_overtaking=False)

    @rule(worker=workers)
    def lose(self, worker: MemberId) -> None:
        if self.on_the_way[worker]:
            self.on_the_way[worker].pop(0)
            self.behind.add(worker)  # the index cannot detect a loss before the next message

    @rule(number=st.integers(0, 1000))
    def repeat(self, number: int) -> None:
        if self.delivered:
            worker, message = self.delivered[number % len(self.delivered)]
            for index in (self.exact, self.small):
                index.apply(worker, *message)

    @rule(worker=workers)
    def restart(self, worker: MemberId) -> None:
        self.epoch[worker] += 1
        self.next_seq[worker] = 0
        self.held[worker].clear()
        self.on_the_way[worker].clear()
        self.behind.add(worker)

    @rule(worker=workers, number=st.integers(0, NUM_SLOTS))
    def leave_and_come_back(self, worker: MemberId, number: int) -> None:
        """The worker's slot may go to another worker, and the worker gets any free one."""
        for index in (self.exact, self.small):
            index.remove_worker(worker)
        free = [slot for slot in range(NUM_SLOTS) if slot not in self.slot.values() or slot == self.slot[worker]]
        self.slot[worker] = free[number % len(free)]
        for index in (self.exact, self.small):
            index.add_worker(worker, self.slot[worker])
        self.delivered = [each for each in self.delivered if each[0] != worker]
        self.behind.add(worker)

    @invariant()
    def knows_the_truth_when_in_step(self) -> None:
        if not hasattr(self, "exact"):
            return
        for index in (self.exact, self.small):
            index.check_invariants()
        stride = self.exact._table.stride
        depths = np.zeros(NUM_SLOTS, dtype=np.int32)
        for chain in ALL_CHAINS:
            self.exact.lookup(path_hashes(chain), depths)
            assert all(not count for slot, count in enumerate(depths.tolist()) if slot not in self.slot.values())
            found = dict(enumerate(depths.tolist()))
            self.small.lookup(path_hashes(chain), depths)
            for worker in WORKERS:
                if self.exact.is_in_step(worker) and not self.on_the_way[worker] and worker not in self.behind:
                    truth = leading(self.held[worker], chain) // stride * stride
                    assert found[self.slot[worker]] == truth
                    assert depths[self.slot[worker]] <= truth
        stats = self.small.stats()
        assert stats.num_keys <= stats.max_keys <= MAX_BLOCKS


class PlainFedIndexes(FedIndexes):
    """Does the same with the tables in Python, which know every fourth block."""

    @staticmethod
    def large() -> HolderTable:
        return PlainTable(1000, 4)

    @staticmethod
    def little() -> HolderTable:
        return PlainTable(MAX_BLOCKS, 4)


@pytest.mark.parametrize("machine", [FedIndexes, PlainFedIndexes])
def test_the_index_knows_the_truth_when_it_is_in_step(machine: type[FedIndexes]) -> None:
    run_state_machine_as_test(machine, settings=settings(deadline=None, max_examples=70, stateful_step_count=50))


HASHES = [MmHash(letter * 32) for letter in "abcdef"]
hash_sets = st.frozensets(st.sampled_from(HASHES))
feature_messages = st.lists(st.tuples(workers, hash_sets, hash_sets, st.booleans()), max_size=25)


@settings(deadline=None, max_examples=100)
@given(feature_messages, st.integers(1, 8), st.booleans())
def test_feature_holders_equal_the_model(
    messages: list[tuple[MemberId, frozenset[MmHash], frozenset[MmHash], bool]], max_items: int, is_native: bool
) -> None:
    def index_of(most: int) -> FeatureIndex:
        return FeatureIndex(most, native_table(most) if is_native else PlainTable(most, 1))

    exact, small = index_of(1000), index_of(max_items)
    member_to_held: dict[MemberId, set[MmHash]] = {member: set() for member in WORKERS}
    member_to_last = dict.fromkeys(WORKERS, 0)
    for index in (exact, small):
        for slot, member in enumerate(WORKERS):
            index.add_member(member, slot)
            index.apply(FeatureEvents(member, 1, 0, is_snapshot=True))
    for member, stored, removed, is_snapshot in messages:
        if is_snapshot:
            member_to_held[member] = set(stored)
            events = FeatureEvents(member, 1, member_to_last[member], tuple(stored), is_snapshot=True)
        else:
            member_to_held[member] = (member_to_held[member] | stored) - removed
            events = FeatureEvents(member, 1, member_to_last[member] + 1, tuple(stored), tuple(removed))
            member_to_last[member] += len(stored) + len(removed)
        for index in (exact, small):
            assert index.apply(events) is ApplyResult.OK
            index.check_invariants()
        for mm_hash in HASHES:
            truth = {slot for slot, each in enumerate(WORKERS) if mm_hash in member_to_held[each]}
            assert set(exact.holders(mm_hash)) == truth
            assert set(small.holders(mm_hash)) <= truth
        assert exact.holders_of(HASHES) == [exact.holders(mm_hash) for mm_hash in HASHES]
        assert small.stats().num_keys <= max_items

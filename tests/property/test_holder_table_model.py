"""Checks both tables of holders against a dict of sets, while members come and go and the tables evict."""

from __future__ import annotations

import numpy as np
from block_trees import BlockPath, leading, native_table, path_hash, path_hashes, twin
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_index.holder_table import HolderTable, PlainTable

NUM_SLOTS = 4
paths = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
slots = st.integers(0, NUM_SLOTS - 1)


class TwoTables(RuleBasedStateMachine):
    """Does the same to a table in C and one in Python, which follow one method, so they must always agree: also in
    which blocks they evict. Both must be consistent at any time, and must promise no block that was not stored."""

    @initialize(max_keys=st.one_of(st.integers(0, 14), st.just(500)))
    def begin(self, max_keys: int) -> None:
        self.max_keys = max_keys
        self.tables: list[HolderTable] = [native_table(max_keys), PlainTable(max_keys, 1)]
        self.members: list[int | None] = [None] * NUM_SLOTS
        self.held: list[set[BlockPath]] = [set() for _ in range(NUM_SLOTS)]
        self.is_exact = max_keys == 500
        for slot in range(NUM_SLOTS):
            self.join(slot)

    def join(self, slot: int) -> None:
        first, second = (table.join(slot) for table in self.tables)
        assert first == second
        self.members[slot] = first
        self.held[slot].clear()

    @rule(slot=slots)
    def leave_and_join(self, slot: int) -> None:
        for table in self.tables:
            table.leave(self.members[slot])
        self.join(slot)

    @rule(count=st.integers(1, 8))
    def sweep(self, count: int) -> None:
        for table in self.tables:
            table.sweep(count)

    @rule(slot=slots, path=paths, start=st.integers(0, 6))
    def store(self, slot: int, path: BlockPath, start: int) -> None:
        """Stores a part of a chain, mostly one whose parent somebody holds."""
        start = min(start, len(path) - 1)
        if start and not any(path[:start] in held for held in self.held):
            start = 0
        for table in self.tables:
            table.store(self.members[slot], path_hash(path[:start]) if start else None, path_hashes(path, start))
        self.held[slot] |= {path[: number + 1] for number in range(start, len(path))}

    @rule(slot=slots, path=paths)
    def store_below_an_unknown_block(self, slot: int, path: BlockPath) -> None:
        for table in self.tables:
            before = table.stats()
            table.store(self.members[slot], path_hash((7, *path)), path_hashes(path))
            assert table.stats() == before._replace(num_refused=before.num_refused + len(path))

    @rule(slot=slots, path=paths)
    def store_a_block_with_the_key_of_another(self, slot: int, path: BlockPath) -> None:
        """The table must not take it for the other block, which has another parent."""
        if len(path) > 1:
            for table in self.tables:
                table.store(self.members[slot], None, twin(path_hash(path)))
            self.is_exact = False

    @rule(slot=slots, chosen=st.lists(paths, max_size=5))
    def remove(self, slot: int, chosen: list[BlockPath]) -> None:
        for table in self.tables:
            table.remove(self.members[slot], b"".join(path_hash(path) for path in chosen))
        self.held[slot] -= set(chosen)

    @rule(path=paths)
    def look_up(self, path: BlockPath) -> None:
        truth = [leading(held, path) for held in self.held]
        found = []
        for table in self.tables:
            depths = np.full(NUM_SLOTS + 2, 9, dtype=np.int32)
            table.lookup(path_hashes(path), depths)
            assert depths[NUM_SLOTS:].tolist() == [0, 0]
            found.append(depths[:NUM_SLOTS].tolist())
        assert found[0] == found[1]
        assert all(count <= true for count, true in zip(found[0], truth, strict=True))
        if self.is_exact:
            assert found[0] == truth

    @rule(number=st.integers(0, 1))
    def ask_for_holders(self, number: int) -> None:
        first, second = (table.holders(path_hash((number,))) for table in self.tables)
        assert first == second
        assert set(first) <= {slot for slot, held in enumerate(self.held) if (number,) in held}

    @rule(numbers=st.lists(st.integers(0, 2), max_size=4))
    def ask_for_holders_of_several(self, numbers: list[int]) -> None:
        blocks = [path_hash((number,)) for number in numbers]
        native, plain = self.tables
        assert native.holders_of(blocks) == [plain.holders(block) for block in blocks]

    @invariant()
    def is_consistent(self) -> None:
        if not hasattr(self, "tables"):
            return
        native, plain = self.tables
        for table in self.tables:
            table.check_invariants()
        assert native.stats()[:3] == plain.stats()[:3]
        assert native.stats().num_rescued == plain.stats().num_rescued
        assert native.stats().num_keys <= self.max_keys


TwoTables.TestCase.settings = settings(deadline=None, max_examples=120, stateful_step_count=60)
TestTwoTables = TwoTables.TestCase

"""Compares the mirror of vLLM's prefix cache with a plain set of blocks: its events rebuild the set, with depths, and a
snapshot lists exactly the blocks that can be reached from the root."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from fabric.contracts import BlockHash, BlocksCleared, BlocksRemoved, BlocksStored, split_hashes
from llm_workers.vllm_engine.block_mirror import BlockMirror


def block(path: tuple[int, ...]) -> BlockHash:
    return BlockHash(bytes(path).ljust(16, b"\xff"))


@given(seed=st.integers(0, 2**32), num_events=st.integers(1, 60))
def test_events_and_snapshots_agree_with_a_set(seed: int, num_events: int) -> None:
    rng, mirror = random.Random(seed), BlockMirror()
    there: set[tuple[int, ...]] = set()
    rebuilt: dict[BlockHash, int] = {}
    next_seq = 1
    for _ in range(num_events):
        if there and rng.random() < 0.3:
            gone = rng.sample(sorted(there), rng.randint(1, len(there)))
            mirror.remove([block(path) for path in gone])
            there.difference_update(gone)
        elif rng.random() < 0.03:
            mirror.clear()
            there.clear()
        else:
            path: tuple[int, ...] = ()
            for _ in range(rng.randint(1, 6)):
                path = (*path, rng.randint(1, 2))
            # vLLM stores a prefix from some block on whose parents are there.
            first = next(size for size in range(1, len(path) + 1) if size == len(path) or path[:size] not in there)
            parent = block(path[: first - 1]) if first > 1 else None
            chain = [path[:size] for size in range(first, len(path) + 1)]
            mirror.store(parent, [block(each) for each in chain])
            if all(path[:size] in there for size in range(1, first)):
                there.update(chain)
        first_seq, events = mirror.drain_events()
        if events:
            assert first_seq == next_seq
            next_seq += len(events)
        for event in events:
            match event:
                case BlocksStored():
                    if event.parent is not None:
                        assert rebuilt[event.parent] == event.depth - 1
                    for index, each in enumerate(split_hashes(event.hashes)):
                        rebuilt[each] = event.depth + index
                case BlocksRemoved():
                    for each in split_hashes(event.hashes):
                        del rebuilt[each]
                case BlocksCleared():
                    rebuilt.clear()
        assert len(mirror) == len(rebuilt)
    reached = {path for path in there if all(path[:size] in there for size in range(1, len(path)))}
    for page_blocks in (1, 3, 100):
        pages = list(mirror.snapshot(page_blocks))
        listed = [each for page in pages for chain in page.chains for each in split_hashes(chain.hashes)]
        assert sorted(listed) == sorted(block(path) for path in reached)
        assert [page.number for page in pages] == list(range(len(pages)))
        assert [page.is_last for page in pages] == [False] * (len(pages) - 1) + [True]
        assert {page.last_seq for page in pages} == {next_seq - 1}

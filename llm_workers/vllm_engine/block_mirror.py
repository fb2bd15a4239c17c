"""Hashes vLLM's KV blocks as Weft does, and mirrors which of them its prefix cache holds.

vLLM lets whoever makes a request say how its blocks are hashed. With Weft's own hash (`fabric.contracts.block_hashes`),
routers need not know which engine a worker runs, and two workers with blocks of one size share the hashes of a prompt.
The mirror takes vLLM's events and makes those of the contracts of them, with the numbers and depths that a router's
index needs, and can list all blocks for a router that asks for a snapshot.

This module knows nothing of vLLM's classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from fabric.contracts import BlockHash, BlocksCleared, BlocksRemoved, KvEvent, block_hashes
from llm_workers.scheduling import ChainPage, PromptLayout, chain_pages, stored_chain

MAX_EVENTS = 100_000
"""Limits the events that nobody has drained; older ones are dropped, which routers see as a gap."""


class HashedTokens(Protocol):
    """Is what the hasher reads of a request of vLLM."""

    @property
    def all_token_ids(self) -> Sequence[int]: ...

    @property
    def block_hashes(self) -> Sequence[bytes]: ...


def block_hasher(layout: PromptLayout, block_size: int) -> Callable[[HashedTokens], list[bytes]]:
    """Returns a function that gives the hashes of a request's full blocks that are not hashed yet."""

    def hash_new(request: HashedTokens) -> list[bytes]:
        first, last = len(request.block_hashes), len(request.all_token_ids) // block_size
        if first >= last:
            return []
        token_ids = request.all_token_ids[first * block_size : last * block_size]
        content = np.array(token_ids, dtype="<i4").tobytes()
        parent = BlockHash(request.block_hashes[-1]) if first else None
        return list(block_hashes(parent, content, 4 * block_size, layout.block_keys(first, last, block_size)))

    return hash_new


class BlockMirror:
    """Holds the findable blocks of vLLM's prefix cache, each with its parent. It belongs to the engine thread."""

    def __init__(self) -> None:
        self._hash_to_parent: dict[BlockHash, BlockHash | None] = {}
        self._hash_to_depth: dict[BlockHash, int] = {}
        self._events: list[KvEvent] = []
        self._num_events = 0

    def store(self, parent: BlockHash | None, hashes: Sequence[BlockHash]) -> None:
        """Takes blocks that became findable, in chain order. Blocks that are there already, or whose parent is not, are
        left out."""
        fresh: list[BlockHash] = []
        for block in hashes:
            if block not in self._hash_to_parent and (parent is None or parent in self._hash_to_depth):
                self._hash_to_parent[block] = parent
                self._hash_to_depth[block] = 0 if parent is None else self._hash_to_depth[parent] + 1
                fresh.append(block)
            else:
                self._note_stored(fresh)
                fresh = []
            parent = block
        self._note_stored(fresh)

    def remove(self, hashes: Sequence[BlockHash]) -> None:
        """Takes blocks that can't be found any more."""
        gone = [block for block in hashes if self._hash_to_parent.pop(block, self) is not self]
        for block in gone:
            del self._hash_to_depth[block]
        if gone:
            self._note(BlocksRemoved(b"".join(gone)))

    def clear(self) -> None:
        self._hash_to_parent.clear()
        self._hash_to_depth.clear()
        self._note(BlocksCleared())

    def drain_events(self) -> tuple[int, list[KvEvent]]:
        """Returns the number of the first event, counted from 1, and the events since the last call."""
        events, self._events = self._events, []
        return self._num_events - len(events) + 1, events

    def snapshot(self, page_blocks: int) -> Iterator[ChainPage]:
        """Returns all findable blocks as of the newest event, in pages that are made when they are taken."""
        blocks = sorted(self._hash_to_parent.items(), key=lambda each: self._hash_to_depth[each[0]])
        return chain_pages(self._num_events, dict(_in_chains(blocks)), page_blocks)

    def __len__(self) -> int:
        return len(self._hash_to_parent)

    def _note_stored(self, run: list[BlockHash]) -> None:
        if run:
            depth, parent = self._hash_to_depth[run[0]], self._hash_to_parent[run[0]]
            try:
                self._note(stored_chain(parent, run, depth, self._hash_to_parent))
            except KeyError:  # An ancestor was evicted, so no walk from the root finds these blocks.
                for block in run:
                    del self._hash_to_parent[block], self._hash_to_depth[block]

    def _note(self, event: KvEvent) -> None:
        self._num_events += 1
        self._events.append(event)
        if len(self._events) > MAX_EVENTS:
            del self._events[: MAX_EVENTS // 2]


def _in_chains(
    blocks: Sequence[tuple[BlockHash, BlockHash | None]],
) -> Iterator[tuple[BlockHash, BlockHash | None]]:
    """Yields the blocks, which come with parents before children, so that chains stand together."""
    parent_to_children: dict[BlockHash | None, list[BlockHash]] = {}
    for block, parent in blocks:
        parent_to_children.setdefault(parent, []).append(block)
    stack: list[tuple[BlockHash, BlockHash | None]] = [(block, None) for block in parent_to_children.get(None, [])]
    while stack:
        block, parent = stack.pop()
        yield block, parent
        stack += [(child, block) for child in parent_to_children.get(block, ())]

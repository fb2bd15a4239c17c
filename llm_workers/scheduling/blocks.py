"""Manages the pool of KV blocks: which sequences refer to each block, which blocks can be found by their content, and
which block is given away next.

A block is in one of three conditions:

    referenced   a set of sequences refers to it; it is also findable once it was full and published
    cached       no sequence refers to it and it is still findable; it stays in the free queue until it is given away
    free         no sequence refers to it and it is not findable; it stands at the front of the free queue

References are sets of sequence ids, so freeing twice is harmless. The free queue gives away the least recently used
block first, and the tail of a sequence before its head: the parent of a findable block is always findable too (see
`publish`). A findable block may carry named side tensors, which have the same block number and are evicted with it: a
request that needs a name finds a chain only up to its first block without that name. Choices of one request share
blocks even if these are not findable. `BlockPool` records every change of what is findable in a `KvEventLog`, from
which the routers keep their prefix index. This module knows nothing of tokens and tensors: a block is a number, and its
content is a hash.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fabric.contracts import ANCHOR_STRIDE, BlockHash, BlocksRemoved, BlocksStored, KvEvent, SequenceId

NO_NAMES: frozenset[str] = frozenset()


class BlockPool:
    """Manages `num_blocks` blocks, numbered from 0."""

    def __init__(self, num_blocks: int, log: KvEventLog | None = None) -> None:
        self.num_blocks = num_blocks
        self._log = log or KvEventLog()
        self._references: list[set[SequenceId]] = [set() for _ in range(num_blocks)]
        self._block_to_hash: list[BlockHash | None] = [None] * num_blocks
        self._hash_to_block: dict[BlockHash, int] = {}
        self._hash_to_parent: dict[BlockHash, BlockHash | None] = {}
        """Holds the parents of the findable blocks. Its order has parents before children: a block is added after its
        parent, and it leaves before its parent leaves."""
        self._block_to_depth = [0] * num_blocks
        """Counts the blocks ahead of each findable block in its chain."""
        self._block_to_names: dict[int, frozenset[str]] = {}
        """Holds the names of the side tensors of those findable blocks that carry any."""
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_checked = 0
        """Counts the blocks that `check_at_rest` has looked at, over all calls."""

    # ------------------------------------------------------------ queries

    @property
    def num_free(self) -> int:
        """Counts the blocks that `allocate` could give, cached ones included."""
        return len(self._queue)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._queue)

    @property
    def num_cached(self) -> int:
        """Counts the findable blocks, referenced or not."""
        return len(self._hash_to_block)

    def lookup(self, hashes: Iterable[BlockHash], names: frozenset[str] = NO_NAMES) -> list[int]:
        """Returns the blocks of the longest findable beginning of a chain in which every block carries the side tensors
        of these names."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._hash_to_block.get(block_hash)
            if block is None or not names <= self.names(block):
                break
            found.append(block)
        return found

    def names(self, block: int) -> frozenset[str]:
        """Returns the names of the side tensors that a findable block carries."""
        return self._block_to_names.get(block, NO_NAMES)

    def num_reclaimable(self, tables: SequenceOf[npt.NDArray[np.int64]]) -> int:
        """Returns how many blocks would become free if the owners of these block tables gave them up."""
        if not tables:
            return 0
        counts = np.bincount(np.concatenate(tables))
        blocks = np.flatnonzero(counts)
        return sum(
            count == len(self._references[block])
            for block, count in zip(blocks.tolist(), counts[blocks].tolist(), strict=True)
        )

    def is_shared(self, block: int, apart_from: Container[SequenceId]) -> bool:
        """Returns whether sequences other than these refer to the block."""
        return any(sequence_id not in apart_from for sequence_id in self._references[block])

    # ------------------------------------------------------------ references

    def share(self, sequence_id: SequenceId, blocks: Iterable[int]) -> None:
        """Adds references to blocks that a sibling (another choice of the same request) refers to, findable or not."""
        for block in blocks:
            assert self._references[block], f"no sequence refers to block {block}"
            self._references[block].add(sequence_id)

    def touch(self, blocks: SequenceOf[int]) -> None:
        """Marks a chain of findable blocks as wanted soon: those that no sequence refers to move to the end of the free
        queue, so that they are given away last."""
        for block in reversed(blocks):
            if block in self._queue:
                self._queue.move_to_end(block)

    def acquire(self, sequence_id: SequenceId, blocks: Iterable[int]) -> None:
        """Adds references to findable blocks, which leave the free queue."""
        for block in blocks:
            assert self._block_to_hash[block] is not None, f"block {block} is not findable, so it can't be acquired"
            self._queue.pop(block, None)
            self._references[block].add(sequence_id)

    def allocate(self, sequence_id: SequenceId, count: int) -> list[int]:
        """Takes `count` blocks from the front of the free queue and evicts what was cached in them, which it records as
        an event. The caller has checked that `count <= num_free`."""
        assert count <= len(self._queue), f"{count} blocks are wanted, but {len(self._queue)} are free"
        blocks = [self._queue.popitem(last=False)[0] for _ in range(count)]
        removed: list[BlockHash] = []
        for block in blocks:
            self._references[block].add(sequence_id)
            block_hash = self._block_to_hash[block]
            if block_hash is not None:
                self._forget_hash(block, block_hash)
                removed.append(block_hash)
        if removed:
            self._log.append(BlocksRemoved(b"".join(removed)))
        return blocks

    def empty_one(self) -> int | None:
        """Returns the block at the front of the free queue, which stays there, and evicts what was cached in it, which
        it records as an event. Returns None if no block is free."""
        block = next(iter(self._queue), None)
        block_hash = None if block is None else self._block_to_hash[block]
        if block is not None and block_hash is not None:
            self._forget_hash(block, block_hash)
            self._log.append(BlocksRemoved(block_hash))
        return block

    def free(self, sequence_id: SequenceId, blocks: SequenceOf[int]) -> None:
        """Drops the sequence's references, beginning with the tail. Blocks that the sequence does not refer to stay
        unchanged."""
        for block in reversed(blocks):
            references = self._references[block]
            if sequence_id not in references:
                continue
            references.discard(sequence_id)
            if references:
                continue
            self._queue[block] = None
            if self._block_to_hash[block] is None:
                self._queue.move_to_end(block, last=False)

    # ------------------------------------------------------------ content

    def publish(
        self,
        sequence_id: SequenceId,
        parent: BlockHash | None,
        blocks: SequenceOf[int],
        hashes: SequenceOf[BlockHash],
        names: frozenset[str] = NO_NAMES,
    ) -> list[int]:
        """Makes a chain of full, computed blocks findable, which it records as an event, and returns the blocks to use
        from now on. `names` are the side tensors that these blocks carry.

        Where equal content is findable already, the sequence takes the findable block and its own block is freed. So a
        sequence refers to the one findable block of every hash of its chain and frees that block after the blocks that
        follow it, and a parent never leaves the cache before its children.

        Where the findable block lacks a name, the sequence's own block replaces it. If other sequences refer to the
        findable block, the chain ends there: the call returns fewer blocks than it was given, and the rest must never
        be published."""
        kept: list[int] = []
        fresh: list[BlockHash] = []
        fresh_parent = parent
        for block, block_hash in zip(blocks, hashes, strict=True):
            known = self._hash_to_block.get(block_hash)
            if known is not None and not names <= self.names(known):
                if self._references[known]:
                    break
                self._take_over(known, block, names)
                known = block
            if known is None:
                self._remember_hash(block, block_hash, parent)
                self._name(block, names)
                fresh.append(block_hash)
                kept.append(block)
            else:
                self._log_stored(fresh_parent, fresh)
                fresh, fresh_parent = [], block_hash
                kept.append(known)
                if known != block:
                    self.acquire(sequence_id, [known])
                    self.free(sequence_id, [block])
            parent = block_hash
        self._log_stored(fresh_parent, fresh)
        return kept

    def drain_events(self) -> tuple[int, list[KvEvent]]:
        return self._log.drain()

    def snapshot(self, page_blocks: int) -> Iterator[ChainPage]:
        """Returns everything that is findable as of the newest event, parents before children, in pages of at most
        `page_blocks` blocks. This call copies one dict; each page is made when it is taken from the iterator, and later
        changes of the pool do not reach it."""
        return chain_pages(self._log.last_seq, self._hash_to_parent.copy(), page_blocks)

    def _log_stored(self, parent: BlockHash | None, hashes: SequenceOf[BlockHash]) -> None:
        if hashes:
            self._log.append(stored_chain(parent, hashes, self._depth_below(parent), self._hash_to_parent))

    def _depth_below(self, parent: BlockHash | None) -> int:
        return 0 if parent is None else self._block_to_depth[self._hash_to_block[parent]] + 1

    def _remember_hash(self, block: int, block_hash: BlockHash, parent: BlockHash | None) -> None:
        assert self._block_to_hash[block] is None, f"block {block} is already findable under another hash"
        self._block_to_hash[block] = block_hash
        self._hash_to_block[block_hash] = block
        self._hash_to_parent[block_hash] = parent
        self._block_to_depth[block] = self._depth_below(parent)

    def _name(self, block: int, names: frozenset[str]) -> None:
        if names:
            self._block_to_names[block] = names

    def _take_over(self, known: int, block: int, names: frozenset[str]) -> None:
        """Makes `block` findable in the place of `known`, which no sequence refers to and which becomes free. Routers
        see no change, because the same hash is still here."""
        block_hash = self._block_to_hash[known]
        assert block_hash is not None
        self._block_to_hash[known] = None
        self._block_to_names.pop(known, None)
        self._queue.move_to_end(known, last=False)
        self._block_to_hash[block] = block_hash
        self._hash_to_block[block_hash] = block
        self._block_to_depth[block] = self._block_to_depth[known]
        self._name(block, names)

    def _forget_hash(self, block: int, block_hash: BlockHash) -> None:
        self._block_to_hash[block] = None
        self._block_to_names.pop(block, None)
        del self._hash_to_block[block_hash]
        del self._hash_to_parent[block_hash]

    # ------------------------------------------------------------ checks

    def check_at_rest(self, count: int) -> None:
        """Asserts, while no sequence refers to a block, that the totals are right and that `count` blocks are
        consistent. Each call checks the blocks that follow those of the call before. So a pool of any size is checked
        in a bounded time per call, and all of it over several calls."""
        assert len(self._queue) == self.num_blocks, "no sequence is there, but a block is referenced or lost"
        assert len(self._hash_to_block) == len(self._hash_to_parent), "findable blocks and their parents differ"
        assert len(self._block_to_names) <= len(self._hash_to_block), "a block has side tensors but is not findable"
        for number in range(self._num_checked, self._num_checked + min(count, self.num_blocks)):
            block = number % self.num_blocks
            assert block in self._queue, f"block {block} is not in the free queue"
            assert not self._references[block], f"block {block} is in the free queue but is referenced"
            block_hash = self._block_to_hash[block]
            if block_hash is None:
                assert block not in self._block_to_names, f"block {block} has side tensors but is not findable"
                continue
            assert self._hash_to_block.get(block_hash) == block, f"the hash of block {block} leads to another block"
            parent = self._hash_to_parent[block_hash]
            assert parent is None or parent in self._hash_to_block, f"block {block} lost its parent"
        self._num_checked += min(count, self.num_blocks)

    def check_invariants(self, tables: Mapping[SequenceId, SequenceOf[int]]) -> None:
        """Asserts that the pool is consistent. `tables` holds the block tables of all live sequences: no other sequence
        may hold a reference."""
        expected: list[set[SequenceId]] = [set() for _ in range(self.num_blocks)]
        for sequence_id, table in tables.items():
            assert len(set(table)) == len(table), f"{sequence_id} has a block twice"
            for block in table:
                expected[block].add(sequence_id)
        assert expected == self._references, "references differ from the block tables"
        for block, references in enumerate(self._references):
            assert (block in self._queue) == (not references), f"block {block} must be either free or referenced"
            block_hash = self._block_to_hash[block]
            assert block_hash is None or self._hash_to_block[block_hash] == block
            owners = {one.attempt_id for one in references}
            assert block_hash is not None or len(owners) < 2, f"block {block} is shared but is not findable"
        assert len(self._hash_to_block) == sum(known is not None for known in self._block_to_hash)
        assert self._hash_to_parent.keys() == self._hash_to_block.keys()
        assert self._block_to_names.keys() <= set(self._hash_to_block.values()), (
            "a block has side tensors but is not findable"
        )
        for parent in self._hash_to_parent.values():
            assert parent is None or parent in self._hash_to_block, "a findable block lost its parent"


# ---------------------------------------------------------------- events for the routers

MAX_KEPT_EVENTS = 8192
"""The log keeps at most this many events and drops the oldest ones beyond that: the receiver sees the gap in the
numbers and asks for a snapshot."""


class KvEventLog:
    """Logs which KV blocks became findable and which were evicted, numbered without gaps, and holds the events since
    the last drain. The first event of a worker's life has number 1. The log handles hashes only; it knows nothing of
    block numbers and sequences."""

    def __init__(self, max_kept: int = MAX_KEPT_EVENTS) -> None:
        self._events: deque[KvEvent] = deque(maxlen=max_kept)
        self._next_seq = 1

    @property
    def last_seq(self) -> int:
        """Returns the number of the newest event, drained or not; it is 0 before the first event."""
        return self._next_seq - 1

    def append(self, event: KvEvent) -> None:
        self._events.append(event)
        self._next_seq += 1

    def drain(self) -> tuple[int, list[KvEvent]]:
        """Returns the number of the first event of the list, and the list, which the log then forgets. With an empty
        list the number is that of the next event to come."""
        events = list(self._events)
        self._events.clear()
        return self._next_seq - len(events), events


class ChainPage(NamedTuple):
    """A `ChainPage` is a part of a snapshot of all findable blocks as of event `last_seq`."""

    last_seq: int
    chains: list[BlocksStored]
    """Lists the blocks as chains, parents before children. The blocks of a chain stand in the order in which they
    became findable."""
    number: int
    is_last: bool


def chain_pages(
    last_seq: int, hash_to_parent: Mapping[BlockHash, BlockHash | None], page_blocks: int
) -> Iterator[ChainPage]:
    """Yields all blocks in pages of at most `page_blocks` blocks; there is at least one page. The mapping has parents
    before children. Blocks whose parent is not in it can't be found by a walk from the root and are left out."""
    links = iter(hash_to_parent.items())
    hash_to_depth: dict[BlockHash | None, int] = {None: -1}
    following = list(islice(links, page_blocks))
    number = 0
    while following or not number:
        page, following = following, list(islice(links, page_blocks))
        chains: list[BlocksStored] = []
        head: BlockHash | None = None
        run: list[BlockHash] = []
        for block, parent in page:
            if parent not in hash_to_depth:
                continue
            hash_to_depth[block] = hash_to_depth[parent] + 1
            if run and run[-1] == parent:
                run.append(block)
                continue
            if run:
                chains.append(stored_chain(head, run, hash_to_depth[head] + 1, hash_to_parent))
            head, run = parent, [block]
        if run:
            chains.append(stored_chain(head, run, hash_to_depth[head] + 1, hash_to_parent))
        yield ChainPage(last_seq, chains, number, not following)
        number += 1


def stored_chain(
    parent: BlockHash | None,
    run: SequenceOf[BlockHash],
    depth: int,
    hash_to_parent: Mapping[BlockHash, BlockHash | None],
) -> BlocksStored:
    """Returns the event for a run of blocks below `parent`, with `depth` blocks ahead of its first one."""
    anchor = parent
    for _ in range(depth % ANCHOR_STRIDE):
        assert anchor is not None, "a block has fewer blocks ahead of it than its depth says"
        anchor = hash_to_parent[anchor]
    return BlocksStored(parent, b"".join(run), depth, anchor)

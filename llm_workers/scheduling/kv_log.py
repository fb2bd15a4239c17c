"""Logs which KV blocks became findable and which were evicted, numbered without gaps, for the routers' prefix index.

This module knows nothing of block ids and sequences: it handles hashes only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from fabric.ids import BlockHash
from fabric.messages import BlocksStored, KvEvent

MAX_KEPT_EVENTS = 8192
"""The log keeps at most this many events and drops the oldest ones beyond that: the receiver sees the gap in the
numbers and asks for a snapshot."""


class KvEventLog:
    """Holds the events since the last drain. The first event of a worker's life has number 1."""

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


def chains_of(hash_to_parent: Mapping[BlockHash, BlockHash | None]) -> list[BlocksStored]:
    """Returns all blocks as chains, parents before children; a run of blocks without a fork is one chain. Blocks whose
    parent is not among them can't be found by a walk from the root and are left out."""
    children: dict[BlockHash | None, list[BlockHash]] = {}
    for block, parent in hash_to_parent.items():
        children.setdefault(parent, []).append(block)
    chains: list[BlocksStored] = []
    heads = deque(_heads(None, children))
    while heads:
        parent, block = heads.popleft()
        run = [block]
        while len(below := children.get(run[-1], [])) == 1:
            run.append(below[0])
        chains.append(BlocksStored(parent, tuple(run)))
        heads.extend(_heads(run[-1], children))
    return chains


def _heads(
    parent: BlockHash | None, children: Mapping[BlockHash | None, list[BlockHash]]
) -> Iterable[tuple[BlockHash | None, BlockHash]]:
    return [(parent, block) for block in children.get(parent, ())]

"""Records which worker holds which prefix of KV blocks, from the workers' own events.

The index is a hint: only the worker itself knows what it really hits, at admission. Still, `lookup` is exact about the
events that it received: it counts a worker's leading blocks up to the first block that the worker lacks. A stored block
usually implies its ancestors (workers free tails first), and a bisection along the chain would need fewer look-ups. But
two sequences that compute one prefix at the same time can leave a child cached without its parent. Bisection then
promises KV that no request can use, and an image that seems covered is encoded late. So `lookup` walks the chain, in
C-speed pieces that grow while any worker still holds the blocks: a miss costs one small piece. This module knows
nothing of any clock or policy, or of how a snapshot is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import and_
from typing import NamedTuple

from fabric.ids import BlockHash, MemberId
from fabric.messages import BlocksRemoved, BlocksStored, KvEvent, KvSnapshot
from kv_index.feed import ApplyResult, EventFeed
from kv_index.holder_masks import HolderMasks

MAX_BUFFERED_EVENTS = 4096
FIRST_PIECE_BLOCKS = 8
MAX_PIECE_BLOCKS = 256


class IndexStats(NamedTuple):
    num_keys: int
    max_keys: int
    num_sources: int
    num_out_of_step: int
    """Counts the sources that wait for a snapshot."""
    num_refused: int
    """Counts the keys that found no room since the start; the index is too small when this grows."""


class PrefixIndex:
    """Keeps at most `max_blocks` different block hashes. Each takes about 150 bytes, however many workers hold it."""

    def __init__(self, max_blocks: int) -> None:
        self._masks: HolderMasks[BlockHash] = HolderMasks(max_blocks)
        self._worker_to_feed: dict[MemberId, EventFeed[KvEvent]] = {}

    def apply(self, worker_id: MemberId, epoch: int, first_seq: int, events: Sequence[KvEvent]) -> ApplyResult:
        """Takes in the events `first_seq`, `first_seq + 1`, ... of a worker. It returns GAP if the caller must ask for
        the worker's snapshot; meanwhile the events are kept, and the known state of the same epoch still answers
        look-ups. A newer epoch makes all earlier knowledge of the worker void."""
        feed = self._feed(worker_id)
        if feed.is_newer(epoch):
            self._masks.forget(worker_id)
        result, fresh = feed.offer(epoch, first_seq, events)
        for event in fresh:
            self._apply_event(worker_id, event)
        return result

    def load_snapshot(self, snapshot: KvSnapshot) -> ApplyResult:
        """Replaces the known state of the worker, then applies the kept events. It returns STALE if the snapshot was
        older than the known state, and GAP if there is a hole among the kept events, so that another snapshot is
        needed."""
        worker_id = snapshot.worker_id
        feed = self._feed(worker_id)
        if feed.restart(snapshot.epoch, snapshot.last_seq) is ApplyResult.STALE:
            return ApplyResult.STALE
        self._masks.forget(worker_id)
        for chain in snapshot.chains:
            self._apply_event(worker_id, chain)
        for event in feed.resume():
            self._apply_event(worker_id, event)
        return ApplyResult.OK if feed.is_in_step else ApplyResult.GAP

    def remove_worker(self, worker_id: MemberId) -> None:
        """Forgets the worker. An unknown worker is ignored. Later events of the worker start from nothing (with a
        GAP)."""
        self._worker_to_feed.pop(worker_id, None)
        self._masks.forget(worker_id)

    def is_in_step(self, worker_id: MemberId) -> bool:
        """Returns whether look-ups about this worker rest on a complete history."""
        feed = self._worker_to_feed.get(worker_id)
        return feed is not None and feed.is_in_step

    def lookup(self, hashes: Sequence[BlockHash]) -> dict[MemberId, int]:
        """Returns the number of leading blocks that each worker holds. Workers without the first block are left out."""
        worker_to_blocks: dict[MemberId, int] = {}
        get = self._masks.key_to_mask.get
        held, start, num_piece = self._masks.live_mask, 0, FIRST_PIECE_BLOCKS
        while held and start < len(hashes):
            piece = hashes[start : start + num_piece]
            masks = list(accumulate([get(block, 0) for block in piece], and_, initial=held))
            if masks[-1] != held:
                for offset, (before, after) in enumerate(pairwise(masks)):
                    if before != after and start + offset:
                        worker_to_blocks.update(dict.fromkeys(self._masks.members(before & ~after), start + offset))
            held, start, num_piece = masks[-1], start + len(piece), min(2 * num_piece, MAX_PIECE_BLOCKS)
        if start:
            worker_to_blocks.update(dict.fromkeys(self._masks.members(held), start))
        return worker_to_blocks

    def stats(self) -> IndexStats:
        feeds = self._worker_to_feed.values()
        return IndexStats(
            self._masks.num_keys(),
            self._masks.max_keys,
            len(feeds),
            sum(not feed.is_in_step for feed in feeds),
            self._masks.num_refused,
        )

    def _feed(self, worker_id: MemberId) -> EventFeed[KvEvent]:
        feed = self._worker_to_feed.get(worker_id)
        if feed is None:
            feed = self._worker_to_feed[worker_id] = EventFeed(MAX_BUFFERED_EVENTS)
        return feed

    def _apply_event(self, worker_id: MemberId, event: KvEvent) -> None:
        if isinstance(event, BlocksStored):
            for block in event.hashes:
                if not self._masks.add(worker_id, block):
                    return  # Without this block, look-ups cannot find its descendants either.
        elif isinstance(event, BlocksRemoved):
            for block in event.hashes:
                self._masks.discard(worker_id, block)
        else:
            self._masks.forget(worker_id)

"""Records, from the members' own events, which worker holds which prefix of KV blocks (`PrefixIndex`) and which members
hold the features of which media item (`FeatureIndex`).

Both indexes stand on the same two parts. An `EventFeed` for each source puts the source's events in order, and a
`HolderTable` keeps the holders of each key. An index adds only what a key and an event mean.

Both indexes are hints, because a member may have evicted a key when a request reaches it: the worker itself finds out
at admission what it really holds, and an encoder that has evicted an item encodes it again. Both are bounded, and evict
what was not looked up or stored for long.

The caller numbers the members: each has a slot, and look-ups answer by slot. This module knows nothing of any clock or
policy, of how a snapshot is fetched, or of what a block or a feature contains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import xxhash

from fabric.contracts import (
    KV_HASH_BYTES,
    BlocksRemoved,
    BlocksStored,
    FeatureEvents,
    KvEvent,
    KvSnapshot,
    MemberId,
    MmHash,
)
from kv_index.holder_table import Depths, HolderTable, new_table

# ------------------------------------------------------------ the two indexes

MAX_BUFFERED_EVENTS = 1 << 14


class ApplyResult(Enum):
    """An `ApplyResult` says what happened to a message of events."""

    OK = "ok"
    """The message was applied, or contained in what was applied before."""
    PARTIAL = "partial"
    """The message belongs to a snapshot of which further pages are on their way. A page was applied; events are kept,
    to be applied after the last page. The source is asked again only if the next page does not come."""
    GAP = "gap"
    """The source is not in step, so its snapshot is needed. The events are kept, to be applied after it."""
    STALE = "stale"
    """The message belongs to an older epoch or to an unknown source, or is a snapshot older than the known state; it
    was dropped."""


class IndexStats(NamedTuple):
    num_keys: int
    max_keys: int
    num_sources: int
    num_out_of_step: int
    """Counts the sources that wait for a snapshot, or for its last page."""
    num_refused: int
    """Counts the keys that were not recorded since the start, because the block ahead of them was evicted."""
    num_evicted: int
    """Counts the keys that were evicted since the start; the index is too small when this grows fast."""
    num_bytes: int


EventT = TypeVar("EventT")


@dataclass(slots=True)
class _Source(Generic[EventT]):
    feed: EventFeed[EventT]
    slot: int
    member: int
    """This is the table's number for the source. It changes when everything known of the source becomes void."""


class _SourceTable(Generic[EventT]):
    """Holds the sources of an index and the table that they fill."""

    def __init__(self, table: HolderTable) -> None:
        self.table = table
        self.sources: dict[MemberId, _Source[EventT]] = {}

    def add(self, member_id: MemberId, slot: int) -> None:
        self.remove(member_id)
        self.sources[member_id] = _Source(EventFeed(MAX_BUFFERED_EVENTS), slot, self.table.join(slot))

    def remove(self, member_id: MemberId) -> None:
        source = self.sources.pop(member_id, None)
        if source is not None:
            self.table.leave(source.member)

    def forget(self, source: _Source[EventT]) -> None:
        """Makes everything known of the source void."""
        self.table.leave(source.member)
        source.member = self.table.join(source.slot)

    def is_in_step(self, member_id: MemberId) -> bool:
        source = self.sources.get(member_id)
        return source is not None and source.feed.is_in_step

    def stats(self) -> IndexStats:
        known = self.table.stats()
        num_out_of_step = sum(not source.feed.is_in_step for source in self.sources.values())
        return IndexStats(
            num_keys=known.num_keys,
            max_keys=self.table.max_keys,
            num_sources=len(self.sources),
            num_out_of_step=num_out_of_step,
            num_refused=known.num_refused,
            num_evicted=known.num_evicted,
            num_bytes=known.num_bytes,
        )


class PrefixIndex:
    """Records which worker holds which prefix of KV blocks, for the workers of one scheme.

    It keeps at most `max_blocks` different blocks, however many workers hold them, and evicts the tails of those chains
    that were not used for longest. It then knows less than the worker holds, and never more. A block that a worker
    stores behind an evicted one is recorded only if the caller knows the chain ahead of it (`apply`).

    `lookup` is exact about the events that the index received: it counts a worker's leading blocks up to the first
    block that the worker lacks. A stored block usually implies its ancestors (workers free tails first), and a
    bisection along the chain would need fewer look-ups. But two sequences that compute one prefix at the same time can
    leave a child cached without its parent. Bisection then promises KV that no request can use, and an image that seems
    covered is encoded late. So `lookup` walks the chain.

    Without a C compiler, the index knows every `ANCHOR_STRIDE`-th block only: a worker's leading blocks are rounded
    down to a multiple of it, and of a hole in a chain the index sees only the blocks that it knows.
    """

    def __init__(self, max_blocks: int, table: HolderTable | None = None) -> None:
        self._table = new_table(max_blocks) if table is None else table
        self._members: _SourceTable[KvEvent] = _SourceTable(self._table)

    def add_worker(self, worker_id: MemberId, slot: int) -> None:
        """Adds a worker whose place in the answers of `lookup` is `slot`. A worker that is there already is forgotten
        before. The first message of the worker gives a GAP."""
        self._members.add(worker_id, slot)

    def remove_worker(self, worker_id: MemberId) -> None:
        """Forgets the worker, whose slot may be given to another one at once. An unknown worker is ignored."""
        self._members.remove(worker_id)

    def apply(
        self,
        worker_id: MemberId,
        epoch: int,
        first_seq: int,
        events: Sequence[KvEvent],
        chain_to: Callable[[bytes], bytes] | None = None,
    ) -> ApplyResult:
        """Takes in the events `first_seq`, `first_seq + 1`, ... of a worker. It returns GAP if the caller must ask for
        the worker's snapshot; meanwhile the events are kept, and the known state of the same epoch still answers
        look-ups. A newer epoch makes all earlier knowledge of the worker void.

        `chain_to` returns the hashes of the blocks from the root to a given one, if the worker computes a prompt that
        begins with them, and nothing otherwise. A worker that stores a block behind them holds them all, so they are
        recorded again if the index has evicted them."""
        source = self._members.sources.get(worker_id)
        if source is None:
            return ApplyResult.STALE
        if source.feed.is_newer(epoch):
            self._members.forget(source)
        result, fresh = source.feed.offer(epoch, first_seq, events)
        self._apply_events(source, fresh, chain_to)
        return result

    def load_snapshot(self, page: KvSnapshot) -> ApplyResult:
        """Applies a page of a snapshot: the first page replaces the known state of the worker, and after the last page
        the kept events are applied. In between, look-ups know the blocks of the pages that have come. It returns
        PARTIAL before the last page, STALE if the snapshot was older than the known state, and GAP if a page is missing
        or if there is a hole among the kept events, so that another snapshot is needed."""
        source = self._members.sources.get(page.worker_id)
        if source is None:
            return ApplyResult.STALE
        result = source.feed.turn_page(page.epoch, page.last_seq, page.page, page.is_last)
        if result in (ApplyResult.STALE, ApplyResult.GAP):
            return result
        if page.page == 0:
            self._members.forget(source)
        self._apply_events(source, page.chains)
        if result is ApplyResult.PARTIAL:
            return result
        self._apply_events(source, source.feed.resume())
        return ApplyResult.OK if source.feed.is_in_step else ApplyResult.GAP

    def is_in_step(self, worker_id: MemberId) -> bool:
        """Returns whether look-ups about this worker rest on a complete history."""
        return self._members.is_in_step(worker_id)

    def lookup(self, hashes: bytes, depths: Depths) -> None:
        """Sets `depths`, which has shape `(num_slots,)`, to the number of leading blocks that the worker of each slot
        holds, and to 0 elsewhere. The blocks that are found count as used. Raises ValueError unless `depths` is a
        contiguous int32 array with an entry for each worker's slot."""
        self._table.lookup(self._keys(hashes, 0), depths)
        if self._table.stride > 1:
            depths *= self._table.stride

    def stats(self) -> IndexStats:
        return self._members.stats()

    def check_invariants(self) -> None:
        """Raises AssertionError unless the table is consistent."""
        self._table.check_invariants()

    def _apply_events(
        self, source: _Source[KvEvent], events: Iterable[KvEvent], chain_to: Callable[[bytes], bytes] | None = None
    ) -> None:
        table = self._table
        table.sweep()
        for event in events:
            if isinstance(event, BlocksStored):
                parent = event.parent if table.stride == 1 else event.anchor
                if parent is not None and len(parent) != KV_HASH_BYTES:
                    continue  # No block has such a hash.
                keys = self._keys(event.hashes, event.depth)
                if table.store(source.member, parent, keys) or parent is None or chain_to is None:
                    continue
                if chain := chain_to(parent):
                    table.store(source.member, None, self._keys(chain, 0))
                    table.store(source.member, parent, keys)
            elif isinstance(event, BlocksRemoved):
                table.remove(source.member, event.hashes[: len(event.hashes) // KV_HASH_BYTES * KV_HASH_BYTES])
            else:
                self._members.forget(source)

    def _keys(self, hashes: bytes, depth: int) -> bytes:
        """Returns those of the blocks, of which the first has `depth` blocks ahead of it, that the table knows."""
        stride = self._table.stride
        if len(hashes) % KV_HASH_BYTES:
            hashes = hashes[: len(hashes) // KV_HASH_BYTES * KV_HASH_BYTES]
        if stride == 1:
            return hashes
        first = (stride - 1 - depth) % stride
        return np.frombuffer(hashes, dtype=f"V{KV_HASH_BYTES}")[first::stride].tobytes()


class _Change(NamedTuple):
    is_stored: bool
    mm_hash: MmHash


class FeatureIndex:
    """Records which members hold the features of a media item, by the item's `mm_hash`.

    The members are encoders, or workers that keep features: one index serves one kind. It keeps at most `max_items`
    different items, however many members hold them, and evicts the item that was not used for longest. Within a
    message, `stored` precede `removed`, and each hash is one event.
    """

    def __init__(self, max_items: int, table: HolderTable | None = None) -> None:
        self._table = new_table(max_items, stride=1) if table is None else table
        self._members: _SourceTable[_Change] = _SourceTable(self._table)

    def add_member(self, member_id: MemberId, slot: int) -> None:
        """Adds a member whose place in the answers is `slot`. A member that is there already is forgotten before. Its
        first message gives a GAP unless it is a snapshot."""
        self._members.add(member_id, slot)

    def remove_member(self, member_id: MemberId) -> None:
        """Forgets the member, whose slot may be given to another one at once. An unknown member is ignored."""
        self._members.remove(member_id)

    def apply(self, events: FeatureEvents) -> ApplyResult:
        """Takes in events or a snapshot of the member that `encoder_id` names. It returns GAP if the caller must ask
        the member for its snapshot. A newer epoch makes all earlier knowledge of the member void."""
        source = self._members.sources.get(events.encoder_id)
        if source is None:
            return ApplyResult.STALE
        feed = source.feed
        stored = (_Change(True, mm_hash) for mm_hash in events.stored)
        if events.is_snapshot:
            if feed.turn_page(events.epoch, events.first_seq, 0, True) is ApplyResult.STALE:
                return ApplyResult.STALE
            self._members.forget(source)
            self._apply_changes(source, stored)
            self._apply_changes(source, feed.resume())
            return ApplyResult.OK if feed.is_in_step else ApplyResult.GAP
        if feed.is_newer(events.epoch):
            self._members.forget(source)
        changes = [*stored, *(_Change(False, mm_hash) for mm_hash in events.removed)]
        result, fresh = feed.offer(events.epoch, events.first_seq, changes)
        self._apply_changes(source, fresh)
        return result

    def is_in_step(self, member_id: MemberId) -> bool:
        return self._members.is_in_step(member_id)

    def holders(self, mm_hash: MmHash) -> Sequence[int]:
        """Returns the slots of the members that hold all units of the item, which then counts as used."""
        return self._table.holders(_feature_key(mm_hash))

    def holders_of(self, mm_hashes: Sequence[MmHash]) -> Sequence[Sequence[int]]:
        """Returns what `holders` returns for each of these items."""
        return self._table.holders_of([_feature_key(mm_hash) for mm_hash in mm_hashes])

    def stats(self) -> IndexStats:
        return self._members.stats()

    def check_invariants(self) -> None:
        """Raises AssertionError unless the table is consistent."""
        self._table.check_invariants()

    def _apply_changes(self, source: _Source[_Change], changes: Iterable[_Change]) -> None:
        self._table.sweep()
        for change in changes:
            key = _feature_key(change.mm_hash)
            if change.is_stored:
                self._table.store(source.member, None, key)
            else:
                self._table.remove(source.member, key)


def _feature_key(mm_hash: MmHash) -> bytes:
    """Returns the key of an item in the table. A client that finds two media with equal keys only makes the router
    expect a feature where there is none; the encoder then encodes the medium."""
    return xxhash.xxh3_128_digest(mm_hash.encode())


# ------------------------------------------------------------ the events of one source, in order


class _Batch(NamedTuple, Generic[EventT]):
    first_seq: int
    events: Sequence[EventT]


class EventFeed(Generic[EventT]):
    """Puts the events of one source (a worker's KV events, an encoder's feature events) in order, each once.

    Events are numbered without holes inside an epoch. After a gap, or from an epoch not seen before, no event can be
    applied until a snapshot says where to start; the feed keeps the events that arrive meanwhile and yields them after
    the snapshot, which may come in several pages. It does not know what an event means, and it has no clock: the caller
    decides when to ask for the snapshot again. `max_buffered` limits the events that are kept while a snapshot is
    awaited. Beyond it the oldest are dropped, which costs at worst another snapshot.
    """

    def __init__(self, max_buffered: int) -> None:
        self.epoch = -1
        self.is_in_step = False
        self._next_seq = 0
        self._buffer: deque[_Batch[EventT]] = deque()
        self._num_buffered = 0
        self._max_buffered = max_buffered
        self._next_page: int | None = None
        """Holds the number of the page that must come next, while a snapshot arrives in pages."""

    @property
    def num_buffered(self) -> int:
        return self._num_buffered

    def is_newer(self, epoch: int) -> bool:
        """Returns whether the epoch makes everything known of the source void."""
        return epoch > self.epoch

    def offer(self, epoch: int, first_seq: int, events: Sequence[EventT]) -> tuple[ApplyResult, list[EventT]]:
        """Takes in a message. Returns the result, and the events that may be applied now, in order."""
        if epoch < self.epoch:
            return ApplyResult.STALE, []
        if epoch > self.epoch:
            self._enter(epoch)
        if self.is_in_step and first_seq <= self._next_seq:
            fresh = list(events[self._next_seq - first_seq :])
            self._next_seq += len(fresh)
            return ApplyResult.OK, fresh
        self.is_in_step = False
        self._keep(_Batch(first_seq, events))
        return ApplyResult.GAP if self._next_page is None else ApplyResult.PARTIAL, []

    def turn_page(self, epoch: int, last_seq: int, page: int, is_last: bool) -> ApplyResult:
        """Records that a page of a snapshot as of event `last_seq` has come. The caller must load the page if the
        result is PARTIAL, and must load it and then apply `resume()` if the result is OK. It must drop the page if the
        result is STALE, or if it is GAP because pages are missing."""
        if epoch < self.epoch or (epoch == self.epoch and self.is_in_step and (page or last_seq < self._next_seq - 1)):
            return ApplyResult.STALE
        if epoch > self.epoch:
            self._enter(epoch)
        if page and (page != self._next_page or last_seq != self._next_seq - 1):
            self._next_page = None
            return ApplyResult.GAP
        self._next_seq = last_seq + 1
        self.is_in_step = is_last
        self._next_page = None if is_last else page + 1
        return ApplyResult.OK if is_last else ApplyResult.PARTIAL

    def resume(self) -> Iterator[EventT]:
        """Yields the kept events that follow the snapshot. At a hole among them it ends early, keeps the events after
        the hole, and the feed is out of step."""
        for batch in sorted(self._drain(), key=lambda batch: batch.first_seq):
            if batch.first_seq > self._next_seq:
                self.is_in_step = False
            if not self.is_in_step:
                self._keep(batch)
                continue
            fresh = batch.events[self._next_seq - batch.first_seq :]
            self._next_seq += len(fresh)
            yield from fresh

    def _enter(self, epoch: int) -> None:
        self.epoch = epoch
        self.is_in_step = False
        self._next_page = None
        self._drain()

    def _drain(self) -> list[_Batch[EventT]]:
        batches = list(self._buffer)
        self._buffer.clear()
        self._num_buffered = 0
        return batches

    def _keep(self, batch: _Batch[EventT]) -> None:
        self._buffer.append(batch)
        self._num_buffered += len(batch.events)
        while self._num_buffered > self._max_buffered and self._buffer:
            self._num_buffered -= len(self._buffer.popleft().events)

"""Records, from the members' own events, which worker holds which prefix of KV blocks (`PrefixIndex`) and which encoder
holds the features of which media item (`FeatureIndex`).

Both indexes stand on the same two parts. An `EventFeed` for each source puts the source's events in order, and a
`HolderMasks` keeps one bit per member for each key. An index adds only what a key and an event mean.

Both indexes are hints, because a member may have evicted a key when a request reaches it: the worker itself finds out
at admission what it really holds, and an encoder that has evicted an item encodes it again. Both are bounded, and
neither evicts a key to make room for another.

This module knows nothing of any clock or policy, of how a snapshot is fetched, or of what a block or a feature
contains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from enum import Enum
from itertools import accumulate, pairwise
from operator import and_
from typing import Generic, NamedTuple, TypeVar

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

# ------------------------------------------------------------ the two indexes

MAX_BUFFERED_EVENTS = 4096


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
    """The message belongs to an older epoch, or is a snapshot older than the known state; it was dropped."""


class IndexStats(NamedTuple):
    num_keys: int
    max_keys: int
    num_sources: int
    num_out_of_step: int
    """Counts the sources that wait for a snapshot."""
    num_refused: int
    """Counts the keys that found no room since the start; the index is too small when this grows."""


FIRST_PIECE_BLOCKS = 8
MAX_PIECE_BLOCKS = 256


class PrefixIndex:
    """Records which worker holds which prefix of KV blocks.

    It keeps at most `max_blocks` different block hashes. Each takes about 150 bytes, however many workers hold it.
    `lookup` is exact about the events that the index received: it counts a worker's leading blocks up to the first
    block that the worker lacks. A stored block usually implies its ancestors (workers free tails first), and a
    bisection along the chain would need fewer look-ups. But two sequences that compute one prefix at the same time can
    leave a child cached without its parent. Bisection then promises KV that no request can use, and an image that seems
    covered is encoded late. So `lookup` walks the chain, in C-speed pieces that grow while any worker still holds the
    blocks: a miss costs one small piece.
    """

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

    def load_snapshot(self, page: KvSnapshot) -> ApplyResult:
        """Applies a page of a snapshot: the first page replaces the known state of the worker, and after the last page
        the kept events are applied. In between, look-ups know the blocks of the pages that have come. It returns
        PARTIAL before the last page, STALE if the snapshot was older than the known state, and GAP if a page is missing
        or if there is a hole among the kept events, so that another snapshot is needed."""
        worker_id = page.worker_id
        feed = self._feed(worker_id)
        result = feed.turn_page(page.epoch, page.last_seq, page.page, page.is_last)
        if result in (ApplyResult.STALE, ApplyResult.GAP):
            return result
        if page.page == 0:
            self._masks.forget(worker_id)
        for chain in page.chains:
            self._apply_event(worker_id, chain)
        if result is ApplyResult.PARTIAL:
            return result
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
            for block in split_hashes(event.hashes):
                if not self._masks.add(worker_id, block):
                    return  # Without this block, look-ups cannot find its descendants either.
        elif isinstance(event, BlocksRemoved):
            for block in split_hashes(event.hashes):
                self._masks.discard(worker_id, block)
        else:
            self._masks.forget(worker_id)


class _Change(NamedTuple):
    is_stored: bool
    mm_hash: MmHash


class FeatureIndex:
    """Records which encoders hold the features of a media item, by the item's `mm_hash`.

    It keeps at most `max_items` different items, however many encoders hold them. Within a message, `stored` precede
    `removed`, and each hash is one event.
    """

    def __init__(self, max_items: int) -> None:
        self._masks: HolderMasks[MmHash] = HolderMasks(max_items)
        self._encoder_to_feed: dict[MemberId, EventFeed[_Change]] = {}

    def apply(self, events: FeatureEvents) -> ApplyResult:
        """Takes in events or a snapshot. It returns GAP if the caller must ask the encoder for its snapshot. A newer
        epoch makes all earlier knowledge of the encoder void."""
        encoder_id = events.encoder_id
        feed = self._encoder_to_feed.setdefault(encoder_id, EventFeed(MAX_BUFFERED_EVENTS))
        if events.is_snapshot:
            return self._load(feed, events)
        if feed.is_newer(events.epoch):
            self._masks.forget(encoder_id)
        changes = [_Change(True, mm_hash) for mm_hash in events.stored]
        changes += [_Change(False, mm_hash) for mm_hash in events.removed]
        result, fresh = feed.offer(events.epoch, events.first_seq, changes)
        for change in fresh:
            self._apply_change(encoder_id, change)
        return result

    def remove_encoder(self, encoder_id: MemberId) -> None:
        """Forgets the encoder. An unknown encoder is ignored."""
        self._encoder_to_feed.pop(encoder_id, None)
        self._masks.forget(encoder_id)

    def is_in_step(self, encoder_id: MemberId) -> bool:
        feed = self._encoder_to_feed.get(encoder_id)
        return feed is not None and feed.is_in_step

    def holders(self, mm_hash: MmHash) -> frozenset[MemberId]:
        """Returns the encoders that hold all units of the item."""
        return frozenset(self._masks.members(self._masks.key_to_mask.get(mm_hash, 0)))

    def stats(self) -> IndexStats:
        feeds = self._encoder_to_feed.values()
        return IndexStats(
            self._masks.num_keys(),
            self._masks.max_keys,
            len(feeds),
            sum(not feed.is_in_step for feed in feeds),
            self._masks.num_refused,
        )

    def _load(self, feed: EventFeed[_Change], events: FeatureEvents) -> ApplyResult:
        if feed.turn_page(events.epoch, events.first_seq, 0, True) is ApplyResult.STALE:
            return ApplyResult.STALE
        self._masks.forget(events.encoder_id)
        for mm_hash in events.stored:
            self._masks.add(events.encoder_id, mm_hash)
        for change in feed.resume():
            self._apply_change(events.encoder_id, change)
        return ApplyResult.OK if feed.is_in_step else ApplyResult.GAP

    def _apply_change(self, encoder_id: MemberId, change: _Change) -> None:
        if change.is_stored:
            self._masks.add(encoder_id, change.mm_hash)
        else:
            self._masks.discard(encoder_id, change.mm_hash)


# ------------------------------------------------------------ the events of one source, in order

EventT = TypeVar("EventT")


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


# ------------------------------------------------------------ the holders of each key

KeyT = TypeVar("KeyT", bound=Hashable)
_MIN_RETIRED_TO_SWEEP = 16


class HolderMasks(Generic[KeyT]):
    """Maps each key to the members that hold it, as one bit per member in one integer per key, in a plain dict.

    The dict is bounded. A key that would exceed `max_keys` is refused (and counted), and no other key is evicted for
    it: a key that its holders evict is removed by their own events, and an old key is as likely a shared system prompt
    as garbage. To forget a member costs nothing at once: its bit is retired, and swept out later, when room or bits are
    short. `key_to_mask` is open to fast readers; they must ignore bits outside `live_mask`.
    """

    def __init__(self, max_keys: int) -> None:
        self.key_to_mask: dict[KeyT, int] = {}
        self.live_mask = 0
        self.num_refused = 0
        self.max_keys = max_keys
        self._member_to_bit: dict[MemberId, int] = {}
        self._slot_to_member: list[MemberId | None] = []
        self._free_slots: list[int] = []
        self._retired_mask = 0

    def add(self, member_id: MemberId, key: KeyT) -> bool:
        """Records that the member holds the key. Returns False if there is no room for one more key."""
        bit = self._member_to_bit.get(member_id) or self._join(member_id)
        mask = self.key_to_mask.get(key)
        if mask is None:
            if len(self.key_to_mask) >= self.max_keys and not self._make_room():
                self.num_refused += 1
                return False
            mask = 0
        self.key_to_mask[key] = mask | bit
        return True

    def discard(self, member_id: MemberId, key: KeyT) -> None:
        """Records that the member no longer holds the key. It does nothing if the member does not hold it."""
        bit = self._member_to_bit.get(member_id, 0)
        mask = self.key_to_mask.get(key, 0) & ~bit
        if mask:
            self.key_to_mask[key] = mask
        else:
            self.key_to_mask.pop(key, None)

    def forget(self, member_id: MemberId) -> None:
        """Records that the member holds nothing any more. It takes O(1), amortised."""
        bit = self._member_to_bit.pop(member_id, 0)
        if not bit:
            return
        self._slot_to_member[bit.bit_length() - 1] = None
        self.live_mask &= ~bit
        self._retired_mask |= bit
        num_retired = self._retired_mask.bit_count()
        if num_retired >= max(_MIN_RETIRED_TO_SWEEP, len(self._member_to_bit)):
            self._sweep()

    def members(self, mask: int) -> Iterator[MemberId]:
        """Yields the members whose bits are set, except retired ones."""
        mask &= self.live_mask
        while mask:
            low = mask & -mask
            member_id = self._slot_to_member[low.bit_length() - 1]
            assert member_id is not None, "a live bit has its member"
            yield member_id
            mask ^= low

    def num_keys(self) -> int:
        """Counts the keys that take room, including retired ones; there are never more than `max_keys`."""
        return len(self.key_to_mask)

    def _join(self, member_id: MemberId) -> int:
        if self._free_slots:
            slot = self._free_slots.pop()
            self._slot_to_member[slot] = member_id
        else:
            slot = len(self._slot_to_member)
            self._slot_to_member.append(member_id)
        bit = 1 << slot
        self._member_to_bit[member_id] = bit
        self.live_mask |= bit
        return bit

    def _make_room(self) -> bool:
        if self._retired_mask:
            self._sweep()
        return len(self.key_to_mask) < self.max_keys

    def _sweep(self) -> None:
        """Clears retired bits in all keys, so that their slots may be given out again. It takes O(keys).

        It changes the dict in place, because readers and callers keep references to it.
        """
        keep, retired = ~self._retired_mask, self._retired_mask
        for key in [key for key, mask in self.key_to_mask.items() if mask & retired]:
            mask = self.key_to_mask[key] & keep
            if mask:
                self.key_to_mask[key] = mask
            else:
                del self.key_to_mask[key]
        self._free_slots += [slot for slot in range(len(self._slot_to_member)) if retired >> slot & 1]
        self._retired_mask = 0

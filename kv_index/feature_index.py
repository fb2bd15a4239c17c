"""Records which encoder still holds the features of a media item, from the encoders' own events.

It orders events in the same way as the prefix index; the key is the item's `mm_hash`. Like the prefix index it is only
a hint: an encoder that has evicted the item in the meantime encodes it again. Within a message, `stored` precede
`removed`, and each hash is one event. This module knows nothing of how a snapshot is fetched.
"""

from __future__ import annotations

from typing import NamedTuple

from fabric.ids import MemberId, MmHash
from fabric.messages import FeatureEvents
from kv_index.feed import ApplyResult, EventFeed
from kv_index.holder_masks import HolderMasks
from kv_index.prefix_index import MAX_BUFFERED_EVENTS, IndexStats


class _Change(NamedTuple):
    is_stored: bool
    mm_hash: MmHash


class FeatureIndex:
    """Keeps at most `max_items` different items, however many encoders hold them."""

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
        if feed.restart(events.epoch, events.first_seq) is ApplyResult.STALE:
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

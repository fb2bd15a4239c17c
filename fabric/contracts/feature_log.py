"""Counts the changes of a member's cache of features, so that routers can follow them. Encoders keep a `FeatureLog` of
their arenas, and workers of the features that they keep after prefill. A router that misses an event asks for a
snapshot.

The module knows nothing of where features lie, of how messages travel, or of what a router does with an event.
"""

from __future__ import annotations

from itertools import groupby

from fabric.contracts.identity import MemberId, MmHash, UnitKey
from fabric.contracts.messages import FeatureEvents


class FeatureLog:
    """Records how a member's cache of features changes, as events that routers have yet to receive: items stored and
    removed, numbered without gaps. An item counts as stored while every one of its units is ready. Sequence numbers
    begin at 1 with the log. The log is not thread-safe."""

    def __init__(self, member_id: MemberId, epoch: int) -> None:
        self.epoch = epoch
        """Holds the member's epoch, which a worker learns from the directory after its start."""
        self._member_id = member_id
        self._item_to_ready: dict[MmHash, set[int]] = {}
        self._stored: dict[MmHash, None] = {}
        """Holds the items that are stored now, oldest first."""
        self._pending: list[tuple[bool, MmHash]] = []
        """Holds the events that are not yet drained as (is_stored, item), oldest first."""
        self._last_seq = 0

    def unit_ready(self, unit: UnitKey, num_units: int) -> None:
        """Records that one of the item's `num_units` units can be read; the last unit of an item makes an event."""
        ready = self._item_to_ready.setdefault(unit.mm_hash, set())
        ready.add(unit.unit)
        if len(ready) == num_units and unit.mm_hash not in self._stored:
            self._stored[unit.mm_hash] = None
            self._note(True, unit.mm_hash)

    def unit_gone(self, unit: UnitKey) -> None:
        """Records that the unit was discarded; this makes an event if the item was complete."""
        ready = self._item_to_ready[unit.mm_hash]
        ready.remove(unit.unit)
        if not ready:
            del self._item_to_ready[unit.mm_hash]
        if unit.mm_hash in self._stored:
            del self._stored[unit.mm_hash]
            self._note(False, unit.mm_hash)

    def drain(self) -> list[FeatureEvents]:
        """Takes the events since the last call. Each message holds either stored or removed items, so the order within
        a message does not matter."""
        messages: list[FeatureEvents] = []
        seq = self._last_seq - len(self._pending) + 1
        for is_stored, run in groupby(self._pending, key=lambda event: event[0]):
            items = tuple(item for _, item in run)
            stored, removed = (items, ()) if is_stored else ((), items)
            messages.append(FeatureEvents(self._member_id, self.epoch, seq, stored, removed))
            seq += len(items)
        self._pending.clear()
        return messages

    def snapshot(self) -> FeatureEvents:
        """Returns every stored item, as of the last event, whether that event is drained or not."""
        return FeatureEvents(self._member_id, self.epoch, self._last_seq, tuple(self._stored), is_snapshot=True)

    def _note(self, is_stored: bool, item: MmHash) -> None:
        self._last_seq += 1
        self._pending.append((is_stored, item))

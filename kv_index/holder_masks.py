"""Records which of many members hold a key: it keeps one bit per member in one integer per key, in a plain dict.

The dict is bounded. A key that would exceed `max_keys` is refused (and counted), and no other key is evicted for it:
a key that its holders evict is removed by their own events, and an old key is as likely a shared system prompt as
garbage. Forgetting a member costs nothing at once: its bit is retired, and swept out later, when room or bits are
short. This module knows nothing of chains of blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from fabric.ids import MemberId

KeyT = TypeVar("KeyT", bound=Hashable)

_MIN_RETIRED_TO_SWEEP = 16


class HolderMasks(Generic[KeyT]):
    """Maps keys to members. `key_to_mask` is open to fast readers; they must ignore bits outside `live_mask`."""

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

"""Keeps leases, that is, keys with a deadline that end by themselves. A dead peer's leases end without any
call that gives them back.

It knows nothing of what a key stands for, and it never acts: the owner asks which leases have expired.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

from fabric.clock import Clock

Key = TypeVar("Key", bound=Hashable)


class LeaseTable(Generic[Key]):
    """Keeps leases by key. It is not thread-safe. A lease of `lease_s` taken at `t` has expired at `t + lease_s`, and
    not before."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._key_to_deadline_s: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        """Holds deadlines, the oldest first; an entry is void unless the map still holds the same deadline."""
        self._order = count()

    def renew(self, key: Key, lease_s: float) -> None:
        """Takes or renews a lease: it ends `lease_s` from now, which may be later or earlier than before."""
        deadline_s = self._clock.now() + lease_s
        self._key_to_deadline_s[key] = deadline_s
        heapq.heappush(self._heap, (deadline_s, next(self._order), key))

    def drop(self, key: Key) -> bool:
        """Ends a lease without reporting it as expired. Returns False for an unknown key."""
        return self._key_to_deadline_s.pop(key, None) is not None

    def expired(self) -> list[Key]:
        """Removes and returns the keys whose lease has expired, in order of their deadlines; each key is reported
        once."""
        now_s = self._clock.now()
        gone: list[Key] = []
        while self._heap and self._heap[0][0] <= now_s:
            deadline_s, _, key = heapq.heappop(self._heap)
            if self._key_to_deadline_s.get(key) == deadline_s:
                del self._key_to_deadline_s[key]
                gone.append(key)
        return gone

    def __contains__(self, key: Key) -> bool:
        """Returns whether a lease is running now. It is False from the deadline on, even before `expired` is called."""
        deadline_s = self._key_to_deadline_s.get(key)
        return deadline_s is not None and deadline_s > self._clock.now()

    def __len__(self) -> int:
        """Counts the leases that are not yet dropped or reported, expired or not."""
        return len(self._key_to_deadline_s)

"""Promises that end by themselves: keys with a deadline. A dead peer's leases need nobody to give them back.

Knows nothing of what a key stands for, and never acts: the owner asks what has expired.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

from fabric.clock import Clock

Key = TypeVar("Key", bound=Hashable)


class LeaseTable(Generic[Key]):
    """Not thread-safe. A lease of `lease_s` taken at `t` has expired at `t + lease_s`, not before."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._key_to_deadline_s: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        """Deadlines, oldest first; an entry is void unless the map still says the same."""
        self._order = count()

    def renew(self, key: Key, lease_s: float) -> None:
        """Takes or renews: the lease ends `lease_s` from now, later or earlier than before."""
        deadline_s = self._clock.now() + lease_s
        self._key_to_deadline_s[key] = deadline_s
        heapq.heappush(self._heap, (deadline_s, next(self._order), key))

    def drop(self, key: Key) -> bool:
        """Ends a lease without reporting it as expired. False for an unknown key."""
        return self._key_to_deadline_s.pop(key, None) is not None

    def expired(self) -> list[Key]:
        """Takes the keys whose lease has run out, in order of their deadlines; each is reported once."""
        now_s = self._clock.now()
        gone: list[Key] = []
        while self._heap and self._heap[0][0] <= now_s:
            deadline_s, _, key = heapq.heappop(self._heap)
            if self._key_to_deadline_s.get(key) == deadline_s:
                del self._key_to_deadline_s[key]
                gone.append(key)
        return gone

    def __contains__(self, key: Key) -> bool:
        """Whether a lease is running now; False from its deadline on, also before `expired` was asked."""
        deadline_s = self._key_to_deadline_s.get(key)
        return deadline_s is not None and deadline_s > self._clock.now()

    def __len__(self) -> int:
        """Leases not yet dropped or reported, run out or not."""
        return len(self._key_to_deadline_s)

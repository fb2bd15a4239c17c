"""Records which worker holds which lease on a feature, until when, and for which attempt and router.

The module knows nothing of memory or of what a unit is.
"""

from __future__ import annotations

from collections.abc import KeysView
from typing import NamedTuple

from fabric.clock import Clock
from fabric.ids import AttemptId, MemberId, UnitKey
from fabric.leases import LeaseTable

Holder = AttemptId | MemberId


class LeaseKey(NamedTuple):
    """A `LeaseKey` names one worker's right to read one unit for one attempt."""

    worker_id: MemberId
    attempt_id: AttemptId
    unit: UnitKey


class _LeaseHolder(NamedTuple):
    router_id: MemberId
    since_s: float


class LeaseBook:
    """Keeps all leases and finds them by attempt, by worker and by router. It is not thread-safe. Ids of workers and of
    routers are never the same."""

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._deadlines: LeaseTable[LeaseKey] = LeaseTable(clock)
        self._key_to_reader: dict[LeaseKey, _LeaseHolder] = {}
        self._holder_to_keys: dict[Holder, dict[LeaseKey, None]] = {}
        """Keeps the keys of each holder, oldest first."""

    def __len__(self) -> int:
        return len(self._key_to_reader)

    def keys(self) -> KeysView[LeaseKey]:
        return self._key_to_reader.keys()

    def take(self, key: LeaseKey, router_id: MemberId) -> None:
        """Adds a lease or renews it; a renewed lease becomes the newest."""
        if key in self._key_to_reader:
            self._forget(key)
        self._key_to_reader[key] = _LeaseHolder(router_id, self._clock.now())
        for holder in (key.attempt_id, key.worker_id, router_id):
            self._holder_to_keys.setdefault(holder, {})[key] = None
        self._deadlines.renew(key, self._lease_s)

    def drop(self, key: LeaseKey) -> float:
        """Ends a lease; returns the seconds since it was taken or renewed."""
        self._deadlines.drop(key)
        return self._clock.now() - self._forget(key).since_s

    def expired(self) -> list[LeaseKey]:
        """Returns leases that have run out, in order of their deadlines. Each is returned once and stays in the book
        until it is dropped."""
        return self._deadlines.expired()

    def held_by(self, holder: Holder) -> list[LeaseKey]:
        """Returns the leases of one attempt, one worker or one router, oldest first."""
        return list(self._holder_to_keys.get(holder, ()))

    def check_invariants(self) -> None:
        assert len(self._deadlines) == len(self._key_to_reader)
        found: dict[Holder, set[LeaseKey]] = {}
        for key, reader in self._key_to_reader.items():
            for holder in (key.attempt_id, key.worker_id, reader.router_id):
                found.setdefault(holder, set()).add(key)
        assert found == {holder: set(keys) for holder, keys in self._holder_to_keys.items()}

    def _forget(self, key: LeaseKey) -> _LeaseHolder:
        reader = self._key_to_reader.pop(key)
        for holder in (key.attempt_id, key.worker_id, reader.router_id):
            keys = self._holder_to_keys[holder]
            del keys[key]
            if not keys:
                del self._holder_to_keys[holder]
        return reader

"""The feature table: which units lie in the arena, who holds them, and what may be evicted for another.

A feature that somebody may still read is never evicted: when the arena is full of leased features, the next one
waits (back-pressure). Cached features, which nobody leases, go oldest first. A lease ends by release, by its
expiry, or with its worker, attempt or router. Not thread-safe: it lives in the service's event loop; only the bytes
of a reserved slot are written by another thread. Knows nothing of models, requests' contents or the message plane.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from encoder_pool.planning.feature_log import FeatureLog
from encoder_pool.planning.lifecycle import FeatureState, advance
from fabric.channel import FeatureSource, SourceSlot
from fabric.clock import Clock
from fabric.errors import ArenaFull
from fabric.ids import AttemptId, MemberId, UnitKey
from fabric.leases import LeaseTable


class LeaseKey(NamedTuple):
    """One worker's right to read one unit for one attempt."""

    worker_id: MemberId
    attempt_id: AttemptId
    unit: UnitKey


class TableUsage(NamedTuple):
    used_bytes: int
    """Being written or leased."""
    cached_bytes: int
    """Complete and unleased: may be evicted."""
    total_bytes: int
    num_leases: int
    num_encoding: int


class FeatureSpec(NamedTuple):
    """What every feature of one model looks like: C-contiguous `(num_levels, num_tokens, hidden_size)` of `dtype`."""

    num_levels: int
    hidden_size: int
    dtype: str
    itemsize: int

    def shape(self, num_tokens: int) -> tuple[int, int, int]:
        return (self.num_levels, num_tokens, self.hidden_size)

    def nbytes(self, num_tokens: int) -> int:
        return self.num_levels * num_tokens * self.hidden_size * self.itemsize


@dataclass(slots=True)
class FeatureEntry:
    """One unit in the arena. References are sets of leases, so that ending one twice is harmless."""

    slot: SourceSlot
    num_units: int
    state: FeatureState = FeatureState.ENCODING
    leases: set[LeaseKey] = field(default_factory=set)


class FeatureTable:
    """Owns every slot of `source`."""

    def __init__(self, source: FeatureSource, clock: Clock, lease_s: float, log: FeatureLog) -> None:
        self._source = source
        self._lease_s = lease_s
        self._log = log
        self._unit_to_entry: dict[UnitKey, FeatureEntry] = {}
        self._cached: OrderedDict[UnitKey, None] = OrderedDict()
        """Evictable units, least recently used first."""
        self._deadlines: LeaseTable[LeaseKey] = LeaseTable(clock)
        self._lease_to_router: dict[LeaseKey, MemberId] = {}

    def is_ready(self, unit: UnitKey) -> bool:
        """Whether the unit can be leased now."""
        entry = self._unit_to_entry.get(unit)
        return entry is not None and entry.state in (FeatureState.ENCODED, FeatureState.STAGED)

    def reserve(self, unit: UnitKey, nbytes: int, num_units: int) -> SourceSlot | None:
        """Makes room for a unit that is about to be encoded, evicting cached ones as needed.

        None when leased features and ones being written leave no room: nothing was evicted then, unless the room
        turned out to be in pieces. Raises UnitTooLarge for what can't ever fit.
        """
        assert unit not in self._unit_to_entry, f"{unit} has its memory already"
        slot = self._allocate(nbytes)
        if slot is not None:
            self._unit_to_entry[unit] = FeatureEntry(slot, num_units)
        return slot

    def complete(self, unit: UnitKey) -> None:
        """The slot's bytes are written: the unit can be leased, and evicted while it is not."""
        entry = self._unit_to_entry[unit]
        entry.state = advance(entry.state, FeatureState.ENCODED)
        self._cached[unit] = None
        self._log.unit_ready(unit, entry.num_units)

    def fail(self, unit: UnitKey) -> None:
        """The forward failed on this unit: its memory is free again."""
        entry = self._unit_to_entry.pop(unit)
        entry.state = advance(entry.state, FeatureState.FAILED)
        self._source.free(entry.slot)

    def lease(self, key: LeaseKey, router_id: MemberId) -> SourceSlot:
        """Gives (or renews) a worker's right to read a ready unit, and marks the unit as recently used."""
        entry = self._unit_to_entry[key.unit]
        if entry.state is not FeatureState.STAGED:
            entry.state = advance(entry.state, FeatureState.STAGED)
            del self._cached[key.unit]
        entry.leases.add(key)
        self._lease_to_router[key] = router_id
        self._deadlines.renew(key, self._lease_s)
        return entry.slot

    def release(self, key: LeaseKey, generation: int) -> bool:
        """The worker is done with this generation of the unit. Unknown, ended or older ones are ignored (False)."""
        entry = self._unit_to_entry.get(key.unit)
        if entry is None or key not in entry.leases or entry.slot.generation != generation:
            return False
        self._end(key)
        return True

    def expire(self) -> int:
        """Ends the leases that have run out; returns how many."""
        expired = self._deadlines.expired()
        for key in expired:
            self._end(key)
        return len(expired)

    def end_attempt(self, attempt_id: AttemptId) -> int:
        return self._end_where(lambda key, _: key.attempt_id == attempt_id)

    def end_worker(self, worker_id: MemberId) -> int:
        return self._end_where(lambda key, _: key.worker_id == worker_id)

    def end_router(self, router_id: MemberId) -> int:
        return self._end_where(lambda _, router: router == router_id)

    def usage(self) -> TableUsage:
        cached_bytes = sum(self._unit_to_entry[unit].slot.nbytes for unit in self._cached)
        all_bytes = sum(entry.slot.nbytes for entry in self._unit_to_entry.values())
        num_encoding = sum(entry.state is FeatureState.ENCODING for entry in self._unit_to_entry.values())
        total_bytes = self._source.usage().total_bytes
        return TableUsage(all_bytes - cached_bytes, cached_bytes, total_bytes, len(self._lease_to_router), num_encoding)

    def check_invariants(self) -> None:
        """Asserts that leases, states, the eviction order and the arena tell one story."""
        leases: set[LeaseKey] = set()
        for unit, entry in self._unit_to_entry.items():
            assert (entry.state is FeatureState.STAGED) == bool(entry.leases), f"{unit}: {entry.state} {entry.leases}"
            assert (entry.state is FeatureState.ENCODED) == (unit in self._cached), f"{unit}: {entry.state}"
            assert all(key.unit == unit for key in entry.leases)
            leases |= entry.leases
        assert leases == self._lease_to_router.keys()
        assert len(self._deadlines) == len(leases)
        usage, arena = self.usage(), self._source.usage()
        assert arena.num_slots == len(self._unit_to_entry)
        assert usage.used_bytes + usage.cached_bytes <= arena.total_bytes

    def _allocate(self, nbytes: int) -> SourceSlot | None:
        while True:
            try:
                return self._source.allocate(nbytes)
            except ArenaFull:
                usage = self.usage()
                if not self._cached or usage.used_bytes + nbytes > usage.total_bytes:
                    return None
            self._evict(next(iter(self._cached)))

    def _evict(self, unit: UnitKey) -> None:
        del self._cached[unit]
        entry = self._unit_to_entry.pop(unit)
        entry.state = advance(entry.state, FeatureState.DISCARDED)
        self._source.free(entry.slot)
        self._log.unit_gone(unit)

    def _end(self, key: LeaseKey) -> None:
        entry = self._unit_to_entry[key.unit]
        entry.leases.discard(key)
        self._deadlines.drop(key)
        del self._lease_to_router[key]
        if not entry.leases:
            entry.state = advance(entry.state, FeatureState.ENCODED)
            self._cached[key.unit] = None

    def _end_where(self, is_meant: Callable[[LeaseKey, MemberId], bool]) -> int:
        meant = [key for key, router_id in self._lease_to_router.items() if is_meant(key, router_id)]
        for key in meant:
            self._end(key)
        return len(meant)

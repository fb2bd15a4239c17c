"""The feature table: which units lie in the arena, who holds them, and what may be evicted for another.

A feature that somebody may still read is never evicted: when the arena is full of leased features, the next one
waits (back-pressure). Cached features, which nobody leases, go oldest first. A lease ends by release, by its
expiry, or with its worker, attempt or router. Not thread-safe: it lives in the service's event loop; only the bytes
of a reserved slot are written by another thread. Knows nothing of models, requests' contents or the message plane.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
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
    encoding_bytes: int
    """Of `used_bytes`: being written."""
    num_cached: int
    num_staged: int


class TableSums(NamedTuple):
    """Over the table's life."""

    num_transfers: int = 0
    """Leases that their worker released."""
    transfer_s: float = 0.0
    """From lease to release, of these."""
    num_evictions: int = 0
    evicted_bytes: int = 0


class _Reader(NamedTuple):
    router_id: MemberId
    since_s: float


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
        self._clock = clock
        self._deadlines: LeaseTable[LeaseKey] = LeaseTable(clock)
        self._lease_to_reader: dict[LeaseKey, _Reader] = {}
        self._state_to_bytes: Counter[FeatureState] = Counter()
        self._state_to_count: Counter[FeatureState] = Counter()
        self.sums = TableSums()

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
            entry = self._unit_to_entry[unit] = FeatureEntry(slot, num_units)
            self._count(entry, 1)
        return slot

    def complete(self, unit: UnitKey) -> None:
        """The slot's bytes are written: the unit can be leased, and evicted while it is not."""
        entry = self._unit_to_entry[unit]
        self._advance(entry, FeatureState.ENCODED)
        self._cached[unit] = None
        self._log.unit_ready(unit, entry.num_units)

    def fail(self, unit: UnitKey) -> None:
        """The forward failed on this unit: its memory is free again."""
        entry = self._unit_to_entry.pop(unit)
        self._count(entry, -1)
        entry.state = advance(entry.state, FeatureState.FAILED)
        self._source.free(entry.slot)

    def lease(self, key: LeaseKey, router_id: MemberId) -> SourceSlot:
        """Gives (or renews) a worker's right to read a ready unit, and marks the unit as recently used."""
        entry = self._unit_to_entry[key.unit]
        if entry.state is not FeatureState.STAGED:
            self._advance(entry, FeatureState.STAGED)
            del self._cached[key.unit]
        entry.leases.add(key)
        self._lease_to_reader[key] = _Reader(router_id, self._clock.now())
        self._deadlines.renew(key, self._lease_s)
        return entry.slot

    def release(self, key: LeaseKey, generation: int) -> bool:
        """The worker is done with this generation of the unit. Unknown, ended or older ones are ignored (False)."""
        entry = self._unit_to_entry.get(key.unit)
        if entry is None or key not in entry.leases or entry.slot.generation != generation:
            return False
        seconds = self._clock.now() - self._lease_to_reader[key].since_s
        num_transfers, transfer_s = self.sums.num_transfers + 1, self.sums.transfer_s + seconds
        self.sums = self.sums._replace(num_transfers=num_transfers, transfer_s=transfer_s)
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
        nbytes, count = self._state_to_bytes, self._state_to_count
        return TableUsage(
            used_bytes=nbytes[FeatureState.ENCODING] + nbytes[FeatureState.STAGED],
            cached_bytes=nbytes[FeatureState.ENCODED],
            total_bytes=self._source.usage().total_bytes,
            num_leases=len(self._lease_to_reader),
            num_encoding=count[FeatureState.ENCODING],
            encoding_bytes=nbytes[FeatureState.ENCODING],
            num_cached=count[FeatureState.ENCODED],
            num_staged=count[FeatureState.STAGED],
        )

    def check_invariants(self) -> None:
        """Asserts that leases, states, the eviction order and the arena tell one story."""
        leases: set[LeaseKey] = set()
        nbytes: Counter[FeatureState] = Counter()
        for unit, entry in self._unit_to_entry.items():
            assert (entry.state is FeatureState.STAGED) == bool(entry.leases), f"{unit}: {entry.state} {entry.leases}"
            assert (entry.state is FeatureState.ENCODED) == (unit in self._cached), f"{unit}: {entry.state}"
            assert all(key.unit == unit for key in entry.leases)
            leases |= entry.leases
            nbytes[entry.state] += entry.slot.nbytes
        assert nbytes == self._state_to_bytes
        assert leases == self._lease_to_reader.keys()
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
        self._count(entry, -1)
        entry.state = advance(entry.state, FeatureState.DISCARDED)
        self._source.free(entry.slot)
        num_evictions, evicted_bytes = self.sums.num_evictions + 1, self.sums.evicted_bytes + entry.slot.nbytes
        self.sums = self.sums._replace(num_evictions=num_evictions, evicted_bytes=evicted_bytes)
        self._log.unit_gone(unit)

    def _end(self, key: LeaseKey) -> None:
        entry = self._unit_to_entry[key.unit]
        entry.leases.discard(key)
        self._deadlines.drop(key)
        del self._lease_to_reader[key]
        if not entry.leases:
            self._advance(entry, FeatureState.ENCODED)
            self._cached[key.unit] = None

    def _advance(self, entry: FeatureEntry, target: FeatureState) -> None:
        self._count(entry, -1)
        entry.state = advance(entry.state, target)
        self._count(entry, 1)

    def _count(self, entry: FeatureEntry, sign: int) -> None:
        self._state_to_bytes[entry.state] += sign * entry.slot.nbytes
        self._state_to_count[entry.state] += sign

    def _end_where(self, is_meant: Callable[[LeaseKey, MemberId], bool]) -> int:
        meant = [key for key, reader in self._lease_to_reader.items() if is_meant(key, reader.router_id)]
        for key in meant:
            self._end(key)
        return len(meant)

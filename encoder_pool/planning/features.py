"""The feature table: which units lie in the arena, who holds them, and what may be evicted for another.

A feature that somebody may still read is never evicted: when the arena is full of leased features, the next one
waits (back-pressure). Where there are several workers, none may hold more than what it leaves free
(`planning/shares.py`). Cached features, which nobody leases, are idle slots of the arena, which says which of them must
go for another. What waits for long for room in one piece claims a range: features that lie there are evicted, or *set
aside* where somebody may still read them. They are found no more, so that nobody leases them anew, and go with their
last lease. A lease ends by release, by its expiry, or with its worker, attempt or router. No operation's time grows
with what is stored, but that of a claim with what lies in its range. Not thread-safe: it lives in the service's event
loop; only the bytes of a reserved slot are written by another thread. Knows nothing of models, requests' contents or
the message plane.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from encoder_pool.planning.feature_log import FeatureLog
from encoder_pool.planning.lease_book import Holder, LeaseBook, LeaseKey
from encoder_pool.planning.lifecycle import FeatureState, advance
from encoder_pool.planning.shares import is_within_share
from fabric.channel import FeatureSource, SourceSlot
from fabric.clock import Clock
from fabric.errors import ArenaFull
from fabric.ids import AttemptId, MemberId, UnitKey


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


class FeatureSpec(NamedTuple):
    """What every feature of one model looks like: C-contiguous `(num_levels, num_tokens, hidden_size)` of `dtype`.
    An item may have fewer levels than the model: `num_levels` of a call is `MediaItem.num_levels`."""

    num_levels: int
    hidden_size: int
    dtype: str
    itemsize: int

    def shape(self, num_tokens: int, num_levels: int = 0) -> tuple[int, int, int]:
        return (num_levels or self.num_levels, num_tokens, self.hidden_size)

    def nbytes(self, num_tokens: int, num_levels: int = 0) -> int:
        return (num_levels or self.num_levels) * num_tokens * self.hidden_size * self.itemsize


@dataclass(slots=True)
class FeatureEntry:
    """One unit in the arena. References are sets of leases, so that ending one twice is harmless."""

    slot: SourceSlot
    num_units: int
    state: FeatureState = FeatureState.ENCODING
    leases: set[LeaseKey] = field(default_factory=set)
    worker_to_num_leases: Counter[MemberId] = field(default_factory=Counter)
    made_for: MemberId | None = None
    """The worker whose share it was reserved from, until that has leased it or everybody who waited was told."""
    is_set_aside: bool = False


class FeatureTable:
    """Owns every slot of `source`."""

    def __init__(self, source: FeatureSource, clock: Clock, lease_s: float, log: FeatureLog) -> None:
        self._source = source
        self._log = log
        self._unit_to_entry: dict[UnitKey, FeatureEntry] = {}
        self._slot_id_to_unit: dict[int, UnitKey] = {}
        self._key_to_entry: dict[LeaseKey, FeatureEntry] = {}
        self._set_aside: dict[int, FeatureEntry] = {}
        """By slot id: leased, in the way of a claim, and found no more."""
        self._claimant: UnitKey | None = None
        self._in_the_way: set[int] = set()
        """Slots in the claimed range that are to be evicted or set aside: they were being written so far."""
        self._leases = LeaseBook(clock, lease_s)
        self._worker_to_bytes: Counter[MemberId] = Counter()
        """Of what each worker leases, or is being written for it."""
        self._workers: set[MemberId] = set()
        """Those that are known, with or without leases; one that leases something counts too."""
        self._state_to_bytes: Counter[FeatureState] = Counter()
        self._state_to_count: Counter[FeatureState] = Counter()
        self.sums = TableSums()

    def is_ready(self, unit: UnitKey) -> bool:
        """Whether the unit can be leased now."""
        entry = self._unit_to_entry.get(unit)
        return entry is not None and entry.state in (FeatureState.ENCODED, FeatureState.STAGED)

    @property
    def has_shares(self) -> bool:
        """Whether there are several workers, none of which may take all."""
        return len(self._workers | self._worker_to_bytes.keys()) > 1

    def worker_came(self, worker_id: MemberId) -> None:
        """There is this worker, until `end_worker`."""
        self._workers.add(worker_id)

    def may_take(self, worker_id: MemberId, nbytes: int) -> bool:
        """Whether so many bytes more are within a worker's share of the arena."""
        if not self.has_shares:
            return True
        used_bytes = self._state_to_bytes[FeatureState.ENCODING] + self._state_to_bytes[FeatureState.STAGED]
        free_bytes = self._source.usage().total_bytes - used_bytes
        return is_within_share(self._worker_to_bytes[worker_id], nbytes, free_bytes)

    def may_lease(self, worker_id: MemberId, unit: UnitKey) -> bool:
        """Whether a lease of a ready unit is within a worker's share: so is what was made for it, or it leases
        already."""
        entry = self._unit_to_entry[unit]
        is_its_own = entry.made_for == worker_id or worker_id in entry.worker_to_num_leases
        return is_its_own or self.may_take(worker_id, entry.slot.nbytes)

    def reserve(
        self, unit: UnitKey, nbytes: int, num_units: int, worker_id: MemberId | None = None, *, is_due: bool = False
    ) -> SourceSlot | None:
        """Makes room for a unit that is about to be encoded, evicting cached ones as needed. It counts against the
        share of `worker_id` while it is written.

        None when leased features and ones being written leave no room in one piece. Nothing was evicted then, unless
        the unit `is_due`: it claims a range, if none is claimed, and has its room at the latest when the leases that
        there are on it have ended. Raises UnitTooLarge for what can't ever fit.
        """
        assert unit not in self._unit_to_entry, f"{unit} has its memory already"
        slot = self._allocate(nbytes)
        if slot is None and is_due:
            slot = self._allocate_claimed(unit, nbytes)
        if slot is not None:
            if unit == self._claimant:
                self.end_claim()
            entry = self._unit_to_entry[unit] = FeatureEntry(slot, num_units, made_for=worker_id)
            self._hold(worker_id, slot.nbytes)
            self._slot_id_to_unit[slot.slot_id] = unit
            self._count(entry, 1)
        return slot

    def end_claim(self) -> None:
        """Nothing is kept any more for a unit that claimed a range. Harmless if none did."""
        self._source.unclaim()
        self._claimant = None
        self._in_the_way.clear()

    def complete(self, unit: UnitKey) -> None:
        """The slot's bytes are written: the unit can be leased, and evicted while it is not."""
        entry = self._unit_to_entry[unit]
        self._advance(entry, FeatureState.ENCODED)
        self._hold(entry.made_for, -entry.slot.nbytes)
        self._source.set_idle(entry.slot)
        self._log.unit_ready(unit, entry.num_units)

    def told(self, unit: UnitKey) -> None:
        """Everybody who waited for a unit that was completed was told of it: from now on it is like any other that
        is cached. Harmless for a unit that failed."""
        entry = self._unit_to_entry.get(unit)
        if entry is not None:
            entry.made_for = None

    def fail(self, unit: UnitKey) -> None:
        """The forward failed on this unit: its memory is free again."""
        self._hold(self._unit_to_entry[unit].made_for, -self._unit_to_entry[unit].slot.nbytes)
        self._take_out(unit, FeatureState.FAILED)

    def lease(self, key: LeaseKey, router_id: MemberId) -> SourceSlot:
        """Gives (or renews) a worker's right to read a ready unit, and marks the unit as recently used."""
        entry = self._unit_to_entry[key.unit]
        if self._key_to_entry.get(key, entry) is not entry:
            self._end(key)  # on one that was set aside since: the worker reads this one instead
        if entry.state is not FeatureState.STAGED:
            self._advance(entry, FeatureState.STAGED)
            self._source.set_busy(entry.slot)
        if key not in entry.leases:
            entry.leases.add(key)
            self._key_to_entry[key] = entry
            entry.worker_to_num_leases[key.worker_id] += 1
            if entry.worker_to_num_leases[key.worker_id] == 1:
                self._hold(key.worker_id, entry.slot.nbytes)
        if entry.made_for == key.worker_id:
            entry.made_for = None
        self._leases.take(key, router_id)
        return entry.slot

    def release(self, key: LeaseKey, generation: int) -> bool:
        """The worker is done with this generation of the unit. Unknown, ended or older ones are ignored (False)."""
        entry = self._key_to_entry.get(key)
        if entry is None or entry.slot.generation != generation:
            return False
        transfer_s = self.sums.transfer_s + self._end(key)
        self.sums = self.sums._replace(num_transfers=self.sums.num_transfers + 1, transfer_s=transfer_s)
        return True

    def expire(self) -> int:
        """Ends the leases that have run out; returns how many."""
        return self._end_all(self._leases.expired())

    def end_attempt(self, attempt_id: AttemptId) -> int:
        return self._end_held(attempt_id)

    def end_worker(self, worker_id: MemberId) -> int:
        """The worker has left."""
        self._workers.discard(worker_id)
        return self._end_held(worker_id)

    def end_router(self, router_id: MemberId) -> int:
        return self._end_held(router_id)

    def usage(self) -> TableUsage:
        nbytes, count = self._state_to_bytes, self._state_to_count
        return TableUsage(
            used_bytes=nbytes[FeatureState.ENCODING] + nbytes[FeatureState.STAGED],
            cached_bytes=nbytes[FeatureState.ENCODED],
            total_bytes=self._source.usage().total_bytes,
            num_leases=len(self._leases),
            num_encoding=count[FeatureState.ENCODING],
            encoding_bytes=nbytes[FeatureState.ENCODING],
            num_cached=count[FeatureState.ENCODED],
            num_staged=count[FeatureState.STAGED],
        )

    def check_invariants(self) -> None:
        """Asserts that leases, states, sums and the arena tell one story. Walks everything."""
        leases: set[LeaseKey] = set()
        nbytes: Counter[FeatureState] = Counter()
        count: Counter[FeatureState] = Counter()
        held: Counter[MemberId] = Counter()
        for slot_id, entry in self._set_aside.items():
            assert entry.slot.slot_id == slot_id
            assert entry.is_set_aside
            assert entry.leases, "what was set aside goes with its last lease"
        entries = [(next(iter(entry.leases)).unit, entry) for entry in self._set_aside.values()]
        for unit, entry in [*self._unit_to_entry.items(), *entries]:
            assert (entry.state is FeatureState.STAGED) == bool(entry.leases), f"{unit}: {entry.state} {entry.leases}"
            assert all(key.unit == unit for key in entry.leases)
            assert entry.is_set_aside or self._slot_id_to_unit[entry.slot.slot_id] == unit
            assert all(self._key_to_entry[key] is entry for key in entry.leases)
            leases |= entry.leases
            assert entry.worker_to_num_leases == Counter(key.worker_id for key in entry.leases)
            holders = set(entry.worker_to_num_leases)
            if entry.state is FeatureState.ENCODING and entry.made_for is not None:
                holders.add(entry.made_for)
            for worker_id in holders:
                held[worker_id] += entry.slot.nbytes
            nbytes[entry.state] += entry.slot.nbytes
            count[entry.state] += 1
        assert nbytes == self._state_to_bytes
        assert count == self._state_to_count
        assert held == self._worker_to_bytes
        assert leases == self._leases.keys() == self._key_to_entry.keys()
        assert self._claimant is None or self._claimant not in self._unit_to_entry
        self._leases.check_invariants()
        usage, arena = self.usage(), self._source.usage()
        assert len(self._unit_to_entry) == len(self._slot_id_to_unit)
        assert arena.num_slots == len(self._unit_to_entry) + len(self._set_aside)
        assert usage.used_bytes + usage.cached_bytes <= arena.total_bytes

    def _allocate(self, nbytes: int) -> SourceSlot | None:
        try:
            return self._source.allocate(nbytes)
        except ArenaFull:
            victims = self._source.victims(nbytes)
        if victims is None:
            return None
        for slot_id in victims:
            self._evict(self._slot_id_to_unit[slot_id])
        return self._source.allocate(nbytes)

    def _allocate_claimed(self, unit: UnitKey, nbytes: int) -> SourceSlot | None:
        """Room in the range that is claimed for a unit, which is claimed now if there is none; None while something is
        in the way."""
        if self._claimant is None:
            slot_ids = self._source.claim(nbytes)
            if slot_ids is None:
                return None
            self._claimant = unit
            self._in_the_way.update(slot_ids)
        if self._claimant != unit:
            return None
        for slot_id in list(self._in_the_way):
            other = self._slot_id_to_unit.get(slot_id)
            if other is None:
                self._in_the_way.discard(slot_id)  # it is set aside or free
            elif self.is_ready(other):
                self._in_the_way.discard(slot_id)
                self._clear(other)
        try:
            return self._source.allocate(nbytes, is_claimed=True)
        except ArenaFull:
            return None

    def _clear(self, unit: UnitKey) -> None:
        """A ready unit is in the way of a claim: it goes, at the latest with its last lease."""
        entry = self._unit_to_entry[unit]
        if not entry.leases:
            self._evict(unit)
            return
        del self._unit_to_entry[unit]
        del self._slot_id_to_unit[entry.slot.slot_id]
        self._set_aside[entry.slot.slot_id] = entry
        entry.is_set_aside = True
        self._log.unit_gone(unit)

    def _evict(self, unit: UnitKey) -> None:
        slot = self._take_out(unit, FeatureState.DISCARDED)
        num_evictions, evicted_bytes = self.sums.num_evictions + 1, self.sums.evicted_bytes + slot.nbytes
        self.sums = self.sums._replace(num_evictions=num_evictions, evicted_bytes=evicted_bytes)
        self._log.unit_gone(unit)

    def _take_out(self, unit: UnitKey, state: FeatureState) -> SourceSlot:
        """The unit ends in a state; its memory is free."""
        entry = self._unit_to_entry.pop(unit)
        self._count(entry, -1)
        entry.state = advance(entry.state, state)
        del self._slot_id_to_unit[entry.slot.slot_id]
        self._source.free(entry.slot)
        return entry.slot

    def _end_held(self, holder: Holder) -> int:
        return self._end_all(self._leases.held_by(holder))

    def _end_all(self, keys: list[LeaseKey]) -> int:
        for key in keys:
            self._end(key)
        return len(keys)

    def _end(self, key: LeaseKey) -> float:
        """Ends a lease; returns the seconds that it was held."""
        entry = self._key_to_entry.pop(key)
        entry.leases.remove(key)
        entry.worker_to_num_leases[key.worker_id] -= 1
        if not entry.worker_to_num_leases[key.worker_id]:
            del entry.worker_to_num_leases[key.worker_id]
            self._hold(key.worker_id, -entry.slot.nbytes)
        if not entry.leases:
            self._advance(entry, FeatureState.ENCODED)
            self._source.set_idle(entry.slot)
            if entry.is_set_aside:
                self._advance(entry, FeatureState.DISCARDED)
                self._count(entry, -1)
                del self._set_aside[entry.slot.slot_id]
                self._source.free(entry.slot)
        return self._leases.drop(key)

    def _hold(self, worker_id: MemberId | None, nbytes: int) -> None:
        """So many bytes more, or less, count against a worker's share."""
        if worker_id is None:
            return
        self._worker_to_bytes[worker_id] += nbytes
        if not self._worker_to_bytes[worker_id]:
            del self._worker_to_bytes[worker_id]

    def _advance(self, entry: FeatureEntry, target: FeatureState) -> None:
        self._count(entry, -1)
        entry.state = advance(entry.state, target)
        self._count(entry, 1)

    def _count(self, entry: FeatureEntry, sign: int) -> None:
        self._state_to_bytes[entry.state] += sign * entry.slot.nbytes
        self._state_to_count[entry.state] += sign

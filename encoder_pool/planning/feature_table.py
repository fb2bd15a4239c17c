"""Keeps the feature table: which units are in the arena, which workers hold leases on them, and which may be evicted.

`FeatureTable` owns the slots of the arena, moves each feature from state to state (`FeatureState`) and decides about
eviction, and `LeaseBook` records which worker may read which unit and until when. They stand together because one event
changes both: the end of a lease makes a feature evictable. The table tells a `FeatureLog` what it gains and loses,
which routers learn from.

A feature that a worker may still read is never evicted. When the arena is full of leased features, the next feature
waits (back-pressure). Where there are several workers, none may hold more than what it leaves free
(`is_within_share`). Cached features have no lease. They are idle slots of the arena, and the arena names those that
must be evicted for a new one.

The module knows nothing of models, the contents of requests, queues or the message plane.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import KeysView
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from encoder_pool.planning.call_queue import is_within_share
from fabric.contracts import ArenaFull, ArenaStats, AttemptId, Clock, FeatureLog, MemberId, UnitKey
from fabric.transport import FeatureSource, LeaseTable, SourceSlot


class FeatureTable:
    """Owns every slot of `source`.

    A unit that waits for long for room in one piece claims a range of the arena. Features in that range are evicted, or
    *set aside* if a worker may still read them. A feature that is set aside can no longer be found, so it gets no new
    lease, and its memory is freed with its last lease. A lease ends by release, by expiry, or with its worker, attempt
    or router.

    The time of an operation does not grow with the number of stored features, except that the time of a claim grows
    with the features in its range. The table is not thread-safe. It lives in the service's event loop, and another
    thread writes only the bytes of a reserved slot.
    """

    def __init__(self, source: FeatureSource, clock: Clock, lease_s: float, log: FeatureLog) -> None:
        self._source = source
        self.total_bytes = source.usage().total_bytes
        """Holds the size of the arena, which never changes."""
        self._log = log
        self._unit_to_entry: dict[UnitKey, FeatureEntry] = {}
        self._slot_id_to_unit: dict[int, UnitKey] = {}
        self._key_to_entry: dict[LeaseKey, FeatureEntry] = {}
        self._set_aside: dict[int, FeatureEntry] = {}
        """Holds, by slot id, the entries that are leased, lie in a claimed range, and can no longer be found."""
        self._claimant: UnitKey | None = None
        self._in_the_way: set[int] = set()
        """Holds the slots in the claimed range that must still be evicted or set aside, because they are being
        written."""
        self._leases = LeaseBook(clock, lease_s)
        self._worker_to_bytes: Counter[MemberId] = Counter()
        """Counts the bytes that each worker leases, and those that are being written for it."""
        self._workers: set[MemberId] = set()
        """Holds the known workers, with or without leases; a worker that holds a lease counts too."""
        self._state_to_bytes: Counter[FeatureState] = Counter()
        self._state_to_count: Counter[FeatureState] = Counter()
        self._stats = ArenaStats()
        """Holds the sums over the life of the table; `usage` adds the gauges to a copy."""

    def is_ready(self, unit: UnitKey) -> bool:
        """Returns whether the unit can be leased now."""
        entry = self._unit_to_entry.get(unit)
        return entry is not None and entry.state in (FeatureState.ENCODED, FeatureState.STAGED)

    @property
    def has_shares(self) -> bool:
        """Returns whether there are several workers, so that none of them may take the whole arena."""
        # The union costs time in proportion to the workers, and a large cluster asks this often.
        return len(self._workers) > 1 or len(self._workers | self._worker_to_bytes.keys()) > 1

    def worker_came(self, worker_id: MemberId) -> None:
        """Adds a worker, which counts until `end_worker`."""
        self._workers.add(worker_id)

    def may_take(self, worker_id: MemberId, nbytes: int) -> bool:
        """Returns whether `nbytes` more are within a worker's share of the arena."""
        if not self.has_shares:
            return True
        used_bytes = self._state_to_bytes[FeatureState.ENCODING] + self._state_to_bytes[FeatureState.STAGED]
        free_bytes = self.total_bytes - used_bytes
        return is_within_share(self._worker_to_bytes[worker_id], nbytes, free_bytes)

    def may_lease(self, worker_id: MemberId, unit: UnitKey) -> bool:
        """Returns whether a lease of a ready unit is within a worker's share. A unit that was made for the worker, or
        that it already leases, always is."""
        entry = self._unit_to_entry[unit]
        is_its_own = entry.made_for == worker_id or worker_id in entry.worker_to_num_leases
        return is_its_own or self.may_take(worker_id, entry.slot.nbytes)

    def reserve(
        self, unit: UnitKey, nbytes: int, num_units: int, worker_id: MemberId | None = None, *, is_due: bool = False
    ) -> SourceSlot | None:
        """Makes room for a unit that is about to be encoded and evicts cached units as needed. The unit counts against
        the share of `worker_id` while it is written.

        Returns None when leased features and features that are being written leave no room in one piece. Nothing is
        evicted in that case, unless the unit `is_due`. A unit that is due claims a range if none is claimed, and it has
        its room at the latest when the present leases in that range have ended. Raises UnitTooLarge for a unit that can
        never fit.
        """
        assert unit not in self._unit_to_entry, f"{unit} already has memory in the arena"
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
        """Ends the claim of a range. Does nothing if there is none."""
        self._source.unclaim()
        self._claimant = None
        self._in_the_way.clear()

    def complete(self, unit: UnitKey) -> None:
        """Records that the slot's bytes are written. The unit can now be leased, and it can be evicted while it has no
        lease."""
        entry = self._unit_to_entry[unit]
        self._advance(entry, FeatureState.ENCODED)
        self._stats.encoded_bytes += entry.slot.nbytes
        self._hold(entry.made_for, -entry.slot.nbytes)
        self._source.set_idle(entry.slot)
        self._log.unit_ready(unit, entry.num_units)

    def waiters_informed(self, unit: UnitKey) -> None:
        """Records that every request that waited for a completed unit was informed of it. From then on the unit is
        like any other cached unit. Does nothing for a unit that failed."""
        entry = self._unit_to_entry.get(unit)
        if entry is not None:
            entry.made_for = None

    def fail(self, unit: UnitKey) -> None:
        """Records that the forward pass failed on this unit and frees its memory."""
        self._hold(self._unit_to_entry[unit].made_for, -self._unit_to_entry[unit].slot.nbytes)
        self._take_out(unit, FeatureState.FAILED)

    def lease(self, key: LeaseKey, router_id: MemberId) -> SourceSlot:
        """Gives (or renews) a worker's right to read a ready unit, and marks the unit as recently used."""
        entry = self._unit_to_entry[key.unit]
        if self._key_to_entry.get(key, entry) is not entry:
            # The old lease is on an entry that was set aside since then; the worker reads the present entry instead.
            self._end(key)
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
        """Ends the lease of a worker that no longer needs this generation of the unit. Ignores unknown, ended or older
        leases and returns False for them."""
        entry = self._key_to_entry.get(key)
        if entry is None or entry.slot.generation != generation:
            return False
        self._stats.num_transfers += 1
        self._stats.transfer_s += self._end(key)
        return True

    def expire(self) -> int:
        """Ends the leases that have run out; returns how many."""
        return self._end_all(self._leases.expired())

    def end_attempt(self, attempt_id: AttemptId) -> int:
        return self._end_held(attempt_id)

    def end_worker(self, worker_id: MemberId) -> int:
        """Forgets a worker that has left and ends its leases; returns how many."""
        self._workers.discard(worker_id)
        return self._end_held(worker_id)

    def end_router(self, router_id: MemberId) -> int:
        return self._end_held(router_id)

    def usage(self) -> ArenaStats:
        """Returns the numbers of this moment, which no later event changes."""
        nbytes, count = self._state_to_bytes, self._state_to_count
        stats = copy(self._stats)
        stats.used_bytes = nbytes[FeatureState.ENCODING] + nbytes[FeatureState.STAGED]
        stats.cached_bytes = nbytes[FeatureState.ENCODED]
        stats.total_bytes = self.total_bytes
        stats.num_leases = len(self._leases)
        stats.num_encoding = count[FeatureState.ENCODING]
        stats.encoding_bytes = nbytes[FeatureState.ENCODING]
        stats.num_cached = count[FeatureState.ENCODED]
        stats.num_staged = count[FeatureState.STAGED]
        return stats

    def check_invariants(self) -> None:
        """Asserts that leases, states, sums and the arena are consistent. Walks everything."""
        leases: set[LeaseKey] = set()
        nbytes: Counter[FeatureState] = Counter()
        count: Counter[FeatureState] = Counter()
        held: Counter[MemberId] = Counter()
        for slot_id, entry in self._set_aside.items():
            assert entry.slot.slot_id == slot_id
            assert entry.is_set_aside
            assert entry.leases, "a feature that was set aside must have leases"
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
        """Allocates room in the range that is claimed for a unit, and claims a range first if none is claimed. Returns
        None while another claim or a feature in the range prevents it."""
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
                self._in_the_way.discard(slot_id)  # the slot is set aside or free
            elif self.is_ready(other):
                self._in_the_way.discard(slot_id)
                self._clear(other)
        try:
            return self._source.allocate(nbytes, is_claimed=True)
        except ArenaFull:
            return None

    def _clear(self, unit: UnitKey) -> None:
        """Removes a ready unit from a claimed range: evicts it if it has no lease, and sets it aside otherwise."""
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
        self._stats.num_evictions += 1
        self._stats.evicted_bytes += slot.nbytes
        self._log.unit_gone(unit)

    def _take_out(self, unit: UnitKey, state: FeatureState) -> SourceSlot:
        """Removes a unit, which ends in `state`, and frees its memory."""
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
        """Adds `nbytes`, which may be negative, to what counts against a worker's share."""
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


# ------------------------------------------------------------ the states of a feature


class FeatureState(Enum):
    """Lists the states of one unit's feature on its encoder; `advance` permits only the steps of this picture.

    ENCODING ──> ENCODED <──> STAGED        The design has ENCODING -> ENCODED -> STAGED -> MERGED -> PREFILLED ->
        │           │                       DISCARDED. MERGED and PREFILLED are states of the worker; here a
        v           v                       feature that every worker has released is ENCODED again: it is cached
      FAILED    DISCARDED                   and may be evicted.
    """

    ENCODING = "encoding"
    """The feature's memory is reserved and is being written."""
    ENCODED = "encoded"
    """The feature is complete and no worker holds a lease, so it is cached."""
    STAGED = "staged"
    """The feature is announced and at least one worker holds a lease."""
    DISCARDED = "discarded"
    FAILED = "failed"


NEXT_STATES: dict[FeatureState, frozenset[FeatureState]] = {
    FeatureState.ENCODING: frozenset({FeatureState.ENCODED, FeatureState.FAILED}),
    FeatureState.ENCODED: frozenset({FeatureState.STAGED, FeatureState.DISCARDED}),
    FeatureState.STAGED: frozenset({FeatureState.ENCODED}),
    FeatureState.DISCARDED: frozenset(),
    FeatureState.FAILED: frozenset(),
}


def advance(state: FeatureState, target: FeatureState) -> FeatureState:
    """Returns the target if the state machine permits the step. Any other step is a bug in this program, hence an
    assertion."""
    assert target in NEXT_STATES[state], f"a feature can't go from {state.value} to {target.value}"
    return target


@dataclass(slots=True)
class FeatureEntry:
    """A `FeatureEntry` is one unit in the arena. Its references are sets of leases, so that ending a lease twice is
    harmless."""

    slot: SourceSlot
    num_units: int
    state: FeatureState = FeatureState.ENCODING
    leases: set[LeaseKey] = field(default_factory=set)
    worker_to_num_leases: Counter[MemberId] = field(default_factory=Counter)
    made_for: MemberId | None = None
    """Names the worker whose share the memory was reserved from. It is cleared when that worker leases the unit, or
    when all requests that wait for the unit have been informed."""
    is_set_aside: bool = False


# ------------------------------------------------------------ leases

Holder = AttemptId | MemberId


class LeaseKey(NamedTuple):
    """A `LeaseKey` names one worker's right to read one unit for one attempt."""

    worker_id: MemberId
    attempt_id: AttemptId
    unit: UnitKey


class LeaseBook:
    """Records which worker holds which lease on a feature, until when, and for which attempt and router; it finds
    leases by attempt, by worker and by router. Ids of workers and of routers are never the same. The book knows nothing
    of memory or of what a unit is. It is not thread-safe."""

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


class _LeaseHolder(NamedTuple):
    router_id: MemberId
    since_s: float

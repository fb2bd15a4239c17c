"""Keeps the one book of the features of a worker: for each unit, where its feature is, which attempts want it, and
which references to it the engine holds. A unit is one separately encoded part of a media item.

The store makes the decisions: what to pull next (by the rank of the requests and the order in which each request
reads), what to evict to make room, which announcements to give back, and which features to request from the router. The
receiver carries out these decisions. The store lives in the event loop. It shares nothing with the engine's thread: the
engine is handed a `FeatureReference`, which holds the feature, and gives the same reference back.

An attempt is *expecting* from `expect` (its request has arrived) to `admit` (the engine has reported what it lacks).
During this time every unit of the attempt counts as wanted, in the order of the prompt. After admission only the units
in its `missing` are wanted, and the engine reports where each unit is read next. So an image that the prompt repeats
later can be evicted to make room for an image that the prompt needs earlier.

A decision never examines everything that waits. Each event marks the few units and announcements whose state it may
have changed, and the `take_*` methods examine what was marked since their last call. The next unit to pull and the next
unit to evict are the first entries of two queues, which every event keeps up to date. This module knows nothing of
planes, channels, blocks or sequences.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping
from itertools import count, islice
from typing import NamedTuple, TypeVar

from fabric.contracts import AttemptId, Clock, FeatureLog, FeatureStats, UnitKey, UnitReady
from fabric.ranked_heap import RankedHeap
from fabric.transport import LandedFeature
from llm_workers.features.feature_entries import (
    ALLOWED,
    HELD,
    IN_MEMORY,
    WITHOUT_BYTES,
    Announced,
    AttemptNeeds,
    Backwards,
    Rank,
    ReadTurn,
    Shape,
    UnitEntry,
    UnitState,
)
from llm_workers.features.host_cache import FeatureUse, HostCache, is_kept
from llm_workers.scheduling import FeatureReference, Reads, ReleasedFeature
from llm_workers.worker_config import WorkerConfig

LOST = "lost"
MEMORY = 4096
"""Limits how many ended attempts, and how many spent announcements, are remembered."""
HISTORY = 65_536
"""Limits how many units are remembered as seen; a key takes about 100 bytes."""
UNITS_CHECKED_AT_REST = 256
"""Limits the entries that are checked each time the worker comes to rest."""

Key = TypeVar("Key", bound=Hashable)


class MissingUnit(NamedTuple):
    """A `MissingUnit` is a unit that the worker must request from the router."""

    attempt: AttemptId
    unit: UnitKey
    reason: str


class FeatureStore:
    """A `FeatureStore` holds the state of all units of a worker. It is not thread-safe and lives in the event loop."""

    def __init__(self, config: WorkerConfig, clock: Clock, log: FeatureLog) -> None:
        """Creates an empty store, which notes in `log` which features it keeps. Raises ConfigError for an unknown
        `config.keep_features`."""
        self._config, self._clock = config, clock
        is_kept(config.keep_features, FeatureUse())  # This call raises ConfigError for an unknown mode at the start.
        self.stats = FeatureStats()
        """Holds the counters; `Receiver.stats` adds the gauges to a copy."""
        self.host_cache = HostCache(config.kept_bytes, self.stats, log)
        self.num_held = 0
        """Counts the announcements, running pulls, and units in memory that are not merely kept; it is 0 when the
        worker is idle."""
        self._entries: dict[UnitKey, UnitEntry] = {}
        self._attempts: dict[AttemptId, AttemptNeeds] = {}
        self._attempt_to_announced: dict[AttemptId, dict[Announced, None]] = {}
        self._numbers = count(1)
        self._num_evicting = 0
        # These memories are bounded.
        self._ended: OrderedDict[AttemptId, None] = OrderedDict()
        self._spent: OrderedDict[tuple[AttemptId, UnitKey], None] = OrderedDict()
        self._seen: OrderedDict[UnitKey, None] = OrderedDict()
        # Every event keeps these queues up to date.
        self._to_pull: RankedHeap[UnitKey, ReadTurn] = RankedHeap()
        """Holds the ANNOUNCED units that some attempt wants."""
        self._to_evict: RankedHeap[UnitKey, Backwards] = RankedHeap()
        """Holds the units that take room in the inbox and that some attempt reads; the unit that is read last comes
        first."""
        # The next call of a `take_*` method examines these entries.
        self._maybe_lendable: dict[UnitKey, None] = {}
        self._maybe_unneeded: dict[UnitKey, None] = {}
        self._maybe_useless: list[Announced] = []
        self._maybe_needed: dict[tuple[AttemptId, UnitKey], None] = {}
        # Only the passing of time changes the state of these entries; the earliest entry comes first.
        self._unclaimed: deque[Announced] = deque()
        self._awaited: deque[tuple[float, tuple[AttemptId, UnitKey]]] = deque()

    # ------------------------------------------------------------ attempts

    def expect(
        self, attempt: AttemptId, rank: Rank, shapes: Mapping[UnitKey, Shape], dispatched: Iterable[UnitKey]
    ) -> None:
        """Registers the attempt of a request that has arrived. `shapes` maps its units, in the order of the prompt, to
        the planned shapes of their features; announcements will follow for the units in `dispatched`."""
        sent = frozenset(dispatched)
        needs = AttemptNeeds(rank, {unit: place for place, unit in enumerate(shapes)}, shapes, sent)
        self._attempts[attempt] = needs
        hash_to_num_units = Counter(unit.mm_hash for unit in shapes)
        here = {announced.ready.unit for announced in self._attempt_to_announced.get(attempt, ())}
        for unit in needs.order:
            if unit in sent and unit not in here and (attempt, unit) not in self._spent:
                self._await(attempt, unit)
            entry = self._entry(unit)
            entry.num_units = hash_to_num_units[unit.mm_hash]
            entry.readers.attempts[attempt] = needs
            entry.readers.num_expecting += 1
            entry.readers.place(attempt, unit)
            self._maybe_lendable[unit] = None
            self._refresh(entry)

    def admit(self, attempt: AttemptId, missing: Iterable[UnitKey]) -> list[FeatureReference]:
        """Records the units that the attempt lacks according to the engine. Returns references to those of them that
        are in memory; the caller must hand them to the engine."""
        needs = self._attempts.get(attempt)
        if needs is None:
            return []
        if not needs.is_admitted:
            needs.is_admitted = True
            for unit in needs.order:
                self._entries[unit].readers.num_expecting -= 1
                self._maybe_unneeded[unit] = None
        references = [self._want(attempt, needs, unit, needs.reason(unit)) for unit in missing]
        for unit in needs.order:
            self._entries[unit].readers.place(attempt, unit)
            self._refresh(self._entries[unit])
        self._maybe_useless += self._attempt_to_announced.get(attempt, ())
        return [reference for reference in references if reference is not None]

    def need(self, attempt: AttemptId, unit: UnitKey, reason: str) -> FeatureReference | None:
        """Records that the attempt needs a unit again. Returns a reference if the feature is in memory; the caller must
        then hand it to the engine."""
        needs = self._attempts.get(attempt)
        return None if needs is None else self._want(attempt, needs, unit, reason)

    def end(self, attempt: AttemptId) -> None:
        """Records that the attempt has ended. The announcements for it become releasable."""
        needs = self._attempts.pop(attempt, None)
        if needs is None:
            return
        _remember(self._ended, attempt, MEMORY)
        for unit in needs.order:
            entry = self._entries[unit]
            entry.readers.remove(attempt)
            entry.readers.num_expecting -= not needs.is_admitted
            self._maybe_unneeded[unit] = None
            self._refresh(entry)
        self._maybe_useless += self._attempt_to_announced.get(attempt, ())

    def _want(self, attempt: AttemptId, needs: AttemptNeeds, unit: UnitKey, reason: str) -> FeatureReference | None:
        entry = self._entries[unit]
        if entry.state in IN_MEMORY and not entry.is_evicting:
            # The engine gets one more reference even if it was handed one before: it may have given back the earlier
            # references, and its update may still be on the way.
            return self._refer(entry)
        needs.missing[unit] = reason
        entry.readers.place(attempt, unit)
        self._maybe_lendable[unit] = None
        self._maybe_needed[attempt, unit] = None
        self._refresh(entry)
        return None

    # ------------------------------------------------------------ announcements and pulls

    def announce(self, ready: UnitReady) -> None:
        """Records an announcement, which may arrive before its request."""
        announced = Announced(AttemptId(ready.request_id, ready.attempt), ready, self._clock.now())
        needs = self._attempts.get(announced.attempt)
        if needs is not None:
            needs.awaited.pop(ready.unit, None)
        else:
            self._unclaimed.append(announced)
        entry = self._entry(ready.unit)
        entry.announced[announced] = None
        self._attempt_to_announced.setdefault(announced.attempt, {})[announced] = None
        self.num_held += 1
        self._maybe_useless.append(announced)
        self._refresh(entry)

    def drop_source(self, source: str) -> None:
        """Drops all announcements of a transfer agent that has left, because their features can't be pulled any more.
        It examines all announcements."""
        for entry in list(self._entries.values()):
            for announced in [one for one in entry.announced if one.ready.ticket.source == source]:
                self._take(announced)
                self._set_reason(entry, "transfer_failed")

    def begin_pull(self, unit: UnitKey) -> None:
        """Marks the unit as being pulled and takes the announcement that `next_pull` returned."""
        entry = self._entries[unit]
        self._move(entry, UnitState.PULLING)
        self._take(next(reversed(entry.announced)))

    def fail_pull(self, unit: UnitKey, reason: str) -> None:
        """Records that a pull has failed. Another announcement is tried, or the router is asked."""
        entry = self._entries[unit]
        self._move(entry, entry.state_without_bytes)
        self._set_reason(entry, reason)
        self._maybe_lendable[unit] = None
        self._ask_for(entry)
        self._refresh(entry)

    def land(self, unit: UnitKey, feature: LandedFeature) -> FeatureReference | None:
        """Records that a pulled feature has landed. Returns a reference if an admitted attempt misses the unit; the
        caller must then hand it to the engine."""
        entry = self._entries[unit]
        assert entry.state is UnitState.PULLING, f"{unit} has landed but is {entry.state.name}"
        return self._land(entry, feature)

    def lend(self, unit: UnitKey) -> FeatureReference | None:
        """Makes a kept feature readable again. It takes no room in the inbox and is never evicted. Returns the same as
        `land`."""
        entry = self._entries[unit]
        entry.is_lent = True
        return self._land(entry, self.host_cache.lend(unit))

    def _land(self, entry: UnitEntry, feature: LandedFeature) -> FeatureReference | None:
        entry.feature = feature
        self._move(entry, UnitState.LANDED)
        is_missed = False
        for attempt in list(entry.readers.wanting):
            if self._attempts[attempt].missing.pop(entry.unit, None) is not None:
                is_missed = True
                entry.readers.place(attempt, entry.unit)
        self._maybe_unneeded[entry.unit] = None
        self._maybe_useless += entry.announced
        reference = self._refer(entry) if is_missed else None
        self._refresh(entry)
        return reference

    # ------------------------------------------------------------ the engine's answers

    def release(self, released: ReleasedFeature) -> list[FeatureReference]:
        """Takes back references of the engine; a reference that is not held any more has no effect. The attempts in
        `missed_by` need the unit again, because it was evicted. Returns references that the caller must hand to the
        engine."""
        entry = self._entries.get(released.unit)
        if entry is not None and entry.references:
            entry.references.difference_update(released.references)
            if not entry.references:
                self._move(entry, UnitState.LANDED)
                self._maybe_unneeded[released.unit] = None
        references = [self.need(attempt, released.unit, "preempted") for attempt in released.missed_by]
        return [reference for reference in references if reference is not None]

    def update_reads(self, reads: Reads) -> None:
        """Records changes in the engine's reports of which attempt still has to read which unit, and where the next
        read is. None means that the attempt does not read the unit any more."""
        for unit, attempt_to_read in reads.items():
            entry = self._entry(unit)
            for attempt, read in attempt_to_read.items():
                if read is None:
                    entry.readers.named.pop(attempt, None)
                else:
                    entry.readers.named[attempt] = read
                if attempt in entry.readers.attempts:
                    entry.readers.place(attempt, unit)
            self._refresh(entry)

    def distrust(self, units: Iterable[UnitKey]) -> list[UnitKey]:
        """Distrusts units whose bytes may be wrong. Kept ones are dropped at once; the others are freed, and not kept,
        as soon as every reference has come back. Returns the units to which the engine holds a reference."""
        read: list[UnitKey] = []
        for entry in [self._entries[unit] for unit in units if unit in self._entries]:
            if entry.state is UnitState.KEPT:
                self.host_cache.drop(entry.unit)
                self._forget_kept(entry.unit)
            elif entry.state in IN_MEMORY:
                entry.is_distrusted = True
                if self.begin_eviction(entry.unit):
                    read.append(entry.unit)
        return read

    # ------------------------------------------------------------ decisions

    def take_lendable(self) -> list[UnitKey]:
        """Returns the KEPT units that some attempt wants."""
        marked, self._maybe_lendable = self._maybe_lendable, {}
        kept = [unit for unit in marked if self.state(unit) is UnitState.KEPT]
        return [unit for unit in kept if self._entries[unit].readers.first_pull() is not None]

    def next_pull(self) -> UnitReady | None:
        """Returns an announcement of the unit whose next read comes first, by the rank of the attempts and the order of
        the reads. If the unit has several announcements, returns the newest, whose lease runs longest. Returns None if
        there is nothing to pull."""
        first = self._to_pull.peek()
        return None if first is None else next(reversed(self._entries[first[1]].announced)).ready

    def victim(self, unit: UnitKey) -> UnitKey | None:
        """Returns the unit in the inbox that must make room for `unit`. Only attempts of lower rank use the returned
        unit, or the same attempt uses it later than `unit`; among several such units it is the unit that is read last.
        Returns None if there is no such unit or if an eviction is under way; the pull must then wait."""
        if self._num_evicting or self.state(unit) in HELD or unit not in self._entries:
            return None
        limit, last = self._entries[unit].readers.first_pull(), self._to_evict.peek()
        if limit is None or last is None or last[0].turn <= limit:
            return None
        return last[1]

    def begin_eviction(self, unit: UnitKey) -> bool:
        """Marks a unit in memory for eviction; `take_unneeded` frees it as soon as every reference has come back.
        Returns True if the engine holds a reference."""
        entry = self._entries[unit]
        self._num_evicting += not entry.is_evicting
        entry.is_evicting = True
        self._maybe_unneeded[unit] = None
        return entry.state is UnitState.READ

    def take_unneeded(self) -> list[LandedFeature]:
        """Frees the features without references that are marked for eviction or that no attempt expects. A feature that
        the policy keeps is copied to host memory, and a lent feature goes back to the host cache. Returns the features
        whose slots in the inbox the caller must free."""
        marked, self._maybe_unneeded = self._maybe_unneeded, {}
        freed: list[LandedFeature] = []
        for unit in marked:
            entry = self._entries.get(unit)
            if entry is None or entry.state is not UnitState.LANDED:
                continue
            if entry.is_evicting or not entry.readers.num_expecting:
                freed += self._free(entry)
        return freed

    def take_releasable(self) -> list[UnitReady]:
        """Takes the announcements that are of no use: their attempt has ended, or it already has the unit, or its
        request did not arrive in time."""
        lapsed_at_s = self._clock.now() - self._config.unclaimed_unit_ttl_s
        marked, self._maybe_useless = self._maybe_useless, []
        useless = [one for one in marked if self._is_useless(one)]
        while self._unclaimed and self._unclaimed[0].at_s <= lapsed_at_s:
            announced = self._unclaimed.popleft()
            if announced.attempt not in self._attempts:
                useless.append(announced)
        taken = []
        for announced in useless:
            if not announced.is_taken:
                self._take(announced)
                taken.append(announced.ready)
        return taken

    def take_needed(self) -> list[MissingUnit]:
        """Takes the missing units that are neither announced, nor awaited, nor being pulled; from then on they count as
        awaited. Units that are awaited for too long are requested again, because no message on the plane is
        acknowledged."""
        now_s, wait_s = self._clock.now(), self._config.unit_wait_s
        while self._awaited and now_s - self._awaited[0][0] >= wait_s:
            self._maybe_needed[self._awaited.popleft()[1]] = None
        marked, self._maybe_needed = self._maybe_needed, {}
        missing = []
        for attempt, unit in marked:
            needs = self._attempts.get(attempt)
            if needs is None or unit not in needs.missing or self._is_coming(self._entries[unit]):
                continue
            since_s = needs.awaited.get(unit)
            if since_s is None or now_s - since_s >= wait_s:
                missing.append(MissingUnit(attempt, unit, needs.missing[unit] if since_s is None else LOST))
                self._await(attempt, unit)
        return missing

    # ------------------------------------------------------------ queries

    def state(self, unit: UnitKey) -> UnitState:
        entry = self._entries.get(unit)
        return UnitState.GONE if entry is None else entry.state

    def feature(self, unit: UnitKey) -> LandedFeature | None:
        """Returns the feature of the unit if it is LANDED or READ."""
        entry = self._entries.get(unit)
        return None if entry is None else entry.feature

    def planned_shape(self, attempt: AttemptId, unit: UnitKey) -> Shape | None:
        """Returns the shape that the attempt planned for the unit, or None if the attempt is not open."""
        needs = self._attempts.get(attempt)
        return None if needs is None else needs.shapes.get(unit)

    def attempts_of(self, unit: UnitKey) -> list[AttemptId]:
        """Returns the attempts that contain the unit."""
        entry = self._entries.get(unit)
        return [] if entry is None else list(entry.readers.attempts)

    @property
    def num_attempts(self) -> int:
        return len(self._attempts)

    def _is_coming(self, entry: UnitEntry) -> bool:
        return entry.state is UnitState.PULLING or bool(entry.announced)

    def _is_useless(self, announced: Announced) -> bool:
        """Returns whether the announcement is of no use, regardless of its age."""
        needs = self._attempts.get(announced.attempt)
        return announced.attempt in self._ended if needs is None else not needs.wants(announced.ready.unit)

    # ------------------------------------------------------------ transitions

    def _entry(self, unit: UnitKey) -> UnitEntry:
        """Returns the entry of the unit, new or not. `_refresh` must follow, which removes an entry that is GONE."""
        entry = self._entries.get(unit)
        if entry is None:
            entry = self._entries[unit] = UnitEntry(unit)
        return entry

    def _move(self, entry: UnitEntry, state: UnitState) -> None:
        if state is not entry.state:
            assert state in ALLOWED[entry.state], f"{entry.unit}: {entry.state.name} -> {state.name}"
            self.num_held += (state in HELD) - (entry.state in HELD)
            entry.state = state

    def _refer(self, entry: UnitEntry) -> FeatureReference:
        """Makes one more reference to a feature in memory."""
        assert entry.feature is not None, f"{entry.unit} is not in memory"
        reference = FeatureReference(entry.unit, next(self._numbers), entry.feature)
        entry.references.add(reference)
        self._move(entry, UnitState.READ)
        return reference

    def _free(self, entry: UnitEntry) -> list[LandedFeature]:
        """Frees a feature without references. Returns it if its slot in the inbox must be freed."""
        unit, feature = entry.unit, entry.feature
        assert feature is not None, f"{entry.unit} is not in memory"
        assert not entry.references, f"the engine holds references to {unit}"
        if entry.is_lent:
            self.host_cache.give_back(unit)
            if entry.is_distrusted:
                self.host_cache.drop(unit)
        elif not entry.is_distrusted:
            self._keep(entry, feature)
        freed = [] if entry.is_lent else [feature]
        self._num_evicting -= entry.is_evicting
        entry.feature, entry.is_lent, entry.is_evicting, entry.is_distrusted = None, False, False, False
        self._move(entry, UnitState.KEPT if unit in self.host_cache else entry.state_without_bytes)
        self._maybe_lendable[unit] = None
        self._refresh(entry)
        return freed

    def _keep(self, entry: UnitEntry, feature: LandedFeature) -> None:
        """Copies a feature that leaves the inbox, if the policy keeps it and the budget allows it."""
        config, unit = self._config, entry.unit
        has_drafts = config.speculation.max_tokens > 0
        use = FeatureUse(unit in self._seen, config.is_prefix_cache_enabled, has_drafts=has_drafts)
        _remember(self._seen, unit, HISTORY)
        if is_kept(config.keep_features, use):
            for dropped in self.host_cache.put(unit, feature, entry.num_units):
                self._forget_kept(dropped)

    def _forget_kept(self, unit: UnitKey) -> None:
        """Records that the host cache has dropped the unit."""
        entry = self._entries[unit]
        self._move(entry, entry.state_without_bytes)
        self._refresh(entry)

    def clear(self) -> list[LandedFeature]:
        """Forgets every feature in memory, also those that the engine holds references to, for the end of the worker.
        Returns the features whose slots in the inbox the caller must free."""
        freed = []
        for entry in list(self._entries.values()):
            if entry.feature is not None:
                self._move(entry, UnitState.LANDED)
                entry.references.clear()
                entry.is_distrusted = True
                freed += self._free(entry)
            elif entry.state is UnitState.KEPT:
                self._forget_kept(entry.unit)
        self.host_cache.clear()
        return freed

    # ------------------------------------------------------------ keeping the queues true

    def _refresh(self, entry: UnitEntry) -> None:
        """Updates the state of a unit without bytes, and the queues, after any change that concerns the unit. Removes
        an entry that is GONE."""
        if entry.state in WITHOUT_BYTES:
            self._move(entry, entry.state_without_bytes)
        unit, readers = entry.unit, entry.readers
        pull = readers.first_pull() if entry.state is UnitState.ANNOUNCED else None
        use = readers.first_use() if entry.state in IN_MEMORY and not entry.is_lent else None
        if pull is None:
            self._to_pull.discard(unit)
        else:
            self._to_pull.put(unit, pull)
        if use is None:
            self._to_evict.discard(unit)
        else:
            self._to_evict.put(unit, Backwards(use))
        if entry.state is UnitState.GONE:
            self._entries.pop(unit, None)

    def _await(self, attempt: AttemptId, unit: UnitKey) -> None:
        now_s = self._attempts[attempt].awaited[unit] = self._clock.now()
        self._awaited.append((now_s, (attempt, unit)))

    def _ask_for(self, entry: UnitEntry) -> None:
        """Marks the attempts that miss the unit, because they may have to request it."""
        if not self._is_coming(entry):
            self._maybe_needed.update(((attempt, entry.unit), None) for attempt in entry.readers.wanting)

    def _set_reason(self, entry: UnitEntry, reason: str) -> None:
        for needs in entry.readers.attempts.values():
            if entry.unit in needs.missing:
                needs.missing[entry.unit] = reason
            elif not needs.is_admitted:
                needs.failures[entry.unit] = reason

    def _take(self, announced: Announced) -> None:
        """Takes an announcement out of the store. If its attempt has not arrived yet, the announcement counts as spent,
        so that the attempt does not wait for it later."""
        entry, attempt = self._entries[announced.ready.unit], announced.attempt
        if attempt not in self._attempts:
            _remember(self._spent, (attempt, entry.unit), MEMORY)
        announced.is_taken = True
        del entry.announced[announced]
        del self._attempt_to_announced[attempt][announced]
        if not self._attempt_to_announced[attempt]:
            del self._attempt_to_announced[attempt]
        self.num_held -= 1
        self._ask_for(entry)
        self._refresh(entry)

    # ------------------------------------------------------------ checks

    def check_at_rest(self) -> None:
        """Asserts, in production after the last attempt has ended, a bounded part of `check_invariants`."""
        assert not self._attempts, "an attempt is still open"
        assert not len(self._to_pull), "a unit is queued for a pull, but no attempt needs it"
        for entry in islice(self._entries.values(), UNITS_CHECKED_AT_REST):
            self._check(entry)

    def check_invariants(self) -> None:
        """Asserts, between events, that the whole state is consistent. It is for tests after every event, because it
        looks at everything."""
        for entry in self._entries.values():
            self._check(entry)
        self.host_cache.check_invariants()
        entries = self._entries.values()
        kept = {entry.unit for entry in entries if entry.state is UnitState.KEPT}
        assert kept == {unit for unit in self._entries if unit in self.host_cache}
        assert len(kept) == len(self.host_cache), "the host cache keeps a feature that the store does not know"
        announced = [one for entry in entries for one in entry.announced]
        by_attempt = [one for ones in self._attempt_to_announced.values() for one in ones]
        assert set(announced) == set(by_attempt), "announcements by unit and by attempt differ"
        assert self.num_held == len(announced) + sum(entry.state in HELD for entry in entries), (
            "num_held is counted wrong"
        )
        assert self._num_evicting == sum(entry.is_evicting for entry in entries), "evictions are counted wrong"
        assert set(self._to_pull) | set(self._to_evict) <= self._entries.keys(), "a unit without an entry is queued"
        for attempt, needs in self._attempts.items():
            assert needs.missing.keys() <= needs.order.keys(), f"{attempt} misses a unit that it does not contain"
            for unit in needs.order:
                assert self._entries[unit].readers.attempts.get(attempt) is needs, f"{attempt} does not read {unit}"

    def _check(self, entry: UnitEntry) -> None:
        entry.check()
        assert self._entries[entry.unit] is entry
        assert entry.is_lent == self.host_cache.is_lent(entry.unit), (
            f"the store and the host cache disagree whether {entry.unit} is lent"
        )
        assert entry.readers.attempts.keys() <= self._attempts.keys(), f"an attempt that has ended reads {entry.unit}"


def _remember(memory: OrderedDict[Key, None], key: Key, limit: int) -> None:
    """Makes the key the newest one of the memory, which keeps only the last `limit` keys."""
    memory[key] = None
    memory.move_to_end(key)
    if len(memory) > limit:
        memory.popitem(last=False)

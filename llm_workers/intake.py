"""Tracks the features that are on their way to this worker: which attempts want them, which announcements exist, and
which features have landed. A feature belongs to a unit, which is one separately encoded part of a media item.

This module keeps the books and makes the decisions: what to pull next (by the rank of the requests and the order in
which each request reads), what to evict to make room, which announcements to give back, and which features to request
from the router. The receiver carries out these decisions. This module knows nothing of planes, channels, blocks or
sequences; it knows only attempts and units.

An attempt is *expected* from `expect` (its request has arrived) to `admit` (the engine has reported what it lacks).
During this time every unit of the attempt counts as wanted, in the order of the prompt. After admission only the units
in its `missing` are wanted, and the engine reports where each unit is read next. So an image that the prompt repeats
later can be evicted to make room for an image that the prompt needs earlier.

A decision never examines everything that waits. Each event marks the few units and announcements whose state it may
have changed, and the `take_*` methods examine what was marked since their last call. The next unit to pull and the next
unit to evict are the first entries of two queues, which every event keeps up to date.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Mapping, Sequence

from fabric.clock import Clock
from fabric.ids import AttemptId, UnitKey
from fabric.messages import UnitReady
from llm_workers.intake_entries import (
    LOST,
    Announced,
    Announcements,
    MissingUnit,
    UnitUsers,
    WantingAttempt,
    remember,
)
from llm_workers.scheduling.events import NextRead
from llm_workers.turns import Backwards, Rank, ReadTurn, TurnQueue

Pair = tuple[AttemptId, UnitKey]


class Intake:
    """An `Intake` holds the state of all announced, pulled and landed units. It is not thread-safe and lives in the
    event loop."""

    def __init__(self, clock: Clock, unclaimed_ttl_s: float, unit_wait_s: float) -> None:
        self._clock, self._ttl_s, self._wait_s = clock, unclaimed_ttl_s, unit_wait_s
        self._attempts: dict[AttemptId, WantingAttempt] = {}
        self._users: dict[UnitKey, UnitUsers] = {}
        """Holds the users of each unit: of the units of all open attempts, and of the units that the engine still
        reports readers for."""
        self._announced = Announcements()
        self._pulling: set[UnitKey] = set()
        self._landed: dict[UnitKey, int] = {}
        """Maps each landed unit to the number of reports to the engine that the engine has not yet answered with a
        release. At 0 the bytes may be freed."""
        self._evicting: set[UnitKey] = set()
        self._lent: set[UnitKey] = set()
        """Holds the landed units that take no room in the inbox because a kept feature was lent."""
        self._ended: OrderedDict[AttemptId, None] = OrderedDict()
        self._spent: OrderedDict[Pair, None] = OrderedDict()
        # Every event keeps these queues up to date.
        self._to_pull: TurnQueue[UnitKey, ReadTurn] = TurnQueue()
        """Holds the announced units that some attempt wants and that are neither landed nor being pulled."""
        self._to_evict: TurnQueue[UnitKey, Backwards] = TurnQueue()
        """Holds the landed units that take room and that some attempt reads; the unit that is read last comes first."""
        # The next call of a `take_*` method examines these entries.
        self._maybe_kept: dict[UnitKey, None] = {}
        self._maybe_free: dict[UnitKey, None] = {}
        self._maybe_useless: list[Announced] = []
        self._maybe_needed: dict[Pair, None] = {}
        # Only the passing of time changes the state of these entries; the earliest entry comes first.
        self._unclaimed: deque[Announced] = deque()
        self._awaited: deque[tuple[float, Pair]] = deque()

    # ------------------------------------------------------------ attempts

    def expect(self, attempt: AttemptId, rank: Rank, units: Sequence[UnitKey], dispatched: Iterable[UnitKey]) -> None:
        """Registers the attempt of a request that has arrived. `units` is in the order of the prompt; announcements
        will follow for the units in `dispatched`."""
        sent = frozenset(dispatched)
        here = {announced.unit for announced in self._announced.of_attempt(attempt)}
        awaited = [unit for unit in units if unit in sent and unit not in here and (attempt, unit) not in self._spent]
        known = WantingAttempt(rank, {unit: place for place, unit in enumerate(units)}, sent, {})
        self._attempts[attempt] = known
        for unit in awaited:
            self._await(attempt, unit)
        for unit in known.order:
            users = self._users.setdefault(unit, UnitUsers())
            users.attempts[attempt] = known
            users.num_expecting += 1
            self._place(attempt, unit)
            self._maybe_kept[unit] = None

    def admit(self, attempt: AttemptId, missing: Iterable[UnitKey]) -> list[UnitKey]:
        """Records the units that the attempt lacks according to the engine. Returns those of them that have already
        landed here; the caller must report these units to the engine (again)."""
        known = self._attempts.get(attempt)
        if known is None:
            return []
        if not known.is_admitted:
            known.is_admitted = True
            for unit in known.order:
                self._users[unit].num_expecting -= 1
                self._maybe_free[unit] = None
        here = [unit for unit in missing if not self._want(attempt, known, unit, known.reason(unit))]
        for unit in known.order:
            self._place(attempt, unit)
        self._maybe_useless += self._announced.of_attempt(attempt)
        return here

    def need(self, attempt: AttemptId, unit: UnitKey, reason: str) -> bool:
        """Records that the attempt needs a unit again. Returns True if the unit has already landed; the caller must
        then report it to the engine."""
        known = self._attempts.get(attempt)
        return known is not None and not self._want(attempt, known, unit, reason)

    def end(self, attempt: AttemptId) -> None:
        """Records that the attempt has ended. The announcements for it become releasable."""
        known = self._attempts.pop(attempt, None)
        if known is None:
            return
        remember(self._ended, attempt)
        for unit in known.order:
            users = self._users[unit]
            users.remove(attempt)
            users.num_expecting -= not known.is_admitted
            self._maybe_free[unit] = None
            self._refresh(unit)
        self._maybe_useless += self._announced.of_attempt(attempt)

    def _want(self, attempt: AttemptId, known: WantingAttempt, unit: UnitKey, reason: str) -> bool:
        if unit in self._landed and unit not in self._evicting:
            # The unit counts again even if it was reported to the engine before: the engine may have released the unit,
            # and its update may still be on the way.
            self._landed[unit] += 1
            return False
        known.missing[unit] = reason
        self._place(attempt, unit)
        self._maybe_kept[unit] = None
        self._maybe_needed[attempt, unit] = None
        return True

    # ------------------------------------------------------------ units

    def announce(self, ready: UnitReady) -> None:
        """Records an announcement, which may arrive before its request."""
        announced = Announced(AttemptId(ready.request_id, ready.attempt), ready, self._clock.now())
        known = self._attempts.get(announced.attempt)
        if known is not None:
            known.awaited.pop(ready.unit, None)
        else:
            self._unclaimed.append(announced)
        self._announced.add(announced)
        self._maybe_useless.append(announced)
        self._refresh(ready.unit)

    def forget_source(self, source: str) -> None:
        """Drops all announcements of a transfer agent that has left, because their features can't be pulled any
        more."""
        for announced in self._announced.of_source(source):
            self._take(announced)
            self._set_reason(announced.unit, "transfer_failed")

    def begin_pull(self, unit: UnitKey) -> None:
        """Marks the unit as being pulled and takes the announcement that `next_pull` returned."""
        self._pulling.add(unit)
        self._take(self._announced.newest(unit))

    def landed(self, unit: UnitKey, is_lent: bool = False) -> bool:
        """Records that a unit has landed after a pull, or, with `is_lent`, that a kept feature is used again. A lent
        feature takes no room in the inbox and is never evicted. Returns True if an admitted attempt misses the unit;
        the caller must then report it to the engine."""
        self._pulling.discard(unit)
        if is_lent:
            self._lent.add(unit)
        is_missed = False
        users = self._users.get(unit, UnitUsers())
        for attempt in list(users.wanting):
            known = self._attempts[attempt]
            if known.missing.pop(unit, None) is not None:
                is_missed = True
                users.place(attempt, unit)
        self._landed[unit] = int(is_missed)
        self._maybe_free[unit] = None
        self._maybe_useless += self._announced.of_unit(unit)
        self._refresh(unit)
        return is_missed

    def pull_failed(self, unit: UnitKey, reason: str) -> None:
        """Records that a pull has failed. Another announcement is tried, or the router is asked."""
        self._pulling.discard(unit)
        self._set_reason(unit, reason)
        self._maybe_kept[unit] = None
        self._ask_for(unit)
        self._refresh(unit)

    def let_go(self, unit: UnitKey, num_told: int, missed_by: Iterable[AttemptId] = ()) -> None:
        """Records that the engine does not read the unit any more. The release answers `num_told` reports of the unit.
        The attempts in `missed_by` need the unit again, because it was evicted."""
        self._landed[unit] -= num_told
        self._maybe_free[unit] = None
        for attempt in missed_by:
            self.need(attempt, unit, "preempted")

    def read_by(self, reads: Mapping[UnitKey, Mapping[AttemptId, NextRead | None]]) -> None:
        """Records changes in the engine's reports of which attempt still has to read which unit, and where the next
        read is. None means that the attempt does not read the unit any more."""
        for unit, attempt_to_read in reads.items():
            users = self._users.setdefault(unit, UnitUsers())
            for attempt, read in attempt_to_read.items():
                if read is None:
                    users.named.pop(attempt, None)
                else:
                    users.named[attempt] = read
                if attempt in users.attempts:
                    users.place(attempt, unit)
            self._refresh(unit)

    # ------------------------------------------------------------ decisions

    def take_kept(self, kept: Container[UnitKey]) -> list[UnitKey]:
        """Returns the units in `kept` that some attempt wants and that are neither landed nor being pulled."""
        marked, self._maybe_kept = self._maybe_kept, {}
        return [unit for unit in marked if unit in kept and self._first_pull(unit) is not None]

    def next_pull(self) -> UnitReady | None:
        """Returns an announcement of the unit whose next read comes first, by the rank of the attempts and the order of
        the reads. If the unit has several announcements, returns the newest, whose lease runs longest. Returns None if
        there is nothing to pull."""
        first = self._to_pull.first()
        return None if first is None else self._announced.newest(first[1]).ready

    def victim(self, unit: UnitKey) -> UnitKey | None:
        """Returns the landed unit that must make room for `unit`. Only attempts of lower rank use the returned unit, or
        the same attempt uses it later than `unit`; among several such units it is the unit that is read last. Returns
        None if there is no such unit or if an eviction is under way; the pull must then wait."""
        if self._evicting:
            return None
        limit, last = self._first_pull(unit), self._to_evict.first()
        if limit is None or last is None or last[0].turn <= limit:
            return None
        return last[1]

    def begin_evict(self, unit: UnitKey) -> bool:
        """Marks a unit for eviction; `take_freeable` returns it as soon as the engine has released it. Returns True if
        the engine holds the unit."""
        self._evicting.add(unit)
        self._maybe_free[unit] = None
        return self._landed[unit] > 0

    def take_freeable(self) -> list[UnitKey]:
        """Takes the landed units that the engine does not read and that are either marked for eviction or expected by
        no attempt."""
        marked, self._maybe_free = self._maybe_free, {}
        free = [
            unit
            for unit in marked
            if self._landed.get(unit) == 0 and (unit in self._evicting or not self._is_expected(unit))
        ]
        for unit in free:
            del self._landed[unit]
            self._evicting.discard(unit)
            self._lent.discard(unit)
            self._maybe_kept[unit] = None
            self._refresh(unit)
        return free

    def take_releasable(self) -> list[UnitReady]:
        """Takes the announcements that are of no use: their attempt has ended, or it already has the unit, or its
        request did not arrive in time."""
        lapsed_at_s = self._clock.now() - self._ttl_s
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
        now_s = self._clock.now()
        while self._awaited and now_s - self._awaited[0][0] >= self._wait_s:
            self._maybe_needed[self._awaited.popleft()[1]] = None
        marked, self._maybe_needed = self._maybe_needed, {}
        needs = []
        for attempt, unit in marked:
            known = self._attempts.get(attempt)
            if known is None or unit not in known.missing or unit in self._pulling or unit in self._announced:
                continue
            since_s = known.awaited.get(unit)
            if since_s is None or now_s - since_s >= self._wait_s:
                needs.append(MissingUnit(attempt, unit, known.missing[unit] if since_s is None else LOST))
                self._await(attempt, unit)
        return needs

    # ------------------------------------------------------------ queries

    def wanting(self, unit: UnitKey) -> list[AttemptId]:
        """Returns the attempts that contain the unit."""
        users = self._users.get(unit)
        return [] if users is None else list(users.attempts)

    @property
    def num_held(self) -> int:
        """Returns the number of announcements, running pulls and landed units; it is 0 when the worker is idle."""
        return len(self._announced) + len(self._pulling) + len(self._landed)

    def _first_pull(self, unit: UnitKey) -> ReadTurn | None:
        """Returns the earliest turn among the attempts that want the unit. Returns None if no attempt wants it, or if
        it has landed or is being pulled."""
        users = self._users.get(unit)
        if users is None or unit in self._pulling or unit in self._landed:
            return None
        return users.first_pull()

    def _is_expected(self, unit: UnitKey) -> bool:
        users = self._users.get(unit)
        return users is not None and users.num_expecting > 0

    def _is_useless(self, announced: Announced) -> bool:
        """Returns whether the announcement is of no use, regardless of its age."""
        known = self._attempts.get(announced.attempt)
        return announced.attempt in self._ended if known is None else not known.wants(announced.unit)

    # ------------------------------------------------------------ keeping the queues true

    def _place(self, attempt: AttemptId, unit: UnitKey) -> None:
        """Updates the queues after a change in whether or when the attempt wants the unit."""
        self._users[unit].place(attempt, unit)
        self._refresh(unit)

    def _refresh(self, unit: UnitKey) -> None:
        """Updates the queues after any change that concerns the unit, and forgets the unit if no attempt uses it."""
        users = self._users.get(unit)
        pull = self._first_pull(unit) if unit in self._announced else None
        use = users.first_use() if users is not None and unit in self._landed and unit not in self._lent else None
        if pull is None:
            self._to_pull.discard(unit)
        else:
            self._to_pull.put(unit, pull)
        if use is None:
            self._to_evict.discard(unit)
        else:
            self._to_evict.put(unit, Backwards(use))
        if users is not None and not users.attempts and not users.named:
            del self._users[unit]

    def _await(self, attempt: AttemptId, unit: UnitKey) -> None:
        now_s = self._attempts[attempt].awaited[unit] = self._clock.now()
        self._awaited.append((now_s, (attempt, unit)))

    def _ask_for(self, unit: UnitKey) -> None:
        """Marks the attempts that miss the unit, because they may have to request it."""
        if unit not in self._announced and unit not in self._pulling and unit in self._users:
            self._maybe_needed.update(((attempt, unit), None) for attempt in self._users[unit].wanting)

    def _set_reason(self, unit: UnitKey, reason: str) -> None:
        for known in self._users[unit].attempts.values() if unit in self._users else ():
            if unit in known.missing:
                known.missing[unit] = reason
            elif not known.is_admitted:
                known.failures[unit] = reason

    def _take(self, announced: Announced) -> None:
        """Takes an announcement out of the books. If its attempt has not arrived yet, the announcement counts as spent,
        so that the attempt does not wait for it later."""
        if announced.attempt not in self._attempts:
            remember(self._spent, (announced.attempt, announced.unit))
        self._announced.take(announced)
        self._ask_for(announced.unit)
        self._refresh(announced.unit)

"""Which features are on their way to this worker: who wants them, which announcements there are, what has landed.

Pure bookkeeping and the decisions on it: what to pull next (by rank of the requests, what each reads next), what to
evict for it, which announcements to give back, which features to ask the router for. The receiver acts on them.
Knows nothing of planes, channels, blocks or sequences: only of attempts and units.

An attempt is *expected* from `expect` (its request is here) to `admit` (the engine has said what it lacks), and
until then every unit of it is treated as wanted, in the order of the prompt. From then on its `missing` is the truth,
and the engine says where each unit is read next: a picture that comes again makes room for one between.

A decision never looks at everything that waits. Each event marks the few units and announcements that it may have
changed anything for, and the `take_*` methods look at what was marked since their last call; what to pull and what to
evict stands first in a queue of turns that each event keeps true.
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
    Need,
    UnitUsers,
    WantingAttempt,
    remember,
)
from llm_workers.scheduling.events import NextRead
from llm_workers.turns import Backwards, Rank, Turn, TurnQueue

Pair = tuple[AttemptId, UnitKey]


class Intake:
    """Not thread-safe: lives in the event loop."""

    def __init__(self, clock: Clock, unclaimed_ttl_s: float, unit_wait_s: float) -> None:
        self._clock, self._ttl_s, self._wait_s = clock, unclaimed_ttl_s, unit_wait_s
        self._attempts: dict[AttemptId, WantingAttempt] = {}
        self._users: dict[UnitKey, UnitUsers] = {}
        """Units of the attempts that are here, and those that the engine still names readers of."""
        self._announced = Announcements()
        self._pulling: set[UnitKey] = set()
        self._landed: dict[UnitKey, int] = {}
        """Landed units -> how often the engine was told of them and has not let go. At 0 the bytes may go."""
        self._evicting: set[UnitKey] = set()
        self._lent: set[UnitKey] = set()
        """Landed units that take no inbox room."""
        self._ended: OrderedDict[AttemptId, None] = OrderedDict()
        self._spent: OrderedDict[Pair, None] = OrderedDict()
        # Queues that every event keeps true.
        self._to_pull: TurnQueue[UnitKey, Turn] = TurnQueue()
        """Announced units that some attempt wants and that are neither here nor being pulled."""
        self._to_evict: TurnQueue[UnitKey, Backwards] = TurnQueue()
        """Landed units that take room and that some attempt reads; the one that is read last comes first."""
        # What the next `take_*` looks at.
        self._maybe_kept: dict[UnitKey, None] = {}
        self._maybe_free: dict[UnitKey, None] = {}
        self._maybe_useless: list[Announced] = []
        self._maybe_needed: dict[Pair, None] = {}
        # What only time changes, the earliest first.
        self._unclaimed: deque[Announced] = deque()
        self._awaited: deque[tuple[float, Pair]] = deque()

    # ------------------------------------------------------------ attempts

    def expect(self, attempt: AttemptId, rank: Rank, units: Sequence[UnitKey], dispatched: Iterable[UnitKey]) -> None:
        """A request has come. `units` in the order of its prompt; those of `dispatched` are to be announced."""
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
        """The engine's word on what the attempt lacks. Returns those of them that lie here landed already: the
        engine is to be told of them (again)."""
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
        """The attempt needs a unit again. True if it lies here landed: the engine is to be told."""
        known = self._attempts.get(attempt)
        return known is not None and not self._want(attempt, known, unit, reason)

    def end(self, attempt: AttemptId) -> None:
        """The attempt has ended; what was announced for it becomes releasable."""
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
            # Also if it was told before: it may have let go, and its word be on the way.
            self._landed[unit] += 1
            return False
        known.missing[unit] = reason
        self._place(attempt, unit)
        self._maybe_kept[unit] = None
        self._maybe_needed[attempt, unit] = None
        return True

    # ------------------------------------------------------------ units

    def announce(self, ready: UnitReady) -> None:
        """An announcement has come, perhaps before its request."""
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
        """A transfer agent has left: what it announced can't be pulled any more."""
        for announced in self._announced.of_source(source):
            self._take(announced)
            self._set_reason(announced.unit, "transfer_failed")

    def begin_pull(self, unit: UnitKey) -> None:
        """Takes the announcement that `next_pull` gave."""
        self._pulling.add(unit)
        self._take(self._announced.newest(unit))

    def landed(self, unit: UnitKey, is_lent: bool = False) -> bool:
        """A pull has ended well, or (lent) a kept feature is used again, which takes no inbox room and is no victim.
        True if an admitted attempt misses it: the engine is to be told."""
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
        """Another announcement is tried, or the router asked."""
        self._pulling.discard(unit)
        self._set_reason(unit, reason)
        self._maybe_kept[unit] = None
        self._ask_for(unit)
        self._refresh(unit)

    def let_go(self, unit: UnitKey, num_told: int, missed_by: Iterable[AttemptId] = ()) -> None:
        """The engine does not read the unit any more, of which it was told `num_told` times; the attempts in
        `missed_by` need it again (it was evicted)."""
        self._landed[unit] -= num_told
        self._maybe_free[unit] = None
        for attempt in missed_by:
            self.need(attempt, unit, "preempted")

    def read_by(self, reads: Mapping[UnitKey, Mapping[AttemptId, NextRead | None]]) -> None:
        """What changed in the engine's word on who still has to read what, and where next; None: not any more."""
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
        """Units among the kept ones that some attempt wants and that are neither here nor being pulled."""
        marked, self._maybe_kept = self._maybe_kept, {}
        return [unit for unit in marked if unit in kept and self._first_pull(unit) is not None]

    def next_pull(self) -> UnitReady | None:
        """The newest announcement (its lease runs longest) of the unit that the attempt of highest rank reads next;
        None if there is nothing to pull."""
        first = self._to_pull.first()
        return None if first is None else self._announced.newest(first[1]).ready

    def victim(self, unit: UnitKey) -> UnitKey | None:
        """The landed unit that should make room for `unit`: one that only attempts of lower rank use, or that the same
        attempt uses later; the last of them. None: wait. A unit that is evicted already also means wait."""
        if self._evicting:
            return None
        limit, last = self._first_pull(unit), self._to_evict.first()
        if limit is None or last is None or last[0].turn <= limit:
            return None
        return last[1]

    def begin_evict(self, unit: UnitKey) -> bool:
        """Marks a victim, which `take_freeable` gives once the engine let go of it. True if the engine holds it."""
        self._evicting.add(unit)
        self._maybe_free[unit] = None
        return self._landed[unit] > 0

    def take_freeable(self) -> list[UnitKey]:
        """Landed units that the engine does not read and that are evicted or expected by nobody."""
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
        """Announcements that are of no use: their attempt has ended, or has the unit, or never came in time."""
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

    def take_needed(self) -> list[Need]:
        """Missing units that are neither announced, nor awaited, nor being pulled. They count as awaited then. Those
        awaited too long are asked for again: nothing on the plane is acknowledged."""
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
                needs.append(Need(attempt, unit, known.missing[unit] if since_s is None else LOST))
                self._await(attempt, unit)
        return needs

    # ------------------------------------------------------------ queries

    def wanting(self, unit: UnitKey) -> list[AttemptId]:
        """Attempts of which the unit is a part."""
        users = self._users.get(unit)
        return [] if users is None else list(users.attempts)

    @property
    def num_held(self) -> int:
        """Announcements kept and units pulling or landed; 0 when idle."""
        return len(self._announced) + len(self._pulling) + len(self._landed)

    def _first_pull(self, unit: UnitKey) -> Turn | None:
        """Turn of the first attempt that wants it; None if there is none, or it is here or being pulled."""
        users = self._users.get(unit)
        if users is None or unit in self._pulling or unit in self._landed:
            return None
        return users.first_pull()

    def _is_expected(self, unit: UnitKey) -> bool:
        users = self._users.get(unit)
        return users is not None and users.num_expecting > 0

    def _is_useless(self, announced: Announced) -> bool:
        """Whatever its age."""
        known = self._attempts.get(announced.attempt)
        return announced.attempt in self._ended if known is None else not known.wants(announced.unit)

    # ------------------------------------------------------------ keeping the queues true

    def _place(self, attempt: AttemptId, unit: UnitKey) -> None:
        """After what the attempt wants of the unit, or when, has changed."""
        self._users[unit].place(attempt, unit)
        self._refresh(unit)

    def _refresh(self, unit: UnitKey) -> None:
        """After anything about the unit has changed; forgets it when it is nobody's."""
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
        """Those who miss the unit may have to ask for it."""
        if unit not in self._announced and unit not in self._pulling and unit in self._users:
            self._maybe_needed.update(((attempt, unit), None) for attempt in self._users[unit].wanting)

    def _set_reason(self, unit: UnitKey, reason: str) -> None:
        for known in self._users[unit].attempts.values() if unit in self._users else ():
            if unit in known.missing:
                known.missing[unit] = reason
            elif not known.is_admitted:
                known.failures[unit] = reason

    def _take(self, announced: Announced) -> None:
        """An attempt that is not here yet must not wait for this announcement when it comes: it is spent."""
        if announced.attempt not in self._attempts:
            remember(self._spent, (announced.attempt, announced.unit))
        self._announced.take(announced)
        self._ask_for(announced.unit)
        self._refresh(announced.unit)

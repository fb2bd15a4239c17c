"""Which features are on their way to this worker: who wants them, which announcements there are, what has landed.

Pure bookkeeping and the decisions on it: what to pull next (oldest request first, what it reads next), what to evict
for it, which announcements to give back, which features to ask the router for. The receiver acts on them.
Knows nothing of planes, channels, blocks or sequences: only of attempts and units.

An attempt is *expected* from `expect` (its request is here) to `admit` (the engine has said what it lacks), and
until then every unit of it is treated as wanted, in the order of the prompt. From then on its `missing` is the truth,
and the engine says where each unit is read next: a picture that comes again makes room for one between.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence

from fabric.clock import Clock
from fabric.ids import AttemptId, UnitKey
from fabric.messages import UnitReady
from llm_workers.intake_entries import LOST, UNREAD_CHOICE, Age, Announced, Need, Turn, WantingAttempt, remember
from llm_workers.scheduling.events import NextRead


class Intake:
    """Not thread-safe: lives in the event loop."""

    def __init__(self, clock: Clock, unclaimed_ttl_s: float, unit_wait_s: float) -> None:
        self._clock, self._ttl_s, self._wait_s = clock, unclaimed_ttl_s, unit_wait_s
        self._attempts: dict[AttemptId, WantingAttempt] = {}
        self._tickets: dict[UnitKey, list[Announced]] = {}
        """Oldest first."""
        self._pulling: set[UnitKey] = set()
        self._landed: dict[UnitKey, int] = {}
        """Landed units -> how often the engine was told of them and has not let go. At 0 the bytes may go."""
        self._readers: Mapping[UnitKey, Mapping[AttemptId, NextRead]] = {}
        """Units that are still to be read -> who has to, and where next, as of the engine's last word."""
        self._evicting: set[UnitKey] = set()
        self._lent: set[UnitKey] = set()
        """Landed units that take no inbox room."""
        self._ended: OrderedDict[AttemptId, None] = OrderedDict()
        self._spent: OrderedDict[tuple[AttemptId, UnitKey], None] = OrderedDict()

    # ------------------------------------------------------------ attempts

    def expect(self, attempt: AttemptId, age: Age, units: Sequence[UnitKey], dispatched: Iterable[UnitKey]) -> None:
        """A request has come. `units` in the order of its prompt; those of `dispatched` are to be announced."""
        sent = frozenset(dispatched)
        awaited = {unit for unit in sent if (attempt, unit) not in self._spent}
        awaited -= {
            unit for unit, tickets in self._tickets.items() if any(ticket.attempt == attempt for ticket in tickets)
        }
        order = {unit: place for place, unit in enumerate(units)}
        self._attempts[attempt] = WantingAttempt(age, order, sent, dict.fromkeys(awaited, self._clock.now()))

    def admit(self, attempt: AttemptId, missing: Iterable[UnitKey]) -> list[UnitKey]:
        """The engine's word on what the attempt lacks. Returns those of them that lie here landed already: the
        engine is to be told of them (again)."""
        known = self._attempts.get(attempt)
        if known is None:
            return []
        known.is_admitted = True
        return [unit for unit in missing if not self._want(known, unit, known.reason(unit))]

    def need(self, attempt: AttemptId, unit: UnitKey, reason: str) -> bool:
        """The attempt needs a unit again. True if it lies here landed: the engine is to be told."""
        known = self._attempts.get(attempt)
        return known is not None and not self._want(known, unit, reason)

    def end(self, attempt: AttemptId) -> None:
        """The attempt has ended; what was announced for it becomes releasable."""
        if self._attempts.pop(attempt, None) is not None:
            remember(self._ended, attempt)

    def _want(self, known: WantingAttempt, unit: UnitKey, reason: str) -> bool:
        if unit in self._landed and unit not in self._evicting:
            # Also if it was told before: it may have let go, and its word be on the way.
            self._landed[unit] += 1
            return False
        known.missing[unit] = reason
        return True

    # ------------------------------------------------------------ units

    def announce(self, ready: UnitReady) -> None:
        """An announcement has come, perhaps before its request."""
        attempt = AttemptId(ready.request_id, ready.attempt)
        known = self._attempts.get(attempt)
        if known is not None:
            known.awaited.pop(ready.unit, None)
        self._tickets.setdefault(ready.unit, []).append(Announced(attempt, ready, self._clock.now()))

    def forget_source(self, source: str) -> None:
        """A transfer agent has left: what it announced can't be pulled any more."""
        for unit, tickets in list(self._tickets.items()):
            for ticket in [ticket for ticket in tickets if ticket.ready.ticket.source == source]:
                self._take_ticket(unit, ticket)
                self._set_reason(unit, "transfer_failed")

    def begin_pull(self, unit: UnitKey) -> UnitReady:
        """Takes the newest announcement of a unit for pulling: its lease runs longest."""
        self._pulling.add(unit)
        return self._take_ticket(unit, self._tickets[unit][-1])

    def cannot_pull(self, ready: UnitReady) -> None:
        """There was no room: the announcement is put back."""
        self._pulling.discard(ready.unit)
        self.announce(ready)

    def landed(self, unit: UnitKey, is_lent: bool = False) -> bool:
        """A pull has ended well, or (lent) a kept feature is used again, which takes no inbox room and is no victim.
        True if an admitted attempt misses it: the engine is to be told."""
        self._pulling.discard(unit)
        if is_lent:
            self._lent.add(unit)
        is_missed = False
        for known in self._attempts.values():
            is_missed |= known.missing.pop(unit, None) is not None
        self._landed[unit] = int(is_missed)
        return is_missed

    def pull_failed(self, unit: UnitKey, reason: str) -> None:
        """Another announcement is tried, or the router asked."""
        self._pulling.discard(unit)
        self._set_reason(unit, reason)

    def let_go(self, unit: UnitKey, num_told: int, missed_by: Iterable[AttemptId] = ()) -> None:
        """The engine does not read the unit any more, of which it was told `num_told` times; the attempts in
        `missed_by` need it again (it was evicted)."""
        self._landed[unit] -= num_told
        for attempt in missed_by:
            self.need(attempt, unit, "preempted")

    def read_by(self, readers: Mapping[UnitKey, Mapping[AttemptId, NextRead]]) -> None:
        """The engine's word on who still has to read what, and where next."""
        self._readers = readers

    # ------------------------------------------------------------ decisions

    def find_wanted(self, kept: Container[UnitKey]) -> list[UnitKey]:
        """Units among the kept ones that some attempt wants and that are neither here nor being pulled."""
        wanted = (
            unit for known in self._attempts.values() for unit in (known.missing if known.is_admitted else known.order)
        )
        return list(dict.fromkeys(unit for unit in wanted if unit in kept and self._pull_key(unit) is not None))

    def next_pull(self) -> UnitKey | None:
        """The announced unit that the oldest attempt reads next; None if there is nothing to pull."""
        ready = [(key, unit) for unit in self._tickets if (key := self._pull_key(unit)) is not None]
        return min(ready)[1] if ready else None

    def victim(self, unit: UnitKey) -> UnitKey | None:
        """The landed unit that should make room for `unit`: one that only younger attempts use, or that the same
        attempt uses later; the youngest of them. None: wait. A unit that is evicted already also means wait."""
        if self._evicting:
            return None
        limit = self._pull_key(unit)
        in_inbox = [landed for landed in self._landed if landed not in self._lent]
        used = [(key, landed) for landed in in_inbox if (key := self._use_key(landed)) is not None]
        if limit is None or not used or max(used)[0] <= limit:
            return None
        return max(used)[1]

    def begin_evict(self, unit: UnitKey) -> bool:
        """Marks a victim, which `take_freeable` gives once the engine let go of it. True if the engine holds it."""
        self._evicting.add(unit)
        return self._landed[unit] > 0

    def take_freeable(self) -> list[UnitKey]:
        """Landed units that the engine does not read and that are evicted or expected by nobody."""
        free = [
            unit
            for unit, num_told in self._landed.items()
            if not num_told and (unit in self._evicting or not self._is_expected(unit))
        ]
        for unit in free:
            del self._landed[unit]
            self._evicting.discard(unit)
            self._lent.discard(unit)
        return free

    def take_releasable(self) -> list[UnitReady]:
        """Announcements that are of no use: their attempt has ended, or has the unit, or never came in time."""
        lapsed_at_s = self._clock.now() - self._ttl_s
        taken = []
        for unit, tickets in list(self._tickets.items()):
            for ticket in list(tickets):
                known = self._attempts.get(ticket.attempt)
                is_unclaimed = known is None and ticket.attempt not in self._ended
                if (is_unclaimed and ticket.at_s > lapsed_at_s) or (known is not None and known.wants(unit)):
                    continue
                taken.append(self._take_ticket(unit, ticket))
        return taken

    def take_needed(self) -> list[Need]:
        """Missing units that are neither announced, nor awaited, nor being pulled. They count as awaited then. Those
        awaited too long are asked for again: nothing on the plane is acknowledged."""
        needs, now_s = [], self._clock.now()
        for attempt, known in self._attempts.items():
            for unit, reason in known.missing.items():
                since_s = known.awaited.get(unit)
                is_awaited = since_s is not None and now_s - since_s < self._wait_s
                if not is_awaited and unit not in self._pulling and unit not in self._tickets:
                    known.awaited[unit] = now_s
                    needs.append(Need(attempt, unit, reason if since_s is None else LOST))
        return needs

    # ------------------------------------------------------------ queries

    def wanting(self, unit: UnitKey) -> list[AttemptId]:
        """Attempts of which the unit is a part."""
        return [attempt for attempt, known in self._attempts.items() if unit in known.order]

    @property
    def num_held(self) -> int:
        """Announcements kept and units pulling or landed; 0 when idle."""
        return sum(map(len, self._tickets.values())) + len(self._pulling) + len(self._landed)

    def _pull_key(self, unit: UnitKey) -> Turn | None:
        if unit in self._pulling or unit in self._landed:
            return None
        wanting = ((attempt, known) for attempt, known in self._attempts.items() if known.wants(unit))
        return min((self._turn(attempt, known, unit) for attempt, known in wanting), default=None)

    def _use_key(self, unit: UnitKey) -> Turn | None:
        """Of the first that still has to read it. What the engine has not spoken of is read by all that name it."""
        readers = self._readers.get(unit, self._attempts.keys())
        turns = [
            self._turn(attempt, known, unit)
            for attempt, known in self._attempts.items()
            if unit in known.order and (attempt in readers or not known.is_admitted)
        ]
        return min(turns, default=None)

    def _turn(self, attempt: AttemptId, known: WantingAttempt, unit: UnitKey) -> Turn:
        if not known.is_admitted:
            return known.age, NextRead(0, known.order[unit])
        named = self._readers.get(unit, {}).get(attempt)
        return known.age, named or NextRead(UNREAD_CHOICE, known.order.get(unit, 0))

    def _is_expected(self, unit: UnitKey) -> bool:
        return any(not known.is_admitted and unit in known.order for known in self._attempts.values())

    def _set_reason(self, unit: UnitKey, reason: str) -> None:
        for known in self._attempts.values():
            if unit in known.missing:
                known.missing[unit] = reason
            elif not known.is_admitted and unit in known.order:
                known.failures[unit] = reason

    def _take_ticket(self, unit: UnitKey, ticket: Announced) -> UnitReady:
        """An attempt that is not here yet must not wait for this announcement when it comes: it is spent."""
        if ticket.attempt not in self._attempts:
            remember(self._spent, (ticket.attempt, unit))
        self._tickets[unit].remove(ticket)
        if not self._tickets[unit]:
            del self._tickets[unit]
        return ticket.ready

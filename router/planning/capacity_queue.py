"""Keeps the queue of requests that can't be dispatched now. It records what each request waits for, members or room in
their KV pools, and it decides which request goes next when members come or blocks become free.

A request joins when a plan found no worker, or no encoder for a modality that the request needs, or when no worker has
room for its KV blocks. It leaves when what it needs is there, when its deadline has passed, or when its client has
disconnected. A request that waited for members, was released and has no token yet is "on the way".

Requests that could be served now go in this order: interactive requests before those of the class `batch` that have not
aged, then the tenant that was served least (`TenantShares`), then priority, then age. A request without media does not
wait for one that has media. Small requests pass a large one that has no room yet; after a while the large one reserves
a worker, so that they do not keep it out for ever.

The queue is pure: it knows nothing of futures or members, and the time is an argument. `router/run/context.py` puts it
into the event loop.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from fabric.contracts import MemberId, WaitingWork, sum_waiting
from router.planning.kv_room import ROOM_NOW, KvRoom, RoomNeed

FIRST_ON_THE_WAY = 16
"""Limits how many released requests may be without their first token when requests begin to leave the queue, so that a
member that has just started does not receive all of them at once. Each request that reaches its first token makes room
for one more than itself, so the queue moves as fast as the cluster turns out to be. Requests with media and those
without have a limit each."""
MIN_DROPPED = 16
"""A line drops the waiters that have left when they outnumber the present ones by this many."""
MAX_PASSED_OVER = 8
"""The queue looks at no more than this many requests of a line that have no room, before it stops searching for a
smaller one."""
RESERVE_AFTER_S = 1.0
"""A request that has waited this long for room, and is the oldest of those that did, reserves a worker: no other
request goes there."""
RESERVE_FOR_S = 5.0
"""After this time a reservation is made again, because the worker may have left, or another one may be nearer."""


# ------------------------------------------------------------ what waits


class CapacityNeed(NamedTuple):
    """A `CapacityNeed` says what must be available before planning a request is worthwhile: a worker, and an encoder
    for each modality."""

    modalities: frozenset[str] = frozenset()
    exclusions: frozenset[tuple[MemberId, float]] = frozenset()
    """Holds the members that failed the request, each with the time until which the request does not use it."""

    def excluded(self, now: float) -> frozenset[MemberId]:
        return frozenset(member_id for member_id, until in self.exclusions if until > now)


class Standing(NamedTuple):
    """A `Standing` is what a request's place in the queue depends on, besides its age and its need."""

    tenant: str = ""
    priority: int = 0
    """The lowest number goes first among the requests of a tenant."""
    is_batch: bool = False
    ages_at_s: float = 0.0
    """From this time on, a request of the class `batch` counts as interactive."""

    def is_spare(self, now: float) -> bool:
        """Returns whether the request may use spare capacity only."""
        return self.is_batch and now < self.ages_at_s


class Supply(Protocol):
    """A `Supply` is the queue's view of the members."""

    def can_serve(self, modalities: frozenset[str], excluded: frozenset[MemberId], now: float) -> bool:
        """Returns whether a plan would find a worker and an encoder for each modality."""
        ...

    def room(self, need: RoomNeed, excluded: frozenset[MemberId], now: float) -> KvRoom:
        """Returns whether a worker that is not excluded has room for the request."""
        ...

    def next_return_s(self, now: float) -> float | None:
        """Returns the time at which the next member that is set aside for a while may be used again, or None if there
        is no such member."""
        ...


@dataclass(eq=False, slots=True)
class Waiter:
    """A `Waiter` is the place of one request in the queue. Waiters of one line are ordered by priority and age, so a
    request that waits a second time keeps its place."""

    age: tuple[float, str]
    need: CapacityNeed
    deadline_s: float
    standing: Standing = Standing()  # noqa: RUF009 (a NamedTuple is immutable)
    room: RoomNeed | None = None
    """This is None for a request that needs no room."""
    since_s: float = 0.0
    """This is the time at which the request joined."""
    lacks_members: bool = True
    """Tells whether the request waits because members were missing, and not for room or for its turn."""
    work: WaitingWork = WaitingWork()  # noqa: RUF009 (a frozen struct is immutable)
    """Predicts what the request will be to the members."""

    def __lt__(self, other: Waiter) -> bool:
        return self.age < other.age

    @property
    def has_media(self) -> bool:
        return bool(self.need.modalities)

    @property
    def num_tokens(self) -> int:
        return 0 if self.room is None else self.room.num_prompt_tokens

    @property
    def line(self) -> tuple[CapacityNeed, str, bool]:
        return self.need, self.standing.tenant, self.standing.is_batch


class WaitOutcome(NamedTuple):
    """A `WaitOutcome` is the end of one wait. `is_served` is False when the deadline passed first."""

    waiter: Waiter
    is_served: bool


class _Line:
    """Keeps waiters sorted by a key, the smallest key first. It skips waiters that have left, and drops them once they
    are the majority."""

    def __init__(self, present: set[Waiter]) -> None:
        self._present = present
        self._entries: list[tuple[tuple[object, ...], Waiter]] = []

    def add(self, key: tuple[object, ...], waiter: Waiter) -> None:
        if len(self._entries) > 2 * len(self._present) + MIN_DROPPED:
            self._entries = [entry for entry in self._entries if entry[1] in self._present]
        insort(self._entries, (key, waiter))

    @property
    def first(self) -> Waiter | None:
        return next(iter(self.first_of(1)), None)

    def first_of(self, count: int) -> list[Waiter]:
        """Returns the first `count` waiters that are present, in order."""
        num_gone = next((at for at, (_, one) in enumerate(self._entries) if one in self._present), len(self._entries))
        del self._entries[:num_gone]
        return list(islice((one for _, one in self._entries if one in self._present), count))


# ------------------------------------------------------------ fairness between tenants


class TenantShares:
    """Keeps how much each tenant was served, as its virtual time: what its requests cost, divided by its weight. The
    tenant with the least virtual time goes first (start-time fair queueing; Goyal, Vin and Cheng, 1996).

    A tenant that begins to wait has at least the virtual time of the last request that was served, so the time in which
    it asked for nothing gives it no credit. Costs are predicted when a request is dispatched and corrected when it
    ends. Each service costs something, so every tenant that waits becomes the first one after a limited amount of
    service to others."""

    def __init__(self, tenant_to_weight: Mapping[str, float] | None = None) -> None:
        """Starts with all tenants equal. A tenant without a weight has the weight 1."""
        self.set_weights(tenant_to_weight or {})
        self._tenant_to_time: dict[str, float] = {}
        self._num_waiting: Counter[str] = Counter()
        self._served_time = 0.0

    def set_weights(self, tenant_to_weight: Mapping[str, float]) -> None:
        """Sets the weights by which later costs count. What was charged before stays."""
        self._tenant_to_weight = dict(tenant_to_weight)

    def time_of(self, tenant: str) -> float:
        """Returns the virtual time at which the tenant's next request begins."""
        own = self._tenant_to_time.get(tenant, 0.0)
        return own if self._num_waiting[tenant] else max(own, self._served_time)

    def begin_waiting(self, tenant: str) -> None:
        self._tenant_to_time[tenant] = self.time_of(tenant)
        self._num_waiting[tenant] += 1

    def end_waiting(self, tenant: str) -> None:
        self._num_waiting[tenant] -= 1

    def charge(self, tenant: str, cost: float) -> None:
        """Charges a request that is dispatched now with its predicted cost, which is positive."""
        begins = self.time_of(tenant)
        self._served_time = max(self._served_time, begins)
        self._tenant_to_time[tenant] = begins + cost / self._weight(tenant)

    def correct(self, tenant: str, difference: float) -> None:
        """Adds the actual cost of a request less the predicted one."""
        self._tenant_to_time[tenant] = self._tenant_to_time.get(tenant, 0.0) + difference / self._weight(tenant)

    def _weight(self, tenant: str) -> float:
        return self._tenant_to_weight.get(tenant, 1.0)


# ------------------------------------------------------------ the queue


class CapacityQueue:
    """Keeps the waiters in lines of requests that are equal for the queue, and the released requests that have not
    reached their first token yet. The cost of every call grows with the number of lines, not with the number of
    waiters."""

    def __init__(
        self, supply: Supply, first_on_the_way: int = FIRST_ON_THE_WAY, shares: TenantShares | None = None
    ) -> None:
        self.shares = TenantShares() if shares is None else shares
        self._supply = supply
        self._first_on_the_way = first_on_the_way
        self._waiting: set[Waiter] = set()
        self._groups = {has_media: _PacedGroup(first_on_the_way) for has_media in (False, True)}
        self._lines: dict[tuple[CapacityNeed, str, bool], _Line] = {}
        self._by_deadline = _Line(self._waiting)
        self._reservation: _Reservation | None = None
        self._line_to_tokens: Counter[tuple[CapacityNeed, str, bool]] = Counter()
        """Counts the prompt tokens of the waiting requests that need room."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_on_the_way(self) -> int:
        return sum(len(group.on_the_way) for group in self._groups.values())

    def waiting_work(self, now: float) -> tuple[WaitingWork, ...]:
        """Returns the work of the requests that wait for room or for their turn, as one sum for those that the same
        pools of workers can take. Those whose members are missing do not count: more members of that kind would be
        there no sooner than the one that is missing. The cost of this call grows with the number of waiters, so it is
        for every second and not for every request."""
        works, asked = list[WaitingWork](), dict[tuple[frozenset[str], frozenset[MemberId]], bool]()
        for waiter in self._waiting:
            key = waiter.need.modalities, waiter.need.excluded(now)
            if key not in asked:
                asked[key] = self._supply.can_serve(*key, now)
            if asked[key]:
                works.append(waiter.work)
        return sum_waiting(works)

    def num_tokens_ahead(self, newcomer: Waiter, now: float) -> int:
        """Counts the prompt tokens of the waiting requests that may get room before a request that joins now. Those of
        the class `batch` are not ahead of an interactive request, and media are not ahead of text."""
        num_tokens, is_spare = 0, newcomer.standing.is_spare(now)
        for line, count in self._line_to_tokens.items():
            head = self._lines[line].first if count else None
            if head is None or (head.has_media and not newcomer.has_media):
                continue
            if is_spare or not head.standing.is_spare(now):
                num_tokens += count
        return num_tokens

    def join(self, waiter: Waiter) -> None:
        group = self._groups[waiter.has_media]
        # A request behind others that wait for members is released at their pace.
        waiter.lacks_members = waiter.lacks_members or group.num_lacking > 0
        if waiter.lacks_members and not group.num_lacking:
            group.max_on_the_way = self._first_on_the_way
        group.num_lacking += waiter.lacks_members
        self._waiting.add(waiter)
        self._line_to_tokens[waiter.line] += waiter.num_tokens
        if waiter.line not in self._lines:
            self._lines[waiter.line] = _Line(self._waiting)
        self._lines[waiter.line].add((waiter.standing.priority, *waiter.age), waiter)
        self._by_deadline.add((waiter.deadline_s, *waiter.age), waiter)
        self.shares.begin_waiting(waiter.standing.tenant)

    def leave(self, waiter: Waiter, has_arrived: bool = False) -> None:
        """Frees the place of a waiter, whether it still waits or is on the way. `has_arrived` says that it has its
        first token. A waiter that is neither waiting nor on the way is ignored."""
        if waiter in self._waiting:
            self._drop(waiter)
        group = self._groups[waiter.has_media]
        if waiter in group.on_the_way:
            group.on_the_way.remove(waiter)
            group.max_on_the_way += has_arrived

    def must_wait(self, newcomer: Waiter, now: float) -> bool:
        """Returns whether a request that has not joined must do so: because a request that could be served now is ahead
        of it, because it would pass over too many requests of its line, or because there is no room for it."""
        survey = self._survey(now)
        rivals = [one for one in survey.ready if newcomer.has_media or not one.has_media]
        if any(self._key(one, now) < self._key(newcomer, now) for one in rivals):
            return True
        if sum(one.line == newcomer.line for one in survey.roomless) >= MAX_PASSED_OVER:
            return True
        if newcomer.standing.is_spare(now) and self._has_urgent(survey.roomless, now):
            return True
        return self.lacks_room(newcomer, self._room_of(newcomer, now), now)

    def lacks_room(self, newcomer: Waiter, room: KvRoom, now: float) -> bool:
        """Returns whether a request, about which the supply has said `room`, must wait for room. It does not if the
        members that it needs are missing: then its plan finds that out."""
        excluded = newcomer.need.excluded(now)
        return room.verdict == "later" and self._supply.can_serve(newcomer.need.modalities, excluded, now)

    def reserved_from(self, waiter: Waiter | None) -> frozenset[MemberId]:
        """Returns the workers that other requests than `waiter` have reserved."""
        held = self._reservation
        return frozenset() if held is None or held.waiter is waiter else frozenset({held.worker_id})

    def take(self, now: float) -> WaitOutcome | None:
        """Ends one wait and returns its `WaitOutcome`: that of the first request that can be served, or of one whose
        deadline has passed. Returns None if all requests must go on waiting. A request that could be served, and that
        only the limit on released requests holds back, is released at its deadline instead of being given up."""
        survey = self._survey(now)
        released = [one for one in survey.ready if not (one.lacks_members and self._groups[one.has_media].is_full)]
        if released:
            return self._end(min(released, key=lambda one: self._key(one, now)), is_served=True)
        overdue = self._by_deadline.first
        if overdue is None or overdue.deadline_s > now:
            return None
        is_served = self._supply.can_serve(overdue.need.modalities, overdue.need.excluded(now), now)
        return self._end(overdue, is_served and self._room_of(overdue, now).verdict != "later")

    def next_at_s(self, now: float) -> float | None:
        """Returns when `take` may find a request even if no member comes and no block becomes free: at a deadline, at
        the end of an exclusion, or when a request of the class `batch` has aged. Returns None if no request waits."""
        soonest = self._by_deadline.first
        if soonest is None:
            return None
        heads = [one for line in self._present_lines() if (one := line.first) is not None]
        moments = [until for one in heads for _, until in one.need.exclusions if until > now]
        moments += [one.standing.ages_at_s for one in heads if one.standing.is_spare(now)]
        returns_s = self._supply.next_return_s(now)
        if returns_s is not None:
            moments.append(returns_s)
        return min([soonest.deadline_s, *moments])

    # ------------------------------------------------------------ inside

    def _end(self, waiter: Waiter, is_served: bool) -> WaitOutcome:
        self._drop(waiter)
        if is_served and waiter.lacks_members:
            self._groups[waiter.has_media].on_the_way.add(waiter)
        return WaitOutcome(waiter, is_served)

    def _drop(self, waiter: Waiter) -> None:
        self._waiting.remove(waiter)
        self._line_to_tokens[waiter.line] -= waiter.num_tokens
        self._groups[waiter.has_media].num_lacking -= waiter.lacks_members
        self.shares.end_waiting(waiter.standing.tenant)
        if self._reservation is not None and self._reservation.waiter is waiter:
            self._reservation = None

    def _present_lines(self) -> list[_Line]:
        """Returns the lines in which a request waits, and drops those that have become empty."""
        for line in [line for line, waiters in self._lines.items() if waiters.first is None]:
            del self._lines[line], self._line_to_tokens[line]
        return list(self._lines.values())

    def _key(self, waiter: Waiter, now: float) -> tuple[bool, float, int, tuple[float, str]]:
        tenant, priority = waiter.standing.tenant, waiter.standing.priority
        return waiter.standing.is_spare(now), self.shares.time_of(tenant), priority, waiter.age

    def _room_of(self, waiter: Waiter, now: float) -> KvRoom:
        if waiter.room is None:
            return ROOM_NOW
        need = waiter.room if waiter.standing.is_spare(now) else waiter.room._replace(headroom=0.0)
        return self._supply.room(need, waiter.need.excluded(now) | self.reserved_from(waiter), now)

    def _survey(self, now: float) -> _Survey:
        """Returns what can be served now. It asks the supply only once about members for needs that are equal at this
        time. It may make a reservation, and then looks again."""
        asked: dict[tuple[frozenset[str], frozenset[MemberId]], bool] = {}
        served: list[_Line] = []
        for line in self._present_lines():
            head = line.first
            assert head is not None, "an empty line was dropped"
            key = head.need.modalities, head.need.excluded(now)
            if key not in asked:
                asked[key] = self._supply.can_serve(*key, now)
            if asked[key]:
                served.append(line)
        survey = self._look(served, now)
        return self._look(served, now) if self._reserve(survey, now) else survey

    def _look(self, served: list[_Line], now: float) -> _Survey:
        survey = _Survey([], [])
        excluded_to_least: dict[tuple[frozenset[MemberId], bool], int] = {}
        """Holds the smallest prompt that has no room, by the workers that may not be used and by the class."""
        for line in served:
            for waiter in line.first_of(MAX_PASSED_OVER):
                # A prompt that is no smaller than one without room is taken to have none either, which saves a look.
                key = waiter.need.excluded(now) | self.reserved_from(waiter), waiter.standing.is_spare(now)
                least = excluded_to_least.get(key)
                # A request that can never have room is released, because its run ends it with an error.
                if least is None or waiter.num_tokens < least:
                    if self._room_of(waiter, now).verdict != "later":
                        survey.ready.append(waiter)
                        break
                    excluded_to_least[key] = waiter.num_tokens
                survey.roomless.append(waiter)
        if self._has_urgent(survey.roomless, now):
            survey = survey._replace(ready=[one for one in survey.ready if not one.standing.is_spare(now)])
        return survey

    def _has_urgent(self, roomless: list[Waiter], now: float) -> bool:
        """Returns whether a request waits for blocks that one of the class `batch` must not take before it."""
        return any(not one.standing.is_spare(now) for one in roomless)

    def _reserve(self, survey: _Survey, now: float) -> bool:
        """Reserves a worker for the oldest request that has waited long for room, unless there is a reservation that
        still holds. Gives up one that has ended and that no request uses. Returns whether anything changed."""
        held = self._reservation
        if held is not None and (now < held.ends_s or held.waiter in survey.ready):
            return False
        roomless = (one for one in survey.roomless if now - one.since_s >= RESERVE_AFTER_S)
        oldest = min((one for one in roomless if not one.standing.is_spare(now)), default=None)
        nearest = None if oldest is None else self._room_of(oldest, now).nearest
        self._reservation = None
        if oldest is not None and nearest is not None:
            self._reservation = _Reservation(oldest, nearest, now + RESERVE_FOR_S)
        return self._reservation != held


class _Reservation(NamedTuple):
    """A `_Reservation` keeps a worker for a request until the worker has room for it."""

    waiter: Waiter
    worker_id: MemberId
    ends_s: float


class _PacedGroup:
    """Limits how many requests without a first token, that waited for members, may be on the way."""

    def __init__(self, max_on_the_way: int) -> None:
        self.on_the_way: set[Waiter] = set()
        self.max_on_the_way = max_on_the_way
        """It grows with each first token, and is reset when a request begins to wait for members."""
        self.num_lacking = 0
        """Counts the waiting requests that are released at the pace of this group."""

    @property
    def is_full(self) -> bool:
        return len(self.on_the_way) >= self.max_on_the_way


class _Survey(NamedTuple):
    """A `_Survey` sorts the first requests of those lines whose members are there: at most one of each line is ready,
    and those before it in the line have no room."""

    ready: list[Waiter]
    roomless: list[Waiter]

"""Keeps the queue of requests that no member can serve now. It records which request waits for which kinds of members,
and it decides which one goes next when a member comes.

A request joins when a plan found no worker, or no encoder for a modality that the request needs. It leaves when the
members that it needs are there, when its deadline has passed, or when its client has disconnected. A request that was
released and has no token yet is "on the way". The queue is pure: it knows nothing of futures or members, and the time
is an argument. `router/run/context.py` puts it into the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from fabric.contracts import MemberId

FIRST_ON_THE_WAY = 16
"""Limits how many released requests may be without their first token when requests begin to leave the queue, so that a
member that has just started does not receive all of them at once. Each request that reaches its first token makes room
for one more than itself, so the queue moves as fast as the cluster turns out to be."""
MIN_DROPPED = 16
"""A line drops the waiters that have left when they outnumber the present ones by this many."""


class CapacityNeed(NamedTuple):
    """A `CapacityNeed` says what must be available before planning a request is worthwhile: a worker, and an encoder
    for each modality. Requests with equal needs stand in one line."""

    modalities: frozenset[str] = frozenset()
    exclusions: frozenset[tuple[MemberId, float]] = frozenset()
    """Holds the members that failed the request, each with the time until which the request does not use it."""

    def excluded(self, now: float) -> frozenset[MemberId]:
        return frozenset(member_id for member_id, until in self.exclusions if until > now)


class Supply(Protocol):
    """A `Supply` is the queue's view of the members."""

    def can_serve(self, modalities: frozenset[str], excluded: frozenset[MemberId], now: float) -> bool:
        """Returns whether a plan would find a worker and an encoder for each modality."""
        ...

    def next_return_s(self, now: float) -> float | None:
        """Returns the time at which the next member that is set aside for a while may be used again, or None if there
        is no such member."""
        ...


@dataclass(eq=False, slots=True)
class Waiter:
    """A `Waiter` is the place of one request in the queue. Waiters are ordered by age, so a request that waits a second
    time keeps its place."""

    age: tuple[float, str]
    need: CapacityNeed
    deadline_s: float

    def __lt__(self, other: Waiter) -> bool:
        return self.age < other.age


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
            heapify(self._entries)
        heappush(self._entries, (key, waiter))

    @property
    def first(self) -> Waiter | None:
        while self._entries and self._entries[0][1] not in self._present:
            heappop(self._entries)
        return self._entries[0][1] if self._entries else None


class CapacityQueue:
    """Keeps the waiters in order of age, with one line for each need, and the released requests that have not reached
    their first token yet. The cost of every call grows with the number of different needs, not with the number of
    waiters."""

    def __init__(self, supply: Supply, first_on_the_way: int = FIRST_ON_THE_WAY) -> None:
        self._supply = supply
        self._first_on_the_way = first_on_the_way
        self._max_on_the_way = first_on_the_way
        """Limits `_on_the_way`. It grows with each first token, and is reset when a request joins an empty queue."""
        self._waiting: set[Waiter] = set()
        self._on_the_way: set[Waiter] = set()
        self._need_to_line: dict[CapacityNeed, _Line] = {}
        self._by_deadline = _Line(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_on_the_way(self) -> int:
        return len(self._on_the_way)

    def join(self, waiter: Waiter) -> None:
        if not self._waiting:
            self._max_on_the_way = self._first_on_the_way
        self._waiting.add(waiter)
        if waiter.need not in self._need_to_line:
            self._need_to_line[waiter.need] = _Line(self._waiting)
        self._need_to_line[waiter.need].add(waiter.age, waiter)
        self._by_deadline.add((waiter.deadline_s, *waiter.age), waiter)

    def leave(self, waiter: Waiter, has_arrived: bool = False) -> None:
        """Frees the place of a waiter, whether it still waits or is on the way. `has_arrived` says that it has its
        first token. A waiter that is neither waiting nor on the way is ignored."""
        self._waiting.discard(waiter)
        if waiter in self._on_the_way:
            self._on_the_way.remove(waiter)
            self._max_on_the_way += has_arrived

    def must_wait(self, age: tuple[float, str], now: float) -> bool:
        """Returns whether a request of this age would overtake a waiting request that could be served now."""
        first = self._first_served(now)
        return first is not None and first.age < age

    def take(self, now: float) -> WaitOutcome | None:
        """Ends one wait and returns its `WaitOutcome`: that of the oldest request that can be served, or of one whose
        deadline has passed. Returns None if all requests must go on waiting. A request that members could serve, and
        that only the limit on released requests holds back, is released at its deadline instead of being given up."""
        served = self._first_served(now)
        if served is not None and len(self._on_the_way) < self._max_on_the_way:
            return self._end(served, is_served=True)
        overdue = self._by_deadline.first
        if overdue is None or overdue.deadline_s > now:
            return None
        return self._end(overdue, self._supply.can_serve(overdue.need.modalities, overdue.need.excluded(now), now))

    def next_at_s(self, now: float) -> float | None:
        """Returns when `take` may find a request even if no member comes: at a deadline, or at the end of an exclusion.
        Returns None if no request waits."""
        soonest = self._by_deadline.first
        if soonest is None:
            return None
        moments = [until for need in self._needs() for _, until in need.exclusions if until > now]
        returns_s = self._supply.next_return_s(now)
        if returns_s is not None:
            moments.append(returns_s)
        return min([soonest.deadline_s, *moments])

    def _end(self, waiter: Waiter, is_served: bool) -> WaitOutcome:
        self._waiting.remove(waiter)
        if is_served:
            self._on_the_way.add(waiter)
        return WaitOutcome(waiter, is_served)

    def _needs(self) -> list[CapacityNeed]:
        """Returns the needs of the requests that wait, and drops lines that have become empty."""
        for need in [need for need, line in self._need_to_line.items() if line.first is None]:
            del self._need_to_line[need]
        return list(self._need_to_line)

    def _first_served(self, now: float) -> Waiter | None:
        """Returns the oldest waiter that can be served. It asks the supply only once about needs that are equal at this
        time."""
        asked: dict[tuple[frozenset[str], frozenset[MemberId]], bool] = {}
        served: list[Waiter] = []
        for need in self._needs():
            key = need.modalities, need.excluded(now)
            if key not in asked:
                asked[key] = self._supply.can_serve(*key, now)
            first = self._need_to_line[need].first
            if asked[key] and first is not None:
                served.append(first)
        return min(served, default=None)

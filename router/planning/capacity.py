"""The queue of requests that nobody can serve now: who waits for what, and whose turn it is when a member comes.

A request joins when a plan found no worker, or no encoder for a modality that it needs. It leaves when the members
that it needs are there, when its deadline has passed, or when its client has left. Pure: it knows neither futures nor
members, and the time is an argument. `router/capacity.py` puts it into the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from fabric.ids import MemberId

FIRST_ON_THE_WAY = 16
"""Released requests that have no token yet, at most, when the line begins to move: a member that has just started gets
no herd. Each that arrives at its first token makes room for one more than itself, so that the line moves as fast as the
cluster turns out to be."""
MIN_DROPPED = 16
"""Waiters that have left are dropped from a line when they outnumber the others by so many."""


class Need(NamedTuple):
    """What a request must find before it is worth planning: a worker, and an encoder for each modality. Requests of
    equal needs stand in one line."""

    modalities: frozenset[str] = frozenset()
    exclusions: frozenset[tuple[MemberId, float]] = frozenset()
    """Members that failed the request, and until when it does not use them."""

    def excluded(self, now: float) -> frozenset[MemberId]:
        return frozenset(member_id for member_id, until in self.exclusions if until > now)


class Supply(Protocol):
    """The members, as the queue sees them."""

    def can_serve(self, modalities: frozenset[str], excluded: frozenset[MemberId], now: float) -> bool:
        """Whether a plan would find a worker and an encoder for each modality."""
        ...

    def next_return_s(self, now: float) -> float | None:
        """When the next member that is set aside for a while may be used again; None if there is none."""
        ...


@dataclass(eq=False, slots=True)
class Waiter:
    """One request's place. Ordered by age, so that a request that waits again keeps its place."""

    age: tuple[float, str]
    need: Need
    deadline_s: float

    def __lt__(self, other: Waiter) -> bool:
        return self.age < other.age


class Turn(NamedTuple):
    """The end of one wait. `is_served` is False when the deadline passed first."""

    waiter: Waiter
    is_served: bool


class _Line:
    """Waiters by a key, the least first. Those that have left are skipped, and dropped once they are the most."""

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
    """Waiters in order of age, a line for each need, and those released that are still on the way to their first token.
    The cost of every call grows with the number of different needs, not with the number of waiters."""

    def __init__(self, supply: Supply, first_on_the_way: int = FIRST_ON_THE_WAY) -> None:
        self._supply = supply
        self._first_on_the_way = first_on_the_way
        self._max_on_the_way = first_on_the_way
        """Grows while somebody waits."""
        self._waiting: set[Waiter] = set()
        self._on_the_way: set[Waiter] = set()
        self._need_to_line: dict[Need, _Line] = {}
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
        """Whether it waits or is on the way: its place is free. `has_arrived`: it has its first token. A waiter that is
        neither waiting nor on the way is ignored."""
        self._waiting.discard(waiter)
        if waiter in self._on_the_way:
            self._on_the_way.remove(waiter)
            self._max_on_the_way += has_arrived

    def must_wait(self, age: tuple[float, str], now: float) -> bool:
        """Whether a request of this age would overtake one that waits and could be served now."""
        first = self._first_served(now)
        return first is not None and first.age < age

    def take(self, now: float) -> Turn | None:
        """Ends one wait, and says whose: the oldest request that can be served, or one whose deadline has passed.
        None if all must go on waiting. One that can be served and is only held back by those on the way is released
        at its deadline, not given up."""
        served = self._first_served(now)
        if served is not None and len(self._on_the_way) < self._max_on_the_way:
            return self._end(served, is_served=True)
        late = self._by_deadline.first
        if late is None or late.deadline_s > now:
            return None
        return self._end(late, self._supply.can_serve(late.need.modalities, late.need.excluded(now), now))

    def next_at_s(self, now: float) -> float | None:
        """When `take` may find somebody although no member comes: a deadline, or the end of an exclusion."""
        soonest = self._by_deadline.first
        if soonest is None:
            return None
        moments = [until for need in self._needs() for _, until in need.exclusions if until > now]
        returns_s = self._supply.next_return_s(now)
        if returns_s is not None:
            moments.append(returns_s)
        return min([soonest.deadline_s, *moments])

    def _end(self, waiter: Waiter, is_served: bool) -> Turn:
        self._waiting.remove(waiter)
        if is_served:
            self._on_the_way.add(waiter)
        return Turn(waiter, is_served)

    def _needs(self) -> list[Need]:
        """Of those that wait. Lines that have become empty are dropped."""
        for need in [need for need, line in self._need_to_line.items() if line.first is None]:
            del self._need_to_line[need]
        return list(self._need_to_line)

    def _first_served(self, now: float) -> Waiter | None:
        """The oldest waiter that can be served. Needs that are equal now are asked about once."""
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

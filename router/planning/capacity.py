"""The queue of requests that nobody can serve now: who waits for what, and whose turn it is when a member comes.

A request joins when a plan found no worker, or no encoder for a modality that it needs. It leaves when the members
that it needs are there, when its deadline has passed, or when its client has left. Pure: it knows neither futures nor
members, and the time is an argument. `router/capacity.py` puts it into the event loop.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fabric.ids import MemberId

FIRST_ON_THE_WAY = 16
"""Released requests that have no token yet, at most, when the line begins to move: a member that has just started gets
no herd. Each that arrives at its first token makes room for one more than itself, so that the line moves as fast as the
cluster turns out to be."""


class Need(NamedTuple):
    """What a request must find before it is worth planning: a worker, and an encoder for each modality."""

    modalities: frozenset[str] = frozenset()
    member_to_exclusion_end_s: Mapping[MemberId, float] = {}
    """Members that failed this request, and until when it does not use them."""

    def excluded(self, now: float) -> frozenset[MemberId]:
        return frozenset(member_id for member_id, until in self.member_to_exclusion_end_s.items() if until > now)


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


@dataclass(eq=False, slots=True)
class CapacityQueue:
    """Waiters in order of age, and those released that are still on the way to their first token."""

    supply: Supply
    first_on_the_way: int = FIRST_ON_THE_WAY
    max_on_the_way: int = 0
    """Grows while somebody waits."""
    _waiting: list[Waiter] = field(default_factory=list)
    _on_the_way: set[Waiter] = field(default_factory=set)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_on_the_way(self) -> int:
        return len(self._on_the_way)

    def join(self, waiter: Waiter) -> None:
        if not self._waiting:
            self.max_on_the_way = self.first_on_the_way
        insort(self._waiting, waiter)

    def leave(self, waiter: Waiter, has_arrived: bool = False) -> None:
        """Whether it waits or is on the way: its place is free. `has_arrived`: it has its first token. A waiter that is
        neither waiting nor on the way is ignored."""
        if waiter in self._on_the_way:
            self._on_the_way.remove(waiter)
            self.max_on_the_way += has_arrived
        if waiter in self._waiting:
            self._waiting.remove(waiter)

    def must_wait(self, age: tuple[float, str], now: float) -> bool:
        """Whether a request of this age would overtake one that waits and could be served now."""
        return self._first_served(now, older_than=age) is not None

    def take(self, now: float) -> Turn | None:
        """Ends one wait, and says whose: the oldest request that can be served, or one whose deadline has passed.
        None if all must go on waiting. One that can be served and is only held back by those on the way is released
        at its deadline, not given up."""
        served = self._first_served(now)
        if served is not None and (len(self._on_the_way) < self.max_on_the_way or served.deadline_s <= now):
            self._waiting.remove(served)
            self._on_the_way.add(served)
            return Turn(served, True)
        late = next((waiter for waiter in self._waiting if waiter.deadline_s <= now), None)
        if late is None:
            return None
        self._waiting.remove(late)
        is_served = self._can_serve(late.need, now)
        if is_served:
            self._on_the_way.add(late)
        return Turn(late, is_served)

    def next_at_s(self, now: float) -> float | None:
        """When `take` may find somebody although no member comes: a deadline, or the end of an exclusion."""
        if not self._waiting:
            return None
        moments = [waiter.deadline_s for waiter in self._waiting]
        for waiter in self._waiting:
            moments += [until for until in waiter.need.member_to_exclusion_end_s.values() if until > now]
        returns_s = self.supply.next_return_s(now)
        return min(moments if returns_s is None else [*moments, returns_s])

    def _first_served(self, now: float, older_than: tuple[float, str] | None = None) -> Waiter | None:
        """The oldest waiter that can be served. Equal needs are asked about once."""
        asked: dict[tuple[frozenset[str], frozenset[MemberId]], bool] = {}
        for waiter in self._waiting:
            if older_than is not None and waiter.age >= older_than:
                return None
            key = waiter.need.modalities, waiter.need.excluded(now)
            if key not in asked:
                asked[key] = self.supply.can_serve(*key, now)
            if asked[key]:
                return waiter
        return None

    def _can_serve(self, need: Need, now: float) -> bool:
        return self.supply.can_serve(need.modalities, need.excluded(now), now)

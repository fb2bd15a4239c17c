"""Lets fetches run by turns, so that no party takes the processor time of an event loop.

A fetch runs in steps: from one wait for the network to the next. How long a step takes is up to the server, which
decides what there is to parse. So no more than one step runs in a turn of the loop, and if several fetches could run,
it is that of the party which has used the least processor time while they were there. A party that was away has no
credit: it begins with as much as the one that has used the least. Tenants come before hosts, as in `fair_shares`, and
without keys the hosts are the parties.

A fetch also has a limit of its own, and it knows whether it had to wait for the others: if so, it is no fault of its
server that it was late. The module knows nothing of what a fetch does.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from fabric.contracts import MediaUnreachable
from router.fetch.fair_shares import SHARED_TENANT, Party

T = TypeVar("T")
Clock = Callable[[], float]
Work = Callable[[], Coroutine[Any, Any, T]]
BUSY_SHARE = 0.5
"""A fetch was kept back if the steps of others took more than this part of its time."""

OVERDRAWN = "the answer of the URL's server takes too much processor time for a file of its size"


@dataclass(slots=True)
class _Account:
    """An `_Account` is what a party, or a tenant, has used while it had fetches."""

    used_s: float
    num_open: int = 0


class _Turn(NamedTuple):
    """A `_Turn` is a step that waits."""

    party: Party
    number: int
    granted: asyncio.Future[None]


class FairTurns:
    """A `FairTurns` belongs to one event loop."""

    def __init__(self, now: Clock = time.monotonic, processor_s: Clock = time.thread_time) -> None:
        """`processor_s` is the clock of the processor time of the loop's thread."""
        self.busy_s = 0.0
        """Sums up how long steps took by `now`."""
        self.now = now
        self._processor_s = processor_s
        self._owner_to_account: dict[Party | str, _Account] = {}
        self._waiting: list[_Turn] = []
        self._numbers = itertools.count()
        self._is_taken = False
        """Tells whether a step has run, or was granted, in this turn of the loop."""

    def fetch(self, party: Party, work: Work[T], allowed_s: Clock) -> SteppedFetch[T]:
        """Returns a fetch that calls and awaits `work` for a party when it is awaited. `allowed_s` says how much
        processor time it may use; it is asked after each step."""
        return SteppedFetch(self, party, work, allowed_s)

    def open(self, party: Party) -> None:
        """Begins to count for a fetch of a party."""
        for owner in (party.tenant, party):
            account = self._owner_to_account.get(owner)
            if account is None:
                least_s = min((each.used_s for each in self._peers(owner)), default=0.0)
                account = self._owner_to_account[owner] = _Account(least_s)
            account.num_open += 1

    def close(self, party: Party) -> None:
        """Ends a fetch of a party. A party without fetches is forgotten."""
        for owner in (party.tenant, party):
            account = self._owner_to_account[owner]
            account.num_open -= 1
            if not account.num_open:
                del self._owner_to_account[owner]

    def ask(self, party: Party) -> asyncio.Future[None] | None:
        """Returns None if a step may run now, or what to wait for."""
        loop = asyncio.get_running_loop()
        if not self._is_taken and not self._waiting:
            self._is_taken = True
            loop.call_soon(self._pass_on, loop)
            return None
        granted: asyncio.Future[None] = loop.create_future()
        self._waiting.append(_Turn(party, next(self._numbers), granted))
        return granted

    def run(self, party: Party, step: Callable[[], object]) -> tuple[object, float, float]:
        """Runs a step. Returns what it has returned, and how long it took by both clocks."""
        begun_s, begun_processor_s = self.now(), self._processor_s()
        try:
            awaited = step()
        finally:
            took_s, used_s = self.now() - begun_s, self._processor_s() - begun_processor_s
            self.busy_s += took_s
            for owner in (party.tenant, party):
                self._owner_to_account[owner].used_s += used_s
        return awaited, took_s, used_s

    def _pass_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends a turn. The next one is granted a little later, so that the fetch that has just run may ask for it."""
        self._is_taken = bool(self._waiting)
        if self._is_taken:
            loop.call_soon(self._grant, loop)

    def _grant(self, loop: asyncio.AbstractEventLoop) -> None:
        """Gives the turn to a step that waits; it runs before the turn ends."""
        self._waiting = [turn for turn in self._waiting if not turn.granted.done()]
        self._is_taken = bool(self._waiting)
        if self._waiting:
            turn = min(self._waiting, key=self._rank)
            self._waiting.remove(turn)
            turn.granted.set_result(None)
            loop.call_soon(self._pass_on, loop)

    def _rank(self, turn: _Turn) -> tuple[float, float, int]:
        party = turn.party
        owner: Party | str = party if party.tenant == SHARED_TENANT else party.tenant
        return self._owner_to_account[owner].used_s, self._owner_to_account[party].used_s, turn.number

    def _peers(self, owner: Party | str) -> list[_Account]:
        """Returns the accounts of all tenants, or those of a tenant's parties."""
        tenant = owner.tenant if isinstance(owner, Party) else None
        return [
            account
            for other, account in self._owner_to_account.items()
            if (other.tenant if isinstance(other, Party) else None) == tenant
        ]


class SteppedFetch(Generic[T]):
    """A `SteppedFetch` is awaited once. Beyond its processor time, it raises MediaUnreachable where its work waits."""

    def __init__(self, turns: FairTurns, party: Party, work: Work[T], allowed_s: Clock) -> None:
        self._turns = turns
        self._party = party
        self._work = work
        self._allowed_s = allowed_s
        self._own_s = self._used_s = self._begun_s = self._busy_before_s = 0.0
        self._is_over = False

    @property
    def was_kept_back(self) -> bool:
        """Tells whether the steps of other fetches took most of its time."""
        others_s = self._turns.busy_s - self._busy_before_s - self._own_s
        return others_s > BUSY_SHARE * (self._turns.now() - self._begun_s)

    def __await__(self) -> Generator[Any, None, T]:
        self._begun_s, self._busy_before_s = self._turns.now(), self._turns.busy_s
        self._turns.open(self._party)
        work = self._work()
        try:
            result: T = yield from _Steps(self, work)
            return result
        finally:
            work.close()
            self._turns.close(self._party)

    def ask(self) -> asyncio.Future[None] | None:
        """Returns None if the next step may run now, or what to wait for."""
        return self._turns.ask(self._party)

    def run(self, step: Callable[[], object]) -> object:
        """Runs a step, and returns what it waits for."""
        awaited, took_s, used_s = self._turns.run(self._party, step)
        self._own_s += took_s
        self._used_s += used_s
        return awaited

    def overdraws(self) -> bool:
        """Tells, once, that the fetch has used too much processor time. What it does to end is not counted."""
        if self._is_over or self._used_s <= self._allowed_s():
            return False
        self._is_over = True
        return True


class _Steps:
    """A `_Steps` is what the event loop drives in the place of a coroutine: it hands each call on to the coroutine when
    the fetch has its turn."""

    def __init__(self, fetch: SteppedFetch[T], work: Coroutine[Any, Any, T]) -> None:
        self._fetch = fetch
        self._work = work
        self._turn: Generator[Any, None, None] | None = None
        """Is the turn for which the fetch has waited, until the step runs."""

    def __iter__(self) -> _Steps:
        return self

    def __next__(self) -> object:
        """Runs a step, or returns the turn to wait for. Raises StopIteration with the result."""
        granted = self._fetch.ask() if self._turn is None else None
        if granted is not None:
            self._turn = granted.__await__()
            return next(self._turn)
        self._turn = None
        if self._fetch.overdraws():
            return self.throw(MediaUnreachable(OVERDRAWN))
        return self._fetch.run(partial(self._work.send, None))

    def throw(self, error: BaseException) -> object:
        """Runs a step that begins with an error, at once: what ends a fetch does not wait for a turn."""
        self._turn = None
        return self._fetch.run(partial(self._work.throw, error))

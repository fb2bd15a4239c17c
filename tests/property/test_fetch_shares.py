"""Walks through histories of fetches that come, grow, end and give up waiting. No tenant waits behind more than one
fetch of another while it has nothing, nobody gets everything, and no place is ever lost."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fabric.contracts import Overloaded
from router.fetch.fair_shares import SHARED_TENANT, FairShares, Party

parties = st.builds(Party, st.sampled_from(["a", "b", "c", "d"]), st.sampled_from(["one", "two"]))
MAX_WAITING = 12


class PlacesWalk(RuleBasedStateMachine):
    @initialize(limit=st.integers(1, 9), is_keyless=st.booleans())
    def begin(self, limit: int, is_keyless: bool) -> None:
        self.shares = FairShares(limit, 1, MAX_WAITING)
        self.is_keyless = is_keyless
        self.number = 0
        self.held: dict[int, Party] = {}
        self.waiting: dict[int, Party] = {}
        self.overtaken: dict[str, Counter[str]] = {}
        """Counts, for each owner that waits with nothing, the fetches of each other that were served meanwhile."""

    def owner_of(self, party: Party) -> str:
        return party.host if self.is_keyless else party.tenant

    def own(self, parties_of: dict[int, Party]) -> Counter[str]:
        return Counter(map(self.owner_of, parties_of.values()))

    def served(self, number: int) -> None:
        party = self.waiting.pop(number)
        self.held[number] = party
        owner = self.owner_of(party)
        self.overtaken.pop(owner, None)
        for counts in self.overtaken.values():
            counts[owner] += 1

    def note_waiting(self) -> None:
        """Begins to count for owners that now wait with nothing, and stops for others."""
        held, waiting = self.own(self.held), self.own(self.waiting)
        starving = {owner for owner in waiting if not held[owner]}
        for owner in starving - self.overtaken.keys():
            self.overtaken[owner] = Counter()
        for owner in self.overtaken.keys() - starving:
            del self.overtaken[owner]

    @rule(party=parties, host=st.sampled_from(["one", "two", "three", "four"]))
    def come(self, party: Party, host: str) -> None:
        party = Party(SHARED_TENANT, host) if self.is_keyless else party
        self.number += 1
        num_waiting = len(self.waiting)
        try:
            is_served = self.shares.enter(self.number, party, 1)
        except Overloaded:
            own = self.own(self.waiting)[self.owner_of(party)]
            assert own >= MAX_WAITING - num_waiting
            return
        (self.held if is_served else self.waiting)[self.number] = party
        self.note_waiting()

    @precondition(lambda self: self.held or self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([*self.held, *self.waiting]))
        self.held.pop(number, None)
        self.waiting.pop(number, None)
        self.note_waiting()
        for served in self.shares.leave(number):
            self.served(served)
        self.note_waiting()
        assert self.shares.leave(number) == []

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.shares.used == len(self.held) <= self.shares.limit
        assert self.shares.num_waiting == len(self.waiting) <= MAX_WAITING
        assert all(self.shares.holds(number) for number in self.held)
        assert not any(self.shares.holds(number) for number in self.waiting)

    @invariant()
    def nobody_waits_with_nothing_while_a_place_is_free(self) -> None:
        held = self.own(self.held)
        if len(self.held) < self.shares.limit:
            assert all(held[self.owner_of(party)] for party in self.waiting.values())

    @invariant()
    def nobody_with_nothing_waits_behind_two_fetches_of_another(self) -> None:
        assert all(count <= 1 for counts in self.overtaken.values() for count in counts.values())

    @invariant()
    def nobody_has_more_than_half_and_one(self) -> None:
        assert all(count <= (self.shares.limit + 1) // 2 for count in self.own(self.held).values())

    def teardown(self) -> None:
        if hasattr(self, "shares"):
            while self.held or self.waiting:
                number = next(iter([*self.held, *self.waiting]))
                self.held.pop(number, None)
                self.waiting.pop(number, None)
                for served in self.shares.leave(number):
                    self.served(served)
            self.the_books_are_right()
            books = (self.shares._held, self.shares._num_waiting, self.shares._last_turn, self.shares._lines)
            assert not any(books)


TestPlacesWalk = PlacesWalk.TestCase

"""Decides who gets the places and the memory of fetching, so that no party can take all of them with slow servers.

What a fetch takes can't be taken back before it ends, so fairness among those that wait is not enough. A party may take
more only while what it holds does not exceed what then remains free, or a multiple of that. Alone it gets half of all,
two parties get a third each, and there is something left for a party that holds nothing. (The rule is that of dynamic
thresholds for the queues of a switch: Choudhury and Hahne in `docs/references.md`.) Within what a tenant may take, the
hosts that it asks share by the same rule, and so do all hosts where requests have no tenant. What becomes free goes to
the tenant that holds least, and there to the host that holds least.

The module is pure. It knows nothing of URLs, of clocks, and of what is shared: places and bytes follow one rule.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from fabric.contracts import Overloaded

SHARED_TENANT = ""
"""Names the tenant of requests without keys. Nothing tells their clients apart, so it has no share of its own, and only
the hosts have."""
MAX_WAITING = 256


class Party(NamedTuple):
    """A `Party` is on whose behalf, and from where, something is fetched."""

    tenant: str
    host: str


class FairShares:
    """A `FairShares` shares an amount among fetches, which have numbers."""

    def __init__(self, limit: int, quantum: int = 1, max_waiting: int = MAX_WAITING, greed: int = 1) -> None:
        """`quantum` is the amount that a party without any may take as long as it is free: one place, or the memory of
        a small file. A party may hold `greed` times what then remains free."""
        self.limit = limit
        self.used = 0
        self.num_waiting = 0
        self._quantum = quantum
        self._max_waiting = max_waiting
        self._greed = greed
        self._number_to_held: dict[int, tuple[Party, int]] = {}
        self._number_to_party: dict[int, Party] = {}
        """Holds the party of each fetch that waits."""
        self._held: Counter[Party | str] = Counter()
        """Counts what each party, and each tenant, holds."""
        self._num_waiting: Counter[Party | str] = Counter()
        self._lines: dict[str, dict[str, deque[tuple[int, int]]]] = {}
        """Maps tenants, and then hosts, to the fetches that wait, in the order of their arrival: pairs of a number and
        the amount that it wants. No line is empty."""
        self._turn = 0
        self._last_turn: dict[Party | str, int] = {}
        """Maps what waits to the turn in which it was served last, or in which it began to wait."""

    def enter(self, number: int, party: Party, amount: int) -> bool:
        """Returns whether the fetch `number` has its amount at once; otherwise it waits. Raises Overloaded if as many
        wait as may wait, of all parties or of this one."""
        is_first = party.host not in self._lines.get(party.tenant, {})
        if is_first and self._fits(party, amount):
            self._give(number, party, amount)
            return True
        owner: Party | str = party if party.tenant == SHARED_TENANT else party.tenant
        if self._num_waiting[owner] >= self._max_waiting - self.num_waiting:
            raise Overloaded("too many fetches of media wait already; send fewer requests at once")
        self._lines.setdefault(party.tenant, {}).setdefault(party.host, deque()).append((number, amount))
        for each in (party, party.tenant):
            self._last_turn.setdefault(each, self._turn)
        self._number_to_party[number] = party
        self._count_waiting(party, 1)
        return False

    def grow(self, number: int, more: int) -> bool:
        """Gives a fetch that holds something more of it, and returns True, if its party may have that now."""
        party, held = self._number_to_held[number]
        if not self._fits(party, more):
            return False
        self._number_to_held[number] = party, held + more
        self._count_held(party, more)
        return True

    def leave(self, number: int) -> list[int]:
        """Ends a fetch that holds something or waits. Returns the fetches that now have what they waited for, in the
        order in which they were served. Has no effect on a fetch that has left."""
        if number in self._number_to_held:
            party, amount = self._number_to_held.pop(number)
            self._count_held(party, -amount)
            self._forget(party)
        elif number in self._number_to_party:
            party = self._number_to_party.pop(number)
            line = self._lines[party.tenant][party.host]
            line.remove(next(entry for entry in line if entry[0] == number))
            self._stopped_waiting(party)
            self._forget(party)
        else:
            return []
        served: list[int] = []
        while (party_served := self._next()) is not None:
            served_number, amount = self._lines[party_served.tenant][party_served.host].popleft()
            del self._number_to_party[served_number]
            self._stopped_waiting(party_served)
            self._give(served_number, party_served, amount)
            served.append(served_number)
        return served

    def holds(self, number: int) -> bool:
        return number in self._number_to_held

    # ------------------------------------------------------------ the rule

    def _fits(self, party: Party, amount: int) -> bool:
        """Tells whether a party may take so much now. An amount that is too large for the rule may be there alone."""
        if not self.used:
            return True
        free = self.limit - self.used
        room = self._greed * (free - amount) + self._quantum - amount
        if party.tenant != SHARED_TENANT:
            room -= self._held[party.tenant]
        # What the tenant could still take is to its hosts what is free to all tenants.
        return amount <= free and self._held[party] <= room

    def _next(self) -> Party | None:
        """Returns the party to serve next, or None if no party that waits may take what it wants."""
        for tenant in sorted(self._lines, key=self._rank):
            for party in sorted((Party(tenant, host) for host in self._lines[tenant]), key=self._rank):
                if self._fits(party, self._lines[tenant][party.host][0][1]):
                    return party
        return None

    def _rank(self, owner: Party | str) -> tuple[int, int]:
        return self._held[owner], self._last_turn.get(owner, 0)

    # ------------------------------------------------------------ the books

    def _give(self, number: int, party: Party, amount: int) -> None:
        self._turn += 1
        self._last_turn[party] = self._last_turn[party.tenant] = self._turn
        self._number_to_held[number] = party, amount
        self._count_held(party, amount)

    def _count_held(self, party: Party, amount: int) -> None:
        self.used += amount
        self._held[party] += amount
        self._held[party.tenant] += amount

    def _count_waiting(self, party: Party, change: int) -> None:
        self.num_waiting += change
        self._num_waiting[party] += change
        self._num_waiting[party.tenant] += change

    def _stopped_waiting(self, party: Party) -> None:
        self._count_waiting(party, -1)
        hosts = self._lines[party.tenant]
        if not hosts[party.host]:
            del hosts[party.host]
        if not hosts:
            del self._lines[party.tenant]

    def _forget(self, party: Party) -> None:
        """Drops the books of a party, and of its tenant, that neither hold anything nor wait."""
        for owner in (party, party.tenant):
            if not self._held[owner] and not self._num_waiting[owner]:
                for counts in (self._held, self._num_waiting, self._last_turn):
                    counts.pop(owner, None)

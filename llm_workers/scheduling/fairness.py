"""Whose prompt goes next when several tenants wait: those who were served least, so that many requests of one tenant
do not starve another's few.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): every computed token is
counted for its tenant; among prompts of equal rank the tenant with the smallest count goes first, and within a tenant
the order that was given stays. Who was not waiting saves nothing up: when it comes back, its count is raised to the
least of those that are; so is the count of one that gets all that it asks for, step by step. While two tenants both
have more to compute than they get, what they got differs by little more than a step's tokens, and everybody who waits
is served again and again, its oldest request first.
Knows tenants and numbers of tokens; neither blocks nor features.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from itertools import groupby
from typing import NamedTuple


class Claim(NamedTuple):
    """A prompt that could be computed now."""

    rank: Hashable
    """Comes before fairness: only claims of equal rank are exchanged."""
    tenant: str
    num_tokens: int
    """That it would take of this step, at most."""


class FairShare:
    def __init__(self) -> None:
        self._tenant_to_served: dict[str, int] = {}
        self._waiting: frozenset[str] = frozenset()
        self._floor = 0
        """Least count of those that wait, as last seen; it only grows."""

    def order(self, claims: Sequence[Claim]) -> list[int]:
        """Indexes of the claims in the order in which they should be tried. `claims` are sorted by rank, and within
        a rank as a tenant's own claims should follow each other."""
        served = dict(self._tenant_to_served)
        ordered: list[int] = []
        for _, group in groupby(range(len(claims)), key=lambda index: claims[index].rank):
            queues: dict[str, deque[int]] = {}
            for index in group:
                queues.setdefault(claims[index].tenant, deque()).append(index)
            while queues:
                # Of equals the one whose claim stands first, so that the order is a function of the claims.
                tenant = min(queues, key=lambda one: (served.get(one, self._floor), queues[one][0]))
                index = queues[tenant].popleft()
                ordered.append(index)
                served[tenant] = served.get(tenant, self._floor) + claims[index].num_tokens
                if not queues[tenant]:
                    del queues[tenant]
        return ordered

    def begin_step(self, waiting: Collection[str]) -> None:
        """These tenants have prompts that could be computed in this step. Whoever had none left behind the step before
        is raised to the floor; who owes nothing and does not wait is forgotten."""
        staying = self._waiting.intersection(waiting)
        if staying:
            self._floor = max(self._floor, min(self._tenant_to_served[tenant] for tenant in staying))
        for tenant in waiting:
            if tenant not in staying:
                self._tenant_to_served[tenant] = max(self._floor, self._tenant_to_served.get(tenant, 0))
        self._waiting = frozenset(waiting)
        for tenant in [one for one, served in self._tenant_to_served.items() if served <= self._floor]:
            if tenant not in self._waiting:
                del self._tenant_to_served[tenant]

    def charge(self, tenant: str, num_tokens: int) -> None:
        """So many tokens are computed for it in this step, whatever for."""
        self._tenant_to_served[tenant] = self._tenant_to_served.get(tenant, self._floor) + num_tokens

    def end_step(self, wanting: Collection[str]) -> None:
        """Only these have prompts left that could have been computed in this step. If there are none, debts to nobody
        are forgotten."""
        self._waiting = self._waiting.intersection(wanting)
        if not self._waiting:
            self.clear()

    def clear(self) -> None:
        """Nobody is left."""
        self._tenant_to_served.clear()
        self._waiting = frozenset()
        self._floor = 0

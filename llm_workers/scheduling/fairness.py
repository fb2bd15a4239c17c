"""Counts how much each tenant was served, so that many requests of one tenant do not starve the few of another.

The module keeps virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): every
computed token is counted for its tenant, and among prompts of equal rank the tenant with the smallest count goes first
(`prefill_queue`). A tenant that does not wait accumulates no credit: when it comes back, its count is raised to the
floor, which is the least count of the tenants that wait. The count of a tenant that gets all that it asks for is raised
in the same way, step by step. While two tenants both have more to compute than they get, the amounts that they got
differ by little more than a step's tokens, and every tenant that waits is served again and again.

Counts and floor only grow, and each call costs the logarithm of the number of tenants. This module knows tenants and
numbers of tokens; it knows nothing of prompts and blocks.
"""

from __future__ import annotations

from llm_workers.scheduling.ranked import RankedHeap

_FEW_TENANTS = 64


class FairShare:
    def __init__(self) -> None:
        self._tenant_to_served: dict[str, int] = {}
        self._waiting: RankedHeap[str] = RankedHeap()
        """Holds the waiting tenants, ordered by count. No count of a waiting tenant is below the floor."""
        self._floor = 0
        self._most = 0
        """This is an upper bound of all counts."""
        self._num_kept = 0
        """Holds the number of counts that were left after the last removal of counts without meaning."""

    def served(self, tenant: str) -> int:
        """Returns the tenant's count. A count below the floor means the same as the floor."""
        return self._tenant_to_served.get(tenant, 0)

    def begin_waiting(self, tenant: str) -> None:
        """Notes that the tenant has prompts that could be computed, from now on."""
        if tenant not in self._waiting:
            self._raise_floor()
            self._set(tenant, self.raised(tenant))
            self._waiting.put(tenant, self._tenant_to_served[tenant])

    def end_waiting(self, tenant: str) -> None:
        """Notes that the tenant has no such prompts any more, or gets all that it asks for. When no tenant waits, all
        counts are forgotten, and all tenants are equal again."""
        self._waiting.discard(tenant)
        if not self._waiting:
            self._forget()

    def raised(self, tenant: str) -> int:
        """Returns the tenant's count, raised to the floor; with this count the tenant would begin to wait."""
        return max(self._floor, self.served(tenant))

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Counts this many tokens as computed for the tenant, for any purpose."""
        self._set(tenant, self.raised(tenant) + num_tokens)
        if tenant in self._waiting:
            self._waiting.put(tenant, self._tenant_to_served[tenant])

    def begin_step(self) -> None:
        """Raises the floor, and removes the counts that have no meaning any more once there are many of them."""
        self._raise_floor()
        if len(self._tenant_to_served) > 2 * self._num_kept + _FEW_TENANTS:
            self._tenant_to_served = {
                tenant: served
                for tenant, served in self._tenant_to_served.items()
                if served > self._floor or tenant in self._waiting
            }
            self._num_kept = len(self._tenant_to_served)

    def _raise_floor(self) -> None:
        least = self._waiting.peek()
        if least is None:
            self._forget()
        else:
            self._floor = max(self._floor, least[0])

    def _forget(self) -> None:
        self._floor = self._most
        self._tenant_to_served.clear()
        self._num_kept = 0

    def _set(self, tenant: str, served: int) -> None:
        self._tenant_to_served[tenant] = served
        self._most = max(self._most, served)

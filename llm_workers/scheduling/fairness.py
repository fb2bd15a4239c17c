"""How much each tenant was served, so that many requests of one tenant do not starve another's few.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): every computed token is
counted for its tenant, and among prompts of equal rank the tenant with the smallest count goes first
(`prefill_queue`). A tenant that was not waiting saves nothing up: when it comes back, its count is raised to the floor,
the least count of those that wait; so is the count of one that gets all that it asks for, step by step. While two
tenants both have more to compute than they get, what they got differs by little more than a step's tokens, and every
tenant that waits is served again and again.

Counts and floor only grow, and each call costs the logarithm of the number of tenants.
Knows tenants and numbers of tokens; neither prompts nor blocks.
"""

from __future__ import annotations

from llm_workers.scheduling.ranked import RankedHeap

_FEW_TENANTS = 64


class FairShare:
    def __init__(self) -> None:
        self._tenant_to_served: dict[str, int] = {}
        self._waiting: RankedHeap[str] = RankedHeap()
        """By count. None of them is below the floor."""
        self._floor = 0
        self._most = 0
        """No count is above it."""
        self._num_kept = 0
        """Counts that were left when those that mean nothing any more were last thrown away."""

    def served(self, tenant: str) -> int:
        """Its count. One below the floor means the same as the floor."""
        return self._tenant_to_served.get(tenant, 0)

    def begin_waiting(self, tenant: str) -> None:
        """It has prompts that could be computed, from now on."""
        if tenant not in self._waiting:
            self._raise_floor()
            self._set(tenant, self.raised(tenant))
            self._waiting.put(tenant, self._tenant_to_served[tenant])

    def end_waiting(self, tenant: str) -> None:
        """It has none any more, or gets all that it asks for. When no tenant waits, debts to nobody are forgotten: all
        are equal again."""
        self._waiting.discard(tenant)
        if not self._waiting:
            self._forget()

    def raised(self, tenant: str) -> int:
        """Its count, raised to the floor: with so many it would begin to wait."""
        return max(self._floor, self.served(tenant))

    def charge(self, tenant: str, num_tokens: int) -> None:
        """So many tokens are computed for it, whatever for."""
        self._set(tenant, self.raised(tenant) + num_tokens)
        if tenant in self._waiting:
            self._waiting.put(tenant, self._tenant_to_served[tenant])

    def begin_step(self) -> None:
        """Throws away what means nothing any more, once there is much of it."""
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

"""Holds the places that one HTTP exchange has among the requests in flight.

The module knows nothing of what the requests are.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.run import Admission, Ticket


class Tickets:
    """A `Tickets` holds the ticket of an exchange, which counts its body, and one for each further request that the
    exchange makes of the cluster."""

    def __init__(self, first: Ticket) -> None:
        self.first = first
        self._others: list[Ticket] = []

    def add(self, admission: Admission, count: int) -> Sequence[Ticket]:
        """Takes and returns further tickets of the same caller, all or none. Raises Overloaded or RateLimited."""
        added = admission.admit_more(self.first.caller, count) if count else []
        self._others += added
        return added

    def release_others(self) -> None:
        """Gives all tickets but the first back."""
        while self._others:
            self._others.pop().release()

    def release(self) -> None:
        """Gives all tickets back. It may be called twice."""
        self.release_others()
        self.first.release()

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

    def begin(self, admission: Admission, num_requests: int, num_at_once: int) -> Sequence[Ticket]:
        """Counts all requests of the exchange for the quotas, and returns the tickets of the first `num_at_once`. The
        first ticket is that of the whole exchange, and its id that of the first request. Raises what
        `Admission.admit_rest` raises."""
        if num_requests > 1:
            self._others += admission.admit_rest(self.first.caller, num_requests, num_at_once)
        return [self.first, *self._others]

    def add(self, admission: Admission, count: int) -> Sequence[Ticket]:
        """Takes and returns tickets for requests that `begin` has counted, all or none. Raises Overloaded."""
        added = admission.admit_more(self.first.caller, count)
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

"""Holds the places that one HTTP exchange has among the requests in flight.

The module knows nothing of what the requests are.
"""

from __future__ import annotations

from router.run import Admission, Ticket


class Tickets:
    """A `Tickets` holds the ticket of an exchange, which counts its body, and one more for each further request that
    the exchange makes of the cluster."""

    def __init__(self, first: Ticket) -> None:
        self.first = first
        self._others: list[Ticket] = []

    def add(self, admission: Admission) -> Ticket:
        """Takes and returns a further ticket of the same caller. Raises Overloaded, RateLimited or Draining."""
        ticket = admission.admit(self.first.caller)
        self._others.append(ticket)
        return ticket

    def release(self) -> None:
        """Gives all tickets back. It may be called twice."""
        for ticket in (self.first, *self._others):
            ticket.release()

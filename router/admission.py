"""Limits what may be in flight at once: the number of requests, and the bytes of their bodies. It refuses requests
beyond the limits before any work is spent on them.

It is pure, and knows nothing of HTTP or of workers.
"""

from __future__ import annotations

from collections.abc import Callable

from fabric.errors import Draining, Overloaded
from fabric.ids import RequestId, mint_request_id


class Ticket:
    """A `Ticket` is a place among the requests in flight. The request holds it until `release`, which may be called
    twice."""

    def __init__(self, admission: Admission, request_id: RequestId) -> None:
        self.request_id = request_id
        self.num_bytes = 0
        self._admission: Admission | None = admission

    def grow(self, num_bytes: int) -> None:
        """Counts `num_bytes` more bytes of body. Raises Overloaded if all bodies together exceed the budget."""
        assert self._admission is not None, "the ticket was released"
        self._admission.take_bytes(num_bytes)
        self.num_bytes += num_bytes

    def release(self) -> None:
        if self._admission is not None:
            self._admission.give_back(self)
            self._admission = None


class Admission:
    def __init__(self, max_in_flight: int, max_bodies_bytes: int, retry_after_s: float) -> None:
        self._max_in_flight = max_in_flight
        self._max_bodies_bytes = max_bodies_bytes
        self._retry_after_s = retry_after_s
        self._when_empty: list[Callable[[], None]] = []
        self.is_closed = False
        self.num_in_flight = 0
        self.bodies_bytes = 0

    def close(self, when_empty: Callable[[], None]) -> None:
        """Stops admitting requests. Calls `when_empty` once no request is in flight, at once if there is none now."""
        self.is_closed = True
        self._when_empty.append(when_empty)
        self._tell_when_empty()

    def admit(self) -> Ticket:
        """Returns a ticket with a new request id. Raises Overloaded if too many requests are in flight, or Draining
        once it is closed."""
        if self.is_closed:
            raise Draining("the cluster is stopping and takes no new requests", retry_after_s=self._retry_after_s)
        if self.num_in_flight >= self._max_in_flight:
            message = f"{self.num_in_flight} requests are in flight, the most this router takes"
            raise Overloaded(message, retry_after_s=self._retry_after_s)
        self.num_in_flight += 1
        return Ticket(self, mint_request_id())

    def take_bytes(self, num_bytes: int) -> None:
        """Counts bytes of a body; tickets call it. Raises Overloaded if all bodies together exceed the budget."""
        if self.bodies_bytes + num_bytes > self._max_bodies_bytes:
            raise Overloaded("too many bytes of requests are in flight", retry_after_s=self._retry_after_s)
        self.bodies_bytes += num_bytes

    def give_back(self, ticket: Ticket) -> None:
        """Returns a ticket's place and bytes; tickets call it."""
        self.num_in_flight -= 1
        self.bodies_bytes -= ticket.num_bytes
        self._tell_when_empty()

    def _tell_when_empty(self) -> None:
        while self._when_empty and not self.num_in_flight:
            self._when_empty.pop()()

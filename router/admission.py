"""What may be in flight at once: requests, and the bytes of their bodies. Beyond it, refused before work is spent.

Pure; knows neither HTTP nor workers.
"""

from __future__ import annotations

from collections.abc import Callable

from fabric.errors import Draining, Overloaded
from fabric.ids import RequestId, mint_request_id


class Ticket:
    """A place among the requests in flight. Held until `release`, which may be called twice."""

    def __init__(self, admission: Admission, request_id: RequestId) -> None:
        self.request_id = request_id
        self.num_bytes = 0
        self._admission: Admission | None = admission

    def grow(self, num_bytes: int) -> None:
        """So many more bytes of body. Raises Overloaded when all bodies together pass the budget."""
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
        """Admits nothing from now on. `when_empty` is called once no request is in flight, at once if none is."""
        self.is_closed = True
        self._when_empty.append(when_empty)
        self._tell_when_empty()

    def admit(self) -> Ticket:
        """Mints the request's id. Raises Overloaded, or Draining once it is closed."""
        if self.is_closed:
            raise Draining("the cluster is stopping and takes no new requests", retry_after_s=self._retry_after_s)
        if self.num_in_flight >= self._max_in_flight:
            message = f"{self.num_in_flight} requests are in flight, the most this router takes"
            raise Overloaded(message, retry_after_s=self._retry_after_s)
        self.num_in_flight += 1
        return Ticket(self, mint_request_id())

    def take_bytes(self, num_bytes: int) -> None:
        """Called by tickets. Raises Overloaded."""
        if self.bodies_bytes + num_bytes > self._max_bodies_bytes:
            raise Overloaded("too many bytes of requests are in flight", retry_after_s=self._retry_after_s)
        self.bodies_bytes += num_bytes

    def give_back(self, ticket: Ticket) -> None:
        """Called by tickets."""
        self.num_in_flight -= 1
        self.bodies_bytes -= ticket.num_bytes
        self._tell_when_empty()

    def _tell_when_empty(self) -> None:
        while self._when_empty and not self.num_in_flight:
            self._when_empty.pop()()

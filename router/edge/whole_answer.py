"""Sends an answer that is complete. A large one goes out in pieces, each when the client has taken those before it, so
that the memory of the server holds the answer once, and no longer than it counts for the budgets.

The module knows nothing of what the answer says.
"""

from __future__ import annotations

import math
from contextlib import closing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fabric.contracts import Aborted
from router.edge.connection import note_failure
from router.edge.paced_writer import PacedWriter, Timers
from router.edge.tickets import Tickets

PIECE_BYTES = 64 * 1024
"""An answer of at most this size is sent at once, because the buffer of a connection holds as much anyway."""


class WholeAnswer(Response):
    """A `WholeAnswer` sends one answer. It owns the tickets of the exchange, and gives them back when the answer is
    written or its client gone. Until then the request is in flight, and a large answer counts for the budget of bodies:
    clients that read slowly, or not at all, can't make a router hold any number of answers."""

    def __init__(
        self,
        body: bytes,
        media_type: str,
        headers: dict[str, str],
        tickets: Tickets,
        write_timeout_s: float,
        min_bytes_per_s: float,
        timers: Timers | None = None,
    ) -> None:
        """Takes over the tickets. A client must take the answer within `write_timeout_s`, and the time that
        `min_bytes_per_s` allows for its size besides. Raises Overloaded if the budget of bodies has no room for the
        answer; the tickets then stay the caller's."""
        super().__init__(body, media_type=media_type, headers=headers)
        if len(body) > PIECE_BYTES:
            tickets.first.grow(len(body))
        self._tickets = tickets
        self._write_timeout_s = write_timeout_s
        self._limit_s = write_timeout_s + len(body) / min_bytes_per_s
        self._timers = timers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if len(self.body) <= PIECE_BYTES:
                await super().__call__(scope, receive, send)
            else:
                await self._write_pieces(send)
        except (Aborted, OSError):
            note_failure(scope, Aborted("the client left, or was too slow to take its answer"))
        finally:
            self._tickets.release()

    async def _write_pieces(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        size = len(self.body)
        with closing(PacedWriter(send, self._write_timeout_s, math.inf, self._timers, self._limit_s)) as paced:
            for begin in range(0, size, PIECE_BYTES):
                end = begin + PIECE_BYTES
                await paced.write(bytes(self.body[begin:end]), is_last=end >= size)

"""Limits what one client may cost the HTTP server: sizes, connections, and the time that a slow client may take.

`HttpLimits` holds the limits, and `ConnectionPace` decides when a connection is too slow. The decisions are pure: the
caller passes the time. The module knows nothing of sockets, of a parser or of an app.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

KIB = 1024


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Holds the limits of one server. Times are in seconds."""

    max_header_bytes: int = 64 * KIB
    """Limits the size of the request line and the headers together; more is answered 431."""
    max_headers: int = 256
    """Limits the number of headers of a request, and that of its trailers."""
    max_target_bytes: int = 16 * KIB
    """Limits the size of the path and query of a request; more is answered 414."""
    max_small_chunks: int = 4096
    """Limits the number of chunks of a body, each of which takes the event loop about a microsecond."""
    large_chunk_bytes: int = 256
    """A body may have one chunk beyond `max_small_chunks` per this many bytes."""
    max_extra_bytes: int = 16 * KIB
    """Limits the bytes of a body in chunks that are neither its own nor needed for its chunks: extensions and
    trailers."""
    max_pipelined: int = 16
    """Limits the requests of one connection that wait for the answer to an earlier one."""
    max_connections: int = 16_384
    """Limits the open connections. It is lowered to what the limit of open files of the process allows."""
    header_timeout_s: float = 30.0
    """A new connection, or the first byte of a further request, may be this much earlier than the end of the request's
    headers."""
    body_timeout_s: float = 30.0
    """A body may take this long, and longer by the time that `min_body_bytes_per_s` allows for its size."""
    min_body_bytes_per_s: int = 16 * KIB
    """A body that takes longer than `body_timeout_s` must come this fast."""
    write_timeout_s: float = 120.0
    """A client that takes no byte of a waiting answer for this long is disconnected. So is one that takes what is left
    of a complete answer at less than `min_body_bytes_per_s`."""
    max_unsent_bytes: int = 256 * KIB * KIB
    """Limits the bytes that wait for the clients of all connections together. Beyond it, connections are closed, those
    first for which most waits."""
    linger_s: float = 2.0
    """After a refusal the server still reads for this long, and drops what it reads, so that the client can read the
    refusal instead of a connection reset."""


class ReadPhase(Enum):
    """`ReadPhase` lists what a connection is doing, as far as its reading side is concerned."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    ANSWER = "answer"
    """The request has been read; its answer is being made or written."""
    REFUSED = "refused"
    """The server drops what comes, and closes the connection soon."""


class Lateness(Enum):
    """`Lateness` lists in what a client is too slow."""

    SILENT = "silent"
    """The client has sent nothing at all."""
    HEAD = "head"
    BODY = "body"
    READING = "reading"
    """The client does not take its answer."""
    REFUSED = "refused"
    """The time to read the refusal is over."""


class ConnectionPace:
    """A `ConnectionPace` records how fast one client sends and reads."""

    __slots__ = ("_num_bytes", "_since_s", "_unsent", "_unsent_since_s", "phase")

    def __init__(self, now: float) -> None:
        self.phase = ReadPhase.HEAD
        self._since_s = now
        self._num_bytes = 0
        self._unsent = 0
        self._unsent_since_s = now

    def enter(self, phase: ReadPhase, now: float) -> None:
        """Enters a phase, whose time begins now."""
        self.phase, self._since_s, self._num_bytes = phase, now, 0
        self._unsent = 0

    def took(self, num_bytes: int) -> None:
        """Counts bytes that came in the present phase."""
        self._num_bytes += num_bytes

    def lateness(
        self, limits: HttpLimits, now: float, is_paused: bool, num_unsent: int, is_whole: bool = False
    ) -> Lateness | None:
        """Returns in what the client is too slow, or None. `is_paused` says that the server does not read now, so that
        a client that sends nothing is not to blame. `num_unsent` counts the bytes that wait for the client, if nothing
        is added to them now, otherwise 0. `is_whole` says that nothing more of the answer will be added. Side effect:
        the method remembers what waits for its next call."""
        has_taken = num_unsent < self._unsent
        if not num_unsent or num_unsent > self._unsent or (has_taken and not is_whole):
            self._unsent, self._unsent_since_s = num_unsent, now
        elif (waited_s := now - self._unsent_since_s) > limits.write_timeout_s:
            if self._unsent - num_unsent < limits.min_body_bytes_per_s * waited_s:
                return Lateness.READING
            self._unsent, self._unsent_since_s = num_unsent, now
        if is_paused:
            self._since_s = now
            return None
        passed_s = now - self._since_s
        if self.phase is ReadPhase.HEAD and passed_s > limits.header_timeout_s:
            return Lateness.HEAD if self._num_bytes else Lateness.SILENT
        if self.phase is ReadPhase.BODY:
            allowed_s = limits.body_timeout_s + self._num_bytes / limits.min_body_bytes_per_s
            return Lateness.BODY if passed_s > allowed_s else None
        if self.phase is ReadPhase.REFUSED and passed_s > limits.linger_s:
            return Lateness.REFUSED
        return None

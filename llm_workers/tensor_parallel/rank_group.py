"""Implements rank 0's side of a worker group: it starts the rank processes, sends them each step, and detects when one
is gone.

A group that has lost a member is lost as a whole and never recovers: the ranks' KV pages and their place in the
sequence of sums would differ from then on. `RankGroup` announces steps through one `Link` for each rank process, a
byte-stream connection of framed messages whose end both sides notice. The links exist in addition to the process group,
because waiting there has a timeout (and on CUDA keeps the device busy), and a worker may be idle for hours. A rank
process connects to the group's `Door` and must first send the group's token.

This module knows nothing of what a step computes.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Protocol, TypeVar

from fabric.contracts import ProtocolError, WorkerLost
from fabric.transport import PortRange, listen
from llm_workers.tensor_parallel.process_group import (
    Invitation,
    Message,
    RankFailed,
    Ready,
    StepHeader,
    Stop,
    decode,
    encode,
    open_store,
    process_group,
)

_LOG = logging.getLogger(__name__)
_POLL_S = 0.2
_STOP_GRACE_S = 5.0
Loaded = TypeVar("Loaded")


class RankProcess(Protocol):
    """A `RankProcess` is the process of another rank, on this machine or on another machine."""

    def is_alive(self) -> bool: ...

    def end(self) -> None:
        """Ends the rank process at once, in any state. The call is idempotent."""
        ...


Launch = Callable[[Invitation], RankProcess]


class RankGroup:
    """A `RankGroup` is the group of one worker. A caller calls `open`, then runs steps, then calls `stop`. Steps come
    from one thread at a time."""

    def __init__(
        self,
        host: str,
        num_ranks: int,
        device: str,
        step_timeout_s: float,
        start_timeout_s: float,
        ports: PortRange | None = None,
    ) -> None:
        """Opens the ports that rank processes connect to, two of `ports` where a range is given."""
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._door = Door(host, self._token, ports)
        self._store = open_store(host, num_ranks, start_timeout_s, ports)
        self._invitation = Invitation(
            0, num_ranks, host, self._door.port, self._store.port, self._token, device, step_timeout_s, start_timeout_s
        )
        self._links: list[Link] = []
        self._rank_processes: list[RankProcess] = []
        self._membership = ExitStack()
        self._lost: str | None = None
        self._is_stopping = False
        self._on_lost: Callable[[], object] = lambda: None
        self._lock = threading.Lock()

    # ------------------------------------------------------------ life

    def open(self, launch: Launch, load: Callable[[], Loaded]) -> Loaded:
        """Starts the rank processes, joins them to the process group, calls `load` (for rank 0's own share) while they
        load theirs, and returns the result of `load` when all are ready. Raises the error that a rank process failed
        with, or WorkerLost if a rank process died or was not ready in time; then nothing is left running."""
        deadline_s = time.monotonic() + self._invitation.start_timeout_s
        with ExitStack() as undo:
            undo.callback(self.stop)
            try:
                for rank in range(1, self._invitation.num_ranks):
                    self._rank_processes.append(launch(replace(self._invitation, rank=rank)))
                self._welcome(deadline_s)
                self._membership.enter_context(process_group(self._invitation, self._store))
                loaded = load()
                for link in self._links:
                    _expect_ready(link, max(deadline_s - time.monotonic(), _POLL_S))
            except (TimeoutError, LinkClosed, RuntimeError) as error:
                raise WorkerLost(f"the ranks of the worker could not form a group: {error}") from error
            undo.pop_all()
        for link in self._links:
            threading.Thread(target=self._watch, args=(link,), name="weft-rank-watch", daemon=True).start()
        return loaded

    def _welcome(self, deadline_s: float) -> None:
        while len(self._links) < len(self._rank_processes):
            if not all(rank_process.is_alive() for rank_process in self._rank_processes):
                raise WorkerLost("a rank of the worker ended before it had joined the group")
            if time.monotonic() > deadline_s:
                limit_s = self._invitation.start_timeout_s
                raise TimeoutError(f"a rank did not join within {limit_s:g} s")
            link = self._door.accept(_POLL_S)
            if link is not None:
                self._links.append(link)
        self._door.close()

    def on_lost(self, call: Callable[[], object]) -> None:
        """Registers `call`, which is called once, in some thread, when a member is gone. If a member is gone already,
        `call` runs at once."""
        with self._lock:
            self._on_lost = call
            is_lost = self._lost is not None
        if is_lost:
            call()

    def stop(self) -> None:
        """Stops all rank processes; those that do not end within a few seconds (`_STOP_GRACE_S`; at once if the group
        is lost) are ended by force. Leaves the process group. The call is idempotent."""
        with self._lock:
            self._is_stopping = True
        for link in self._links:
            with suppress(LinkClosed):
                link.send(Stop())
        deadline_s = time.monotonic() + (_STOP_GRACE_S if self._lost is None else 0.0)
        while any(rank_process.is_alive() for rank_process in self._rank_processes) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        for rank_process in self._rank_processes:
            rank_process.end()
        for link in self._links:
            link.close()
        self._door.close()
        self._membership.close()

    # ------------------------------------------------------------ steps

    def check(self) -> None:
        """Raises WorkerLost if a member is gone."""
        if self._lost is not None:
            raise WorkerLost(self._lost)

    @contextmanager
    def step(self, header: StepHeader) -> Iterator[None]:
        """Announces a step, which the `with` block then computes together with the other ranks. Raises WorkerLost if
        that is not possible; any error that the block raises ends the group."""
        self.check()
        try:
            for link in self._links:
                link.send(header)
            yield
        except Exception as error:
            # This is one step of the engine's loop. After any error the ranks are out of step, and no later result can
            # be right. The engine's thread logs the error and ends every request.
            self._lose(f"a step of the worker's ranks failed ({type(error).__name__})")
            raise WorkerLost(self._lost or "the worker has lost a rank") from error

    def _watch(self, link: Link) -> None:
        """Waits, in a thread of its own, for a message of one rank process: after its start a rank process sends one
        only when it ends."""
        try:
            message: Message = link.receive()
        except (LinkClosed, ProtocolError) as error:
            self._lose(f"the worker has lost a rank: {error}")
            return
        said = message.error.message if isinstance(message, RankFailed) else type(message).__name__
        self._lose(f"a rank of the worker failed: {said}")

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._lost is not None or self._is_stopping:
                return
            self._lost = reason
            call = self._on_lost
        _LOG.error("%s", reason)
        call()


def _expect_ready(link: Link, timeout_s: float) -> None:
    """Waits until the rank process is ready. Raises the error that the rank process failed with."""
    message = link.receive(timeout_s)
    if isinstance(message, RankFailed):
        raise message.error.to_error()
    if not isinstance(message, Ready):
        raise ProtocolError(f"the first message of a rank must be Ready, not {type(message).__name__}")


# ---------------------------------------------------------------- connections of rank processes

_LENGTH = struct.Struct("<I")
TOKEN_BYTES = 32


class Door:
    """A `Door` is the listening side, where rank processes connect: a free port of one address."""

    def __init__(self, host: str, token: bytes, ports: PortRange | None = None) -> None:
        self._token = token
        self._socket = listen(host, ports)
        self.port: int = self._socket.getsockname()[1]

    def accept(self, timeout_s: float) -> Link | None:
        """Returns the link of the next rank process that knows the token, or None if no connection, or only one without
        the token, came in time."""
        self._socket.settimeout(timeout_s)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return None
        connection.settimeout(timeout_s)
        shown = b""
        with contextlib.suppress(OSError):
            while len(shown) < TOKEN_BYTES and (part := connection.recv(TOKEN_BYTES - len(shown))):
                shown += part
        if not hmac.compare_digest(shown, self._token):
            connection.close()
            return None
        connection.settimeout(None)
        return Link(connection)

    def close(self) -> None:
        self._socket.close()


def knock(host: str, port: int, token: bytes, timeout_s: float) -> Link:
    """Connects a rank process to rank 0's `Door` and sends the token. Raises OSError if that is not possible."""
    connection = socket.create_connection((host, port), timeout_s)
    connection.sendall(token)
    connection.settimeout(None)
    return Link(connection)


class Link:
    """A `Link` is a connection between rank 0 and one rank process. It sends and receives messages; one thread may send
    while another receives. Raises LinkClosed, and TimeoutError where a timeout was given."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message) -> None:
        data = encode(message)
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise LinkClosed(f"can't send to a rank: {error}") from error

    def receive(self, timeout_s: float | None = None) -> Message:
        """Waits for the next message; without a timeout it waits forever."""
        self._socket.settimeout(timeout_s)
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        return decode(self._take(length))

    def _take(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            try:
                part = self._socket.recv(num_bytes - len(data))
            except TimeoutError:
                raise
            except OSError as error:
                raise LinkClosed(f"the connection to a rank broke: {error}") from error
            if not part:
                raise LinkClosed("a rank has closed its connection")
            data += part
        return bytes(data)

    def close(self) -> None:
        """Closes the connection, which wakes a thread that is receiving. The call is idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class LinkClosed(ConnectionError):
    """Says that the other side has ended."""

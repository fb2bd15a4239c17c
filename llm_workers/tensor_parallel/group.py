"""Implements rank 0's side of a worker group: it starts the rank processes, sends them each step, and detects when one
is gone.

A group that has lost a member is lost as a whole and never recovers: the ranks' KV pages and their place in the
sequence of sums would differ from then on. This module knows nothing of what a step computes.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Protocol, TypeVar

from fabric.errors import ProtocolError, WorkerLost
from llm_workers.tensor_parallel.invitation import Invitation
from llm_workers.tensor_parallel.link import TOKEN_BYTES, Door, Link, LinkClosed
from llm_workers.tensor_parallel.process_group import open_store, process_group
from llm_workers.tensor_parallel.wire import Message, RankFailed, Ready, StepHeader, Stop

Loaded = TypeVar("Loaded")
_LOG = logging.getLogger(__name__)
_POLL_S = 0.2
_STOP_GRACE_S = 5.0


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

    def __init__(self, host: str, num_ranks: int, device: str, step_timeout_s: float, start_timeout_s: float) -> None:
        """Opens the ports that rank processes connect to."""
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._door = Door(host, self._token)
        self._store = open_store(host, num_ranks, start_timeout_s)
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
                raise WorkerLost(f"the worker's ranks did not come together: {error}") from error
            undo.pop_all()
        for link in self._links:
            threading.Thread(target=self._watch, args=(link,), name="weft-rank-watch", daemon=True).start()
        return loaded

    def _welcome(self, deadline_s: float) -> None:
        while len(self._links) < len(self._rank_processes):
            if not all(rank_process.is_alive() for rank_process in self._rank_processes):
                raise WorkerLost("a rank of the worker ended before it had joined")
            if time.monotonic() > deadline_s:
                raise TimeoutError("a rank did not join in time")
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
        # This is a step of the engine's loop. After any error the ranks are out of step, and no later result could be
        # right.
        except Exception as error:
            self._lose(f"a step of the worker's ranks failed ({type(error).__name__})")
            raise WorkerLost(self._lost or "a rank is gone") from error

    def _watch(self, link: Link) -> None:
        """Waits, in a thread of its own, for a message of one rank process: after its start a rank process sends one
        only when it ends."""
        try:
            message: Message = link.receive()
        except (LinkClosed, ProtocolError) as error:
            self._lose(f"a rank of the worker is gone: {error}")
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
        raise ProtocolError(f"a rank began with {type(message).__name__}")

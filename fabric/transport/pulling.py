"""Implements the sink's side of every channel: it reserves a slot, reads, checks the generation, and hands the
feature over or quarantines the slot.

Transports differ only in one collaborator, the `Reader`; this module alone handles slots, time-outs and dead peers. One
thread begins and watches all reads of a sink, so no other code ever waits for a peer. A reader that blocks (because it
connects to a peer that does not answer) delays the sink's other pulls; NIXL over UCX was not seen to do so. The module
knows nothing of what a feature means.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from fabric.contracts import (
    Clock,
    FeatureTicket,
    LeaseLost,
    ProtocolError,
    TransferError,
    TransferFailed,
    WeftError,
    feature_nbytes,
)
from fabric.transport.arena import ArenaUsage, Slot
from fabric.transport.feature_channel import HEADER_BYTES, WORD_BYTES, LandedFeature, SlotMemory

_LOG = logging.getLogger(__name__)
_SHORTEST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_QUARANTINE_PAUSE_S = 20e-3
"""The thread pauses this long between polls when only transfers that were given up are left."""


class ReadState(enum.Enum):
    PENDING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class Reader(Protocol):
    """A `Reader` does one-sided reads from a source's memory into the sink's. Only the transfer thread uses it."""

    def post(self, ticket: FeatureTicket, address: int, offset: int, nbytes: int) -> Any:
        """Begins to read `nbytes` at the source's `address` to `offset` in the sink's memory, and connects first if
        necessary. Returns a handle. Raises TransferFailed if the read cannot begin."""
        ...

    def state(self, read: Any) -> ReadState:
        """Returns the state of a read. DONE and FAILED are final, and nothing is written after them."""
        ...

    def release(self, read: Any) -> None:
        """Releases the handle of a read that has ended."""
        ...

    def disconnect(self, source: str) -> None:
        """Forgets a source that has no read under way. (A read under way may write after its state became FAILED: this
        was seen with UCX over TCP, when a frozen peer woke up.) Unknown names are ignored."""
        ...

    def close(self) -> None:
        """Ends all reads and connections. Memory to which a read under way may still write stays allocated."""
        ...


@dataclass(slots=True, eq=False)
class _Pull:
    ticket: FeatureTicket
    slot: Slot
    future: Future[LandedFeature]
    started_s: float
    deadline_s: float
    read: Any = None
    is_word_read: bool = False
    """The payload has arrived; the read under way is that of the generation word."""
    is_given_up: bool = False
    """The future has ended and the slot is in quarantine; the sink only waits for the end of the transfer."""


class PullingSink:
    """Implements `fabric.transport.feature_channel.FeatureSink` over a reader. A pulled slot takes 64 bytes more than
    its payload."""

    def __init__(self, name: str, slots: SlotMemory, reader: Reader, clock: Clock) -> None:
        self._slots = slots
        self._reader = reader
        self._clock = clock
        self._commands: deque[_Pull | str] = deque()
        """Holds commands to the transfer thread: a pull to begin, or the name of a source that is dead."""
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._is_closed = False
        self._pulls: list[_Pull] = []
        self._dead: set[str] = set()
        """Holds the sources to disconnect from once their last transfer has ended."""
        self._num_idle_rounds = 0
        self._thread = threading.Thread(target=self._run, name=f"{name}-transfer", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ any thread

    def pull(self, ticket: FeatureTicket, timeout_s: float) -> Future[LandedFeature]:
        """Pulls as the contract says. It also raises ProtocolError for a ticket that contradicts itself, and
        TransferFailed when the sink is closed. The future ends in the transfer thread, and its callbacks run there."""
        try:
            is_consistent = feature_nbytes(ticket.shape, ticket.dtype) == ticket.nbytes
        except ValueError as error:
            raise ProtocolError(f"the ticket of {ticket.source} is invalid: {error}") from error
        if not is_consistent:
            feature = f"a feature of shape {ticket.shape} in {ticket.dtype}"
            raise ProtocolError(f"the ticket of {ticket.source} is invalid: {feature} can't have {ticket.nbytes} bytes")
        slot = self._slots.reserve(ticket.nbytes)
        now_s = self._clock.now()
        pull = _Pull(ticket, slot, Future(), now_s, now_s + timeout_s)
        if not self._command(pull):
            self._slots.free(slot.slot_id)
            raise TransferFailed("the sink is closed")
        return pull.future

    def free(self, slot_id: int) -> None:
        self._slots.free(slot_id)

    def peer_dead(self, source: str) -> None:
        """Asks the transfer thread to end the source's open pulls and to forget its connection. A slot in quarantine is
        freed when the transport also reports that its transfer has ended, which is at once for a process that is gone.
        So a peer that was only frozen when its lease ended, and wakes up later, does no harm."""
        self._command(source)

    def usage(self) -> ArenaUsage:
        return self._slots.usage()

    @property
    def is_alive(self) -> bool:
        return not self._is_closed and self._thread.is_alive()

    def close(self) -> None:
        """Ends open pulls with TransferFailed and joins the thread. It is idempotent."""
        with self._lock:
            self._is_closed = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _command(self, command: _Pull | str) -> bool:
        with self._lock:
            if self._is_closed:
                return False
            self._commands.append(command)
        self._wake.set()
        return True

    # ------------------------------------------------------------ transfer thread

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._wake.wait(self._pause_s())
                self._wake.clear()
                while self._commands:
                    self._obey(self._commands.popleft())
                before = len(self._pulls)
                self._pulls = [pull for pull in self._pulls if not self._advance(pull)]
                self._disconnect_dead()
                self._num_idle_rounds = 0 if len(self._pulls) < before else self._num_idle_rounds + 1
        except Exception:  # This is the loop of the transfer thread; the code below ends every open pull.
            _LOG.exception("the transfer thread failed, and its sink is closed")
        finally:
            self._shut_down()

    def _pause_s(self) -> float | None:
        """Returns the pause before the next poll. Without a pull to watch it is None (until a wake-up); otherwise it is
        short and doubles while no pull ends."""
        if not self._pulls:
            return None
        longest_s = _QUARANTINE_PAUSE_S if all(pull.is_given_up for pull in self._pulls) else _LONGEST_PAUSE_S
        return min(longest_s, _SHORTEST_PAUSE_S * 2.0 ** min(self._num_idle_rounds, 12))

    def _obey(self, command: _Pull | str) -> None:
        self._num_idle_rounds = 0
        if isinstance(command, str):
            self._bury(command)
            return
        self._dead.discard(command.ticket.source)
        if self._post(command, command.ticket.address, HEADER_BYTES, command.ticket.nbytes):
            self._pulls.append(command)

    def _post(self, pull: _Pull, address: int, offset: int, nbytes: int) -> bool:
        """Begins one read of a pull. If that is impossible, it ends the pull and returns False."""
        if pull.future.cancelled():
            self._end(pull, None)
            return False
        try:
            pull.read = self._reader.post(pull.ticket, address, pull.slot.offset + offset, nbytes)
        except TransferError as error:
            self._end(pull, error)
            return False
        return True

    def _advance(self, pull: _Pull) -> bool:
        """Checks the state of a pull's read and acts on it. Returns True when the pull has ended."""
        state = self._reader.state(pull.read)
        if state is ReadState.PENDING:
            if not pull.is_given_up and self._clock.now() >= pull.deadline_s:
                waited_s = self._clock.now() - pull.started_s
                self._give_up(pull, f"{pull.ticket.source} did not deliver the feature within {waited_s:.1f} s")
            return False
        self._reader.release(pull.read)
        pull.read = None
        if state is ReadState.FAILED:
            self._end(pull, TransferFailed(f"the read from {pull.ticket.source} failed"))
        elif pull.is_given_up or pull.is_word_read:
            self._end(pull, self._check_generation(pull))
        else:
            pull.is_word_read = True
            if self._post(pull, pull.ticket.generation_address, 0, WORD_BYTES):
                return self._advance(pull)
        return True

    def _check_generation(self, pull: _Pull) -> WeftError | None:
        """Returns None if the slot still belonged to the ticket after the payload had been read, and LeaseLost
        otherwise. The payload counts only in the first case."""
        if self._slots.word(pull.slot) == pull.ticket.generation:
            return None
        return LeaseLost(f"{pull.ticket.source} has given the slot to another feature")

    def _give_up(self, pull: _Pull, why: str) -> None:
        """Ends the future although the transfer has not ended, and quarantines the slot."""
        pull.is_given_up = True
        self._slots.quarantine(pull.slot.slot_id)
        if pull.future.set_running_or_notify_cancel():
            pull.future.set_exception(TransferFailed(why))

    def _end(self, pull: _Pull, error: WeftError | None) -> None:
        """Ends a pull whose transfer has ended: the slot belongs to the consumer or is freed."""
        if pull.is_given_up:
            self._slots.release_quarantine(pull.slot.slot_id)
            return
        is_wanted = pull.future.set_running_or_notify_cancel()
        if not is_wanted or error is not None:
            self._slots.free(pull.slot.slot_id)
        if is_wanted and error is not None:
            pull.future.set_exception(error)
        elif is_wanted:
            seconds = self._clock.now() - pull.started_s
            buffer = self._slots.payload(pull.slot)
            pull.future.set_result(LandedFeature(pull.slot.slot_id, buffer, pull.ticket, seconds))

    def _bury(self, source: str) -> None:
        for pull in self._pulls:
            if pull.ticket.source == source and not pull.is_given_up:
                self._give_up(pull, f"{source} has left the cluster")
        self._dead.add(source)

    def _disconnect_dead(self) -> None:
        """Disconnects from dead sources, but not before their last transfer has ended (see `Reader.disconnect`)."""
        if not self._dead:
            return
        busy = {pull.ticket.source for pull in self._pulls}
        for source in self._dead - busy:
            self._reader.disconnect(source)
        self._dead &= busy

    def _shut_down(self) -> None:
        with self._lock:
            self._is_closed = True
        self._pulls += [command for command in self._commands if isinstance(command, _Pull)]
        self._commands.clear()
        self._reader.close()
        for pull in self._pulls:
            self._end(pull, TransferFailed("the sink was closed"))
        self._pulls.clear()

"""Implements the sink's side of every channel: it reserves a slot, reads, checks the generation, and hands the
feature over or quarantines the slot.

Transports differ only in one collaborator, the `Reader`; this module alone handles slots, time-outs and dead peers. One
thread begins and watches all reads of a sink, so no other code ever waits for a peer. A reader that blocks (because it
connects to a peer that does not answer) delays the sink's other pulls; NIXL over UCX was not seen to do so.

A pull is a sequence of *legs*, one after the other: perhaps probes (`routes`), then the payload, then the generation
word. A leg is one read of the reader. On the staged route it goes to pinned host memory, and a copy to the device's
slot follows; both belong to the leg, so a feature that has landed is complete. A pull waits before a leg that can't
begin yet, because its link is being measured or because the staging memory is full. The module knows nothing of what a
feature means.
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
    ArenaFull,
    Clock,
    FeatureTicket,
    LeaseLost,
    ProtocolError,
    TransferError,
    TransferFailed,
    UnitTooLarge,
    WeftError,
    feature_nbytes,
)
from fabric.transport.arena import ArenaUsage, Slot
from fabric.transport.feature_channel import WORD_BYTES, LandedFeature, SlotMemory, host_bytes
from fabric.transport.routes import LinkKey, LinkRoutes, Probe, Route
from fabric.transport.transfer_memory import CopyEvent, MemoryPlace

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

    def post(self, ticket: FeatureTicket, source: MemoryPlace, target: MemoryPlace) -> Any:
        """Begins to read a range of the source's memory into one of the same size in the sink's memory, and connects
        first if necessary. Returns a handle. Raises TransferFailed if the read cannot begin."""
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


class _Leg(enum.Enum):
    """Says what the pull reads in the leg under way, or in the one that it waits to begin."""

    PROBE = enum.auto()
    PAYLOAD = enum.auto()
    WORD = enum.auto()


@dataclass(slots=True, eq=False)
class _Pull:
    ticket: FeatureTicket
    slot: Slot
    future: Future[LandedFeature]
    started_s: float
    deadline_s: float
    leg: _Leg = _Leg.PAYLOAD
    probes: deque[Probe] | None = None
    """Holds the probes that are left, the one of the present leg first; it is None until the first leg may begin."""
    read: Any = None
    """Holds the reader's handle of the present leg, until the read has ended."""
    copy: CopyEvent | None = None
    """Says when the bytes of the present leg, which were read, are on the device."""
    staged: Slot | None = None
    """Holds the room of the present leg in the staging memory."""
    leg_began_s: float = 0.0
    payload_s: float = 0.0
    """Holds how long the payload's leg took."""
    is_staged: bool = False
    """Says whether the payload took the staged route."""
    is_given_up: bool = False
    """The future has ended and the slot is in quarantine; the sink only waits for the end of the transfer."""

    @property
    def link(self) -> LinkKey:
        return LinkKey(self.ticket.source, self.ticket.memory_kind)

    @property
    def is_under_way(self) -> bool:
        """Returns whether bytes may still be written for this pull."""
        return self.read is not None or self.copy is not None


class PullingSink:
    """Implements `fabric.transport.feature_channel.FeatureSink` over a reader. A pulled slot takes 64 bytes more than
    its payload."""

    def __init__(
        self, name: str, slots: SlotMemory, reader: Reader, clock: Clock, staging: SlotMemory | None = None
    ) -> None:
        """Starts the transfer thread. `staging` is pinned host memory of which the reader knows; with it, slots on a
        device can also be reached over the host."""
        self._slots = slots
        self._reader = reader
        self._clock = clock
        self._staging = staging if slots.is_on_device else None
        self._routes = LinkRoutes(has_staging=self._staging is not None)
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
            self._slots.backing.enter_thread()
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
        short and doubles while no leg ends. It stays short during a measurement, which a pause would lengthen."""
        if not self._pulls:
            return None
        if any(pull.leg is _Leg.PROBE and pull.is_under_way and not pull.is_given_up for pull in self._pulls):
            return _SHORTEST_PAUSE_S
        longest_s = _QUARANTINE_PAUSE_S if all(pull.is_given_up for pull in self._pulls) else _LONGEST_PAUSE_S
        return min(longest_s, _SHORTEST_PAUSE_S * 2.0 ** min(self._num_idle_rounds, 12))

    def _obey(self, command: _Pull | str) -> None:
        self._num_idle_rounds = 0
        if isinstance(command, str):
            self._bury(command)
            return
        self._dead.discard(command.ticket.source)
        if not self._begin(command):
            self._pulls.append(command)

    def _advance(self, pull: _Pull) -> bool:
        """Checks what is under way for a pull and does what is next. Returns True when the pull has ended."""
        if pull.is_under_way:
            state = self._look(pull)
            if state is ReadState.PENDING:
                self._check_deadline(pull)
                return False
            if state is ReadState.FAILED and pull.leg is not _Leg.PROBE:
                return self._end(pull, TransferFailed(f"the read from {pull.ticket.source} failed"))
            self._num_idle_rounds = 0
            self._leg_ended(pull, is_failed=state is ReadState.FAILED)
            if pull.leg is _Leg.WORD:
                return self._end(pull, self._check_generation(pull))
            if pull.leg is _Leg.PAYLOAD:
                pull.leg = _Leg.WORD
        if pull.is_given_up:
            return self._end(pull, None)
        if self._begin(pull):
            return True
        if pull.is_under_way:
            return self._advance(pull)
        self._check_deadline(pull)
        return False

    def _begin(self, pull: _Pull) -> bool:
        """Begins the next leg of a pull, or leaves the pull waiting if the leg can't begin now. Returns True if the
        pull has ended, because it was cancelled or the leg is impossible."""
        if pull.future.cancelled():
            return self._end(pull, None)
        if pull.probes is None:
            probes = self._routes.begin(pull.link, pull.ticket.nbytes)
            if probes is None:
                return False
            pull.probes = deque(probes)
        if pull.probes:
            pull.leg = _Leg.PROBE
        elif pull.leg is _Leg.PROBE:
            self._routes.end_measurement(pull.link)
            self._tell_measured(pull.link)
            pull.leg = _Leg.PAYLOAD
        try:
            return self._post(pull)
        except ArenaFull:
            return False
        except TransferError as error:
            if pull.leg is not _Leg.PROBE:
                return self._end(pull, error)
            self._leg_ended(pull, is_failed=True)
            return self._begin(pull)

    def _post(self, pull: _Pull) -> bool:
        """Posts the read of the present leg, and returns False. Raises TransferFailed if that is impossible, and
        ArenaFull if the staging memory has no room now."""
        ticket = pull.ticket
        if pull.leg is _Leg.WORD:
            source = MemoryPlace("DRAM", ticket.generation_address, WORD_BYTES)
            target = self._slots.word_place(pull.slot)
        else:
            probe = pull.probes[0] if pull.probes else None
            nbytes = ticket.nbytes if probe is None else probe.nbytes
            source = MemoryPlace(ticket.memory_kind, ticket.address, nbytes, ticket.device_id)
            target = self._slots.payload_place(pull.slot)._replace(nbytes=nbytes)
            if (self._routes.route(pull.link) if probe is None else probe.route) is Route.STAGED:
                target = self._stage(pull, nbytes) or target
            pull.is_staged = pull.staged is not None
        pull.leg_began_s = self._clock.now()
        try:
            pull.read = self._reader.post(ticket, source, target)
        except TransferError:
            self._unstage(pull)
            raise
        return False

    def _stage(self, pull: _Pull, nbytes: int) -> MemoryPlace | None:
        """Reserves room in the staging memory; returns None if that is too small for the bytes, which then go directly
        to the device. Raises ArenaFull if there is no room now."""
        assert self._staging is not None, "only a sink with staging memory has a staged route"
        try:
            pull.staged = self._staging.reserve(nbytes)
        except UnitTooLarge:
            return None
        return self._staging.payload_place(pull.staged)

    def _unstage(self, pull: _Pull) -> None:
        if pull.staged is not None and self._staging is not None:
            self._staging.free(pull.staged.slot_id)
        pull.staged = None

    def _look(self, pull: _Pull) -> ReadState:
        """Returns the state of the leg under way. Where a staged read has ended, it begins the copy to the device."""
        if pull.read is not None:
            state = self._reader.state(pull.read)
            if state is ReadState.PENDING:
                return state
            self._reader.release(pull.read)
            pull.read = None
            if state is ReadState.FAILED or pull.staged is None or pull.is_given_up:
                return state
            assert self._staging is not None
            payload = host_bytes(self._staging.payload(pull.staged))
            offset = self._slots.payload_place(pull.slot).address - self._slots.address
            pull.copy = self._slots.backing.write(offset, payload)
        if pull.copy is not None:
            try:
                is_done = pull.copy.is_done()
            except TransferError as error:
                _LOG.warning("a feature can't be copied to the device: %s", error)
                pull.copy = None
                return ReadState.FAILED
            if not is_done:
                return ReadState.PENDING
            pull.copy = None
        return ReadState.DONE

    def _leg_ended(self, pull: _Pull, *, is_failed: bool) -> None:
        """Notes how long a leg took, and gives back what it had in the staging memory."""
        seconds = self._clock.now() - pull.leg_began_s
        self._unstage(pull)
        if pull.leg is _Leg.PAYLOAD:
            pull.payload_s = seconds
        elif pull.leg is _Leg.PROBE and pull.probes:
            probe = pull.probes.popleft()
            if is_failed:
                self._routes.note_failure(pull.link, probe.route)
            else:
                self._routes.note(pull.link, probe, seconds)

    def _tell_measured(self, link: LinkKey) -> None:
        rates = [f"{route.name.lower()} {rate / 1e9:.2f} GB/s" for route, rate in self._routes.rates(link).items()]
        taken = self._routes.route(link).name.lower()
        text = f"reads of {link.kind} memory of {link.source}: {', '.join(rates)}; taken: {taken}"
        if link.kind == "VRAM" and self._routes.is_slow(link):
            _LOG.warning("%s; both are slow, so features in the host's memory of the source may come faster", text)
        else:
            _LOG.info("%s", text)

    def _check_deadline(self, pull: _Pull) -> None:
        if not pull.is_given_up and self._clock.now() >= pull.deadline_s:
            waited_s = self._clock.now() - pull.started_s
            self._give_up(pull, f"{pull.ticket.source} did not deliver the feature within {waited_s:.1f} s")

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

    def _end(self, pull: _Pull, error: WeftError | None) -> bool:
        """Ends a pull whose transfer has ended: the slot belongs to the consumer or is freed. Returns True."""
        self._unstage(pull)
        if pull.leg is _Leg.PROBE:
            self._routes.end_measurement(pull.link)
        if pull.is_given_up:
            self._slots.release_quarantine(pull.slot.slot_id)
            return True
        is_wanted = pull.future.set_running_or_notify_cancel()
        if not is_wanted or error is not None:
            self._slots.free(pull.slot.slot_id)
        if is_wanted and error is not None:
            pull.future.set_exception(error)
        elif is_wanted:
            seconds = self._clock.now() - pull.started_s
            view = self._slots.payload(pull.slot)
            landed = LandedFeature(
                pull.slot.slot_id, view, pull.ticket, seconds, pull.payload_s, is_staged=pull.is_staged
            )
            pull.future.set_result(landed)
        return True

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
            self._routes.forget(source)
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

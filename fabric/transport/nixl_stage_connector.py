"""Implements the stage connector between hosts: the owner of an inbox reads the data out of the sender's memory.

`put` copies the data into a slot of the sender's arena and sends the owner a notice, a NIXL notification that says
where the slot lies. `get` reads the slot, with the sink of the feature channel, and answers with a notice that the slot
is free. So both directions use what the feature channel proves: the generation of a slot, the quarantine of a read that
does not end, and dead peers. A slot whose reader never answers is freed after `lease_s`; a reader that comes later
finds another generation, and its `get` raises TransferFailed.

The address of an inbox contains the metadata with which NIXL connects to it (about a kilobyte). Notices wait in the
receiver's agent until its thread asks for them: every millisecond while a caller waits or slots are out, and every
20 ms otherwise. This module knows nothing of what the data means.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import msgspec

from fabric.contracts import FeatureTicket, TransferError, TransferFailed
from fabric.transport.feature_channel import SourceSlot
from fabric.transport.nixl_channel import NixlFeatureSink, NixlFeatureSource
from fabric.transport.stage_connector import MAX_UNREAD, InboxEntry, check_own, new_inbox

_LOG = logging.getLogger(__name__)
ARENA_BYTES = 64 << 20
"""Is the default size of the memory for data that was put and not read yet, and of that into which data is read."""
LEASE_S = 60.0
READ_TIMEOUT_S = 10.0
"""Limits how long one read of `get` may take once the data was announced."""
_SEND_TIMEOUT_S = 5.0
_WORD_BYTES = 4
_LAYOUT = "float32"
"""Is the dtype that tickets name; slots are whole numbers of its values, and `nbytes` says how many bytes count."""


class SlotPut(msgspec.Struct, frozen=True, tag=True):
    """A `SlotPut` announces data in a slot of its sender."""

    number: int
    """Names the slot in the sender's `SlotFreed`."""
    from_stage: int
    key: str
    nbytes: int
    ticket: FeatureTicket


class SlotFreed(msgspec.Struct, frozen=True, tag=True):
    """A `SlotFreed` tells the sender of a slot that it was read, or that nobody will read it."""

    number: int


_DECODER: msgspec.msgpack.Decoder[SlotPut | SlotFreed] = msgspec.msgpack.Decoder(SlotPut | SlotFreed)


class _Out(NamedTuple):
    slot: SourceSlot
    until_s: float


class _Notice(NamedTuple):
    peer: str
    metadata: bytes
    body: bytes
    sent: Future[None]


class _NoticeSource(NixlFeatureSource):
    """A `_NoticeSource` is a feature source whose thread also sends and receives notices, because one thread alone uses
    an agent."""

    def __init__(self, name: str, total_bytes: int, owner: NixlStageConnector) -> None:
        self._owner = owner
        self._outbox: deque[_Notice] = deque()
        self._peer_to_metadata: dict[str, bytes] = {}
        self.num_waiting = 0
        """Counts the callers that wait for notices."""
        super().__init__(name, total_bytes)

    def notify(self, peer: str, metadata: bytes, body: bytes) -> Future[None]:
        """Sends a notice from the agent's thread. The future ends when NIXL has taken it, or with TransferFailed."""
        notice = _Notice(peer, metadata, body, Future())
        self._outbox.append(notice)
        self._wake.set()
        return notice.sent

    def hurry(self) -> None:
        self._wake.set()

    def _is_busy(self) -> bool:
        return self.num_waiting > 0 or super()._is_busy()

    def _turn(self) -> None:
        while self._outbox:
            self._send(self._outbox.popleft())
        for bodies in self._agent.nixl.get_new_notifs().values():
            for body in bodies:
                self._owner._receive(body)
        self._owner._free_expired()

    def _send(self, notice: _Notice) -> None:
        if notice.peer == self.name:  # NIXL does not notify the agent itself.
            notice.sent.set_result(None)
            self._owner._receive(notice.body)
            return
        try:
            self._connect(notice)
            self._agent.nixl.send_notif(notice.peer, notice.body)
        except self._agent.errors as error:
            self._disconnect(notice.peer)
            notice.sent.set_exception(TransferFailed(f"NIXL can't notify {notice.peer}: {error}"))
        else:
            notice.sent.set_result(None)

    def _connect(self, notice: _Notice) -> None:
        if self._peer_to_metadata.get(notice.peer, notice.metadata) != notice.metadata:
            self._disconnect(notice.peer)
        if notice.peer not in self._peer_to_metadata:
            self._agent.nixl.add_remote_agent(notice.metadata)
            self._peer_to_metadata[notice.peer] = notice.metadata

    def _disconnect(self, peer: str) -> None:
        if self._peer_to_metadata.pop(peer, None) is not None:
            try:
                self._agent.nixl.remove_remote_agent(peer)
            except self._agent.errors as error:
                _LOG.warning("NIXL can't remove the connection to %s: %s", peer, error)


class NixlStageConnector:
    """Implements `fabric.transport.stage_connector.StageConnector` over NIXL, from DRAM to DRAM."""

    def __init__(self, arena_bytes: int = ARENA_BYTES, lease_s: float = LEASE_S) -> None:
        """Starts two agents, which takes about a second. Raises ConfigError if NIXL is missing or can't start."""
        self._lease_s = lease_s
        self._changed = threading.Condition()
        self._entries: dict[InboxEntry, SlotPut] = {}
        self._fresh: dict[InboxEntry, None] = {}
        self._numbers = itertools.count()
        self._out: dict[int, _Out] = {}
        """Holds the slots that were announced and not read yet, the oldest first."""
        self._is_woken = self._is_closed = False
        name = f"stage-{new_inbox()}"
        self._sink = NixlFeatureSink(f"{name}-sink", arena_bytes)
        self._source = _NoticeSource(name, arena_bytes, self)
        self._inbox = f"{name}:{base64.b64encode(self._source.metadata).decode()}"

    @property
    def inbox(self) -> str:
        return self._inbox

    # ------------------------------------------------------------ send

    def put(self, from_stage: int, to_stage: str, key: str, data: bytes) -> None:
        peer, _, encoded = to_stage.partition(":")
        try:
            metadata = base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise TransferFailed(f"{to_stage[:40]!r} is not the address of an inbox of NIXL") from error
        if self._is_closed:
            raise TransferFailed("the stage connector is closed")
        num_words = max(-(-len(data) // _WORD_BYTES), 1)
        slot = self._source.allocate(num_words * _WORD_BYTES)
        slot.buffer[: len(data)] = memoryview(data)
        ticket = self._source.ticket(slot, (1, 1, num_words), _LAYOUT, self._lease_s)
        with self._changed:
            number = next(self._numbers)
            self._out[number] = _Out(slot, time.monotonic() + self._lease_s)
        notice = SlotPut(number, from_stage, key, len(data), ticket)
        try:
            self._source.notify(peer, metadata, msgspec.msgpack.encode(notice)).result(_SEND_TIMEOUT_S)
        except (TransferFailed, TimeoutError) as error:
            self._free(number)
            raise TransferFailed(f"the inbox {peer} can't be reached: {error}") from error

    def _free(self, number: int) -> None:
        with self._changed:
            out = self._out.pop(number, None)
        if out is not None:
            self._source.free(out.slot)

    def _free_expired(self) -> None:
        now_s = time.monotonic()
        while (oldest := next(iter(self._out.items()), None)) is not None and oldest[1].until_s <= now_s:
            _LOG.warning("nobody has read the data of slot %d within %.0f s", oldest[0], self._lease_s)
            self._free(oldest[0])

    # ------------------------------------------------------------ receive

    def get(self, from_stage: int, to_stage: str, key: str, timeout: float) -> bytes | None:
        check_own(self, to_stage)
        entry = InboxEntry(from_stage, key)
        with self._changed:
            self._await(lambda: entry in self._entries, timeout)
            put = self._entries.pop(entry, None)
            self._fresh.pop(entry, None)
        if put is None:
            return None
        try:
            landed = self._sink.pull(put.ticket, READ_TIMEOUT_S).result()
        except TransferError as error:
            self._answer(put)
            raise TransferFailed(f"the data of {key} can't be read any more: {error}") from error
        data = landed.buffer[: put.nbytes].tobytes()
        self._sink.free(landed.slot_id)
        self._answer(put)
        return data

    def arrivals(self, timeout: float) -> list[InboxEntry]:
        with self._changed:
            self._await(lambda: bool(self._fresh) or self._is_woken, timeout)
            self._is_woken = False
            fresh, self._fresh = list(self._fresh), {}
            return fresh

    def wake(self) -> None:
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def discard(self, prefix: str) -> int:
        with self._changed:
            dropped = [entry for entry in self._entries if entry.key.startswith(prefix)]
            puts = [self._entries.pop(entry) for entry in dropped]
            for entry in dropped:
                self._fresh.pop(entry, None)
        for put in puts:
            self._answer(put)
        return len(puts)

    def _await(self, is_there: Callable[[], bool], timeout: float) -> None:
        """Waits for a change, with the lock held. The agent's thread asks for notices more often meanwhile."""
        if timeout <= 0 or is_there():
            return
        self._source.num_waiting += 1
        self._source.hurry()
        try:
            self._changed.wait_for(lambda: is_there() or self._is_closed, timeout)
        finally:
            self._source.num_waiting -= 1

    def _answer(self, put: SlotPut) -> None:
        """Tells the sender that its slot is free. If the answer is lost, the slot's lease ends."""
        ticket, body = put.ticket, msgspec.msgpack.encode(SlotFreed(put.number))
        self._source.notify(ticket.source, ticket.metadata, body)

    def _receive(self, body: bytes) -> None:
        """Takes a notice, in the agent's thread."""
        try:
            notice = _DECODER.decode(body)
        except msgspec.MsgspecError:
            _LOG.warning("a stage connector ignores a notice that it can't read")
            return
        if isinstance(notice, SlotFreed):
            self._free(notice.number)
            return
        entry = InboxEntry(notice.from_stage, notice.key)
        with self._changed:
            is_taken = not self._is_closed and (len(self._entries) < MAX_UNREAD or entry in self._entries)
            replaced = self._entries.get(entry) if is_taken else notice
            if is_taken:
                self._entries[entry] = notice
                self._fresh[entry] = None
                self._changed.notify_all()
        if replaced is not None:
            self._answer(replaced)

    # ------------------------------------------------------------ end

    @property
    def is_alive(self) -> bool:
        return not self._is_closed and self._source.is_alive and self._sink.is_alive

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            puts = list(self._entries.values())
            self._entries.clear()
            self._fresh.clear()
            self._changed.notify_all()
        for put in puts:
            self._answer(put)
        self._source.close()
        self._sink.close()

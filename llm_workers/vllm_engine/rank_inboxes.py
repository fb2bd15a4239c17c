"""Pulls each feature into an inbox of every rank of a vLLM worker.

vLLM runs its ranks in processes of their own, and each rank that embeds prompts needs the feature on its own device. So
each of these ranks has a sink (`fabric.transport.FeatureSink`) of its own, whose transfer thread pulls straight into
the memory that the rank reads. `RankedSink` is the sink that the worker's receiver knows: it decides by its own book
whether there is room, tells all ranks to pull, and has landed a feature when every rank has it.

    receiver -> RankedSink --(socket in a private folder)--> RankInbox (one in each rank) -> sink

The encoder sees one lease: the receiver releases the unit when the last rank has it. A rank whose sink is full because
a frozen peer still owns some of its memory fails the pull, and the receiver asks for the unit again.

This module knows nothing of vLLM.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import zmq

from fabric.contracts import (
    FeatureTicket,
    LeaseLost,
    ProtocolError,
    TransferFailed,
    WeftError,
    feature_nbytes,
)
from fabric.transport import ALIGNMENT_BYTES, HEADER_BYTES, Arena, ArenaUsage, FeatureSink, LandedFeature

_ELSEWHERE = np.empty(0, dtype=np.uint8)
"""Stands for the bytes of a feature that lie in the memory of the ranks."""

# ---------------------------------------------------------------- what goes over the socket


class RankHello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank sends this first, when its inbox is ready."""

    rank: int


class PullUnit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks a rank to pull a feature, which is called `slot_id` from then on."""

    slot_id: int
    ticket: FeatureTicket
    timeout_s: float


class UnitPulled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank has the feature, or has failed to pull it."""

    slot_id: int
    is_lease_lost: bool = False
    failure: str = ""


class FreeSlot(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tells a rank that nobody needs the feature any more."""

    slot_id: int


class SourceDead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tells a rank that a source has left."""

    source: str


RankMessage = RankHello | PullUnit | UnitPulled | FreeSlot | SourceDead
_DECODER: msgspec.msgpack.Decoder[RankMessage] = msgspec.msgpack.Decoder(RankMessage)


class MessageLoop:
    """Owns a socket in a thread, which hands over what arrives. `send` may be called in any thread."""

    def __init__(self, kind: int, address: str, take: Callable[[bytes, RankMessage], None], *, is_server: bool) -> None:
        """Binds (`is_server`) or connects, and begins to call `take` with the sender's routing id, which is empty for a
        client, and the message. Raises OSError if the address can't be used."""
        self._take, self._is_server = take, is_server
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.linger = 0
        self._queue = self._context.socket(zmq.PULL)
        self._queue.bind("inproc://queue")
        self._entrance = self._context.socket(zmq.PUSH)
        self._entrance.connect("inproc://queue")
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            if is_server:
                self._socket.bind(address)
            else:
                self._socket.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(f"{address} can't be used: {error}") from error
        self._thread = threading.Thread(target=self._run, name="weft-rank-messages", daemon=True)
        self._thread.start()

    def send(self, peer: bytes, message: RankMessage) -> None:
        """Sends a message, to `peer` if this is the server."""
        with self._lock:
            if not self._is_closed:
                self._entrance.send_multipart([peer, msgspec.msgpack.encode(message)])

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread. The call is idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._entrance.send_multipart([b"", b""])
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._queue, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._queue in ready:
                peer, data = self._queue.recv_multipart()
                if not data:
                    break
                with contextlib.suppress(zmq.ZMQError):  # The peer has left.
                    self._socket.send_multipart([peer, data] if self._is_server else [data])
            if self._socket in ready:
                *senders, data = self._socket.recv_multipart()
                self._take(senders[0] if senders else b"", _DECODER.decode(data))
        self._context.destroy(linger=0)


# ---------------------------------------------------------------- in the worker's process


@dataclass(slots=True, eq=False)
class _RankedPull:
    future: Future[LandedFeature]
    ticket: FeatureTicket
    began_s: float
    waiting: set[bytes]
    """Holds the ranks that have not answered."""
    failure: WeftError | None = None


@dataclass(slots=True)
class _Ranks:
    peers: set[bytes] = field(default_factory=set)
    are_there: threading.Event = field(default_factory=threading.Event)


class RankedSink:
    """Implements `FeatureSink` over the inboxes of `num_ranks` ranks. A landed feature has no bytes in this process:
    ranks find them by the slot's id."""

    def __init__(self, total_bytes: int, num_ranks: int) -> None:
        """Opens a socket in a new folder that only this user can enter."""
        self.folder = Path(tempfile.mkdtemp(prefix="weft-ranks-"))
        """Holds sockets, and is there until the ranks are connected."""
        self.address = f"ipc://{self.folder}/ranks"
        self._lock = threading.Lock()
        self._arena = Arena(total_bytes, ALIGNMENT_BYTES, 1)
        self._pulls: dict[int, _RankedPull] = {}
        self._num_ranks, self._ranks = num_ranks, _Ranks()
        self._loop = MessageLoop(zmq.ROUTER, self.address, self._take, is_server=True)

    def wait_for_ranks(self, timeout_s: float) -> bool:
        """Waits until the inbox of every rank is ready, and then removes the folder of the socket, which stays
        connected: so a process that is killed leaves nothing behind. Returns False after `timeout_s`."""
        are_there = self._ranks.are_there.wait(timeout_s)
        shutil.rmtree(self.folder, ignore_errors=True)
        return are_there

    def pull(self, ticket: FeatureTicket, timeout_s: float) -> Future[LandedFeature]:
        """Pulls as the contract says. It also raises ProtocolError for a ticket that contradicts itself, and
        TransferFailed when no inbox is there."""
        try:
            is_consistent = feature_nbytes(ticket.shape, ticket.dtype) == ticket.nbytes
        except ValueError as error:
            raise ProtocolError(f"the ticket of {ticket.source} is invalid: {error}") from error
        if not is_consistent:
            raise ProtocolError(f"the ticket of {ticket.source} is invalid: its shape and its bytes differ")
        with self._lock:
            if not self._loop.is_alive or len(self._ranks.peers) < self._num_ranks:
                raise TransferFailed("the ranks have no inboxes")
            slot = self._arena.allocate(HEADER_BYTES + ticket.nbytes)
            pull = _RankedPull(Future(), ticket, time.monotonic(), set(self._ranks.peers))
            self._pulls[slot.slot_id] = pull
            self._send(PullUnit(slot.slot_id, ticket, timeout_s))
        return pull.future

    def free(self, slot_id: int) -> None:
        with self._lock:
            if self._arena.free(slot_id):
                self._send(FreeSlot(slot_id))

    def peer_dead(self, source: str) -> None:
        with self._lock:
            self._send(SourceDead(source))

    def _send(self, message: RankMessage) -> None:
        """Sends a message to all ranks. The caller holds the lock, so that ranks allocate and free in the order of this
        sink's own book."""
        for peer in self._ranks.peers:
            self._loop.send(peer, message)

    def usage(self) -> ArenaUsage:
        with self._lock:
            return self._arena.usage()

    @property
    def is_alive(self) -> bool:
        return self._loop.is_alive

    def close(self) -> None:
        """Ends open pulls with TransferFailed. The call is idempotent."""
        self._loop.close()
        with self._lock:
            pulls, self._pulls = self._pulls, {}
        for pull in pulls.values():
            if pull.future.set_running_or_notify_cancel():
                pull.future.set_exception(TransferFailed("the sink was closed"))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _take(self, peer: bytes, message: RankMessage) -> None:
        if isinstance(message, RankHello):
            with self._lock:
                self._ranks.peers.add(peer)
                if len(self._ranks.peers) == self._num_ranks:
                    self._ranks.are_there.set()
        elif isinstance(message, UnitPulled):
            self._pulled(peer, message)

    def _pulled(self, peer: bytes, message: UnitPulled) -> None:
        with self._lock:
            pull = self._pulls.get(message.slot_id)
            if pull is None:
                return
            pull.waiting.discard(peer)
            if message.is_lease_lost:
                pull.failure = pull.failure or LeaseLost(message.failure)
            elif message.failure:
                pull.failure = TransferFailed(message.failure)
            if pull.waiting:
                return
            del self._pulls[message.slot_id]
        is_wanted = pull.future.set_running_or_notify_cancel()
        if pull.failure is not None or not is_wanted:
            self.free(message.slot_id)
        if is_wanted and pull.failure is not None:
            pull.future.set_exception(pull.failure)
        elif is_wanted:
            seconds = time.monotonic() - pull.began_s
            pull.future.set_result(LandedFeature(message.slot_id, _ELSEWHERE, pull.ticket, seconds))


# ---------------------------------------------------------------- in the process of a rank


class RankInbox:
    """Holds the features of one rank. Its owner is the rank's half of the connector, which reads features by the ids of
    their slots."""

    def __init__(self, address: str, rank: int, sink: FeatureSink) -> None:
        """Connects to the worker's `RankedSink` at `address`. The inbox owns `sink` from now on."""
        self._sink = sink
        self._lock = threading.Lock()
        self._slot_id_to_feature: dict[int, LandedFeature] = {}
        self._slot_id_to_pull: dict[int, Future[LandedFeature]] = {}
        self._slot_id_to_reads: dict[int, Callable[[], None]] = {}
        self._loop = MessageLoop(zmq.DEALER, address, self._take, is_server=False)
        self._loop.send(b"", RankHello(rank))

    def feature(self, slot_id: int) -> LandedFeature:
        """Returns a feature that has landed."""
        with self._lock:
            return self._slot_id_to_feature[slot_id]

    def note_read(self, slot_id: int, wait: Callable[[], None]) -> None:
        """Notes that a device reads the slot; `wait` blocks until it has done so, and is called before the slot is
        freed."""
        with self._lock:
            self._slot_id_to_reads[slot_id] = wait

    def close(self) -> None:
        self._loop.close()
        self._sink.close()

    def _take(self, _: bytes, message: RankMessage) -> None:
        if isinstance(message, PullUnit):
            self._pull(message)
        elif isinstance(message, FreeSlot):
            self._free(message.slot_id)
        elif isinstance(message, SourceDead):
            self._sink.peer_dead(message.source)

    def _pull(self, message: PullUnit) -> None:
        try:
            pull = self._sink.pull(message.ticket, message.timeout_s)
        except WeftError as error:
            self._loop.send(b"", UnitPulled(message.slot_id, failure=str(error)))
            return
        with self._lock:
            self._slot_id_to_pull[message.slot_id] = pull
        pull.add_done_callback(lambda done: self._pulled(message.slot_id, done))

    def _pulled(self, slot_id: int, done: Future[LandedFeature]) -> None:
        """Takes a pull that has ended, in the transfer thread of the sink or in that which cancelled the pull."""
        error = None if done.cancelled() else done.exception()
        with self._lock:
            self._slot_id_to_pull.pop(slot_id, None)
            if not done.cancelled() and error is None:
                self._slot_id_to_feature[slot_id] = done.result()
        if error is None and not done.cancelled():
            self._loop.send(b"", UnitPulled(slot_id))
        else:
            self._loop.send(b"", UnitPulled(slot_id, isinstance(error, LeaseLost), str(error or "cancelled")))

    def _free(self, slot_id: int) -> None:
        with self._lock:
            feature = self._slot_id_to_feature.pop(slot_id, None)
            wait = self._slot_id_to_reads.pop(slot_id, None)
        if wait is not None:
            wait()
        if feature is not None:
            self._sink.free(feature.slot_id)

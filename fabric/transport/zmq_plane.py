"""Implements the message plane between processes, over ZeroMQ, and the keys that protect it.

A `ZmqPlane` binds one PULL socket and has one PUSH socket for each peer (docs/adr/0056-plane-at-scale.md says why there
is no broker). The PUSH sockets belong to one I/O thread. `send` puts bytes into a queue and wakes the thread at most
once per round, so a burst costs one system call, and small messages that wait for one peer travel as one bundle. The
event loop of the receiver reads the PULL socket itself (docs/adr/0066-arrivals-in-the-event-loop.md). The endpoint
binds to the loopback unless another host is given.

The cluster's `PlaneKeys` authenticate and encrypt every connection by ZeroMQ's CURVE: a peer without them can neither
send nor receive anything.

This module knows nothing of what the messages mean, or of how the keys reach the members.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import zmq
from zmq.utils import z85

from fabric.contracts import ConfigError, PlaneMessage, ProtocolError, decode_bundle, encode_bundle, encode_message
from fabric.transport.message_plane import MESSAGES_PER_TURN, TURN_S, Handler, deliver
from fabric.transport.ports import PortRange, bind_free, join_host_port

_LOG = logging.getLogger(__name__)


# ------------------------------------------------------------ the endpoint

_BUNDLE_MESSAGES, _BUNDLE_BYTES = 64, 1 << 16
"""Limit what travels together; a message that is larger than the second limit travels alone."""
_BACKLOG = 4096
"""This many connections may wait to be accepted: all members of a large cluster connect to a router that starts."""
_READABLE = int(zmq.POLLIN)


class ZmqPlane:
    """A `ZmqPlane` is a `fabric.transport.message_plane.Plane` between processes."""

    def __init__(
        self,
        keys: PlaneKeys,
        bind_host: str = "127.0.0.1",
        ports: PortRange | None = None,
        max_queued_messages: int = 10_000,
        max_message_bytes: int = 256 << 20,
    ) -> None:
        """Binds a free port of `bind_host` (an address that peers can reach), one of `ports` if a range is given, and
        starts the I/O thread. `max_queued_messages` limits the messages that wait for each peer. Messages that have
        arrived and are not handled wait in ZeroMQ's own queues, and further ones in their senders. Raises ConfigError
        when the host cannot be bound, or no port of the range is free."""
        self._max_queued_messages = max_queued_messages
        self._keys = keys
        self._context = zmq.Context()
        # ZeroMQ's default of 1,023 sockets would end the plane of a larger cluster. The context keeps four bytes and a
        # pointer for each socket that it may have.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP_ENDPOINT)
        self._pull = self._context.socket(zmq.PULL)
        keys.secure_receiver(self._pull)
        self._pull.setsockopt(zmq.LINGER, 0)
        self._pull.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._pull.setsockopt(zmq.BACKLOG, _BACKLOG)
        try:
            self._address = bind_free(ports, partial(_bind, self._pull, bind_host))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"the message plane can't bind to {bind_host}: {error}") from error
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._reader: _SocketReader | None = None
        self._lock = threading.Lock()
        self._outgoing: dict[str, deque[bytes]] = {}
        self._to_flush: set[str] = set()
        """Holds the addresses for which messages were queued since the last round; a round must not look at all
        peers."""
        self._unconnected: set[str] = set()
        """Holds the addresses to which no connection could be opened; each is logged once."""
        self._forgotten: list[str] = []
        self._is_awake = False
        self._is_closed = False
        self._num_dropped = 0
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._pushes: dict[str, zmq.Socket[bytes]] = {}
        self._blocked: dict[zmq.Socket[bytes], str] = {}
        """Holds the sockets that accept no more messages at the moment, with their addresses; the poller watches
        them."""
        self._thread = threading.Thread(target=self._run, name=f"plane-{self._address.rpartition(':')[2]}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ any thread

    @property
    def address(self) -> str:
        return self._address

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    @property
    def is_alive(self) -> bool:
        return not self._is_closed and self._thread.is_alive()

    @property
    def num_malformed(self) -> int:
        """Counts the arrivals that were not messages; they are logged and dropped."""
        return 0 if self._reader is None else self._reader.num_malformed

    def start(self, handler: Handler) -> None:
        with self._lock:
            if self._reader is not None:
                raise RuntimeError("delivery has already begun")
            if not self._is_closed:
                self._reader = _SocketReader(self._pull, self._address, handler)

    def send(self, address: str, message: PlaneMessage) -> bool:
        data = encode_message(message)
        with self._lock:
            queue = self._outgoing.setdefault(address, deque())
            if self._is_closed or len(queue) >= self._max_queued_messages:
                self._num_dropped += 1
                return False
            queue.append(data)
            self._to_flush.add(address)
            self._wake_locked()
        return True

    def forget(self, address: str) -> None:
        with self._lock:
            self._outgoing.pop(address, None)
            self._forgotten.append(address)
            self._wake_locked()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._wake_locked()
        self._thread.join()

    def _wake_locked(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------ I/O thread

    def _run(self) -> None:
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._poller.register(self._zap, zmq.POLLIN)
        try:
            while not self._is_closed:
                ready = {socket for socket, _ in self._poller.poll()}
                if self._wake_fd in ready:
                    self._sleep_again()
                if self._zap in ready:
                    self._authenticate()
                self._close_forgotten()
                with self._lock:
                    addresses, self._to_flush = self._to_flush, set()
                addresses |= {address for push, address in self._blocked.items() if push in ready}
                for address in addresses:
                    self._flush(address)
        except Exception:  # This is the loop of the I/O thread; the code below closes the endpoint.
            _LOG.exception("the I/O thread of the endpoint %s failed, and the endpoint is closed", self._address)
        finally:
            self._shut_down()

    def _sleep_again(self) -> None:
        with self._lock:
            os.eventfd_read(self._wake_fd)
            self._is_awake = False

    def _authenticate(self) -> None:
        """Answers libzmq, which asks once for each peer that connects with any key."""
        while True:
            try:
                question = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._zap.send_multipart(self._keys.zap_reply(question))

    def _flush(self, address: str) -> None:
        """Sends what the peer's socket accepts. While messages are left, the poller watches the socket's readiness."""
        queue = self._outgoing.get(address)
        if queue is None:
            return
        push = self._pushes.get(address) or self._connect(address)
        if push is None:
            return
        while queue:
            bundle = _first_bundle(queue)
            try:
                push.send(encode_bundle(bundle), zmq.NOBLOCK)
            except zmq.Again:
                if push not in self._blocked:
                    self._blocked[push] = address
                    self._poller.register(push, zmq.POLLOUT)
                return
            for _ in bundle:
                queue.popleft()
        self._unblock(push)

    def _unblock(self, push: zmq.Socket[bytes]) -> None:
        if self._blocked.pop(push, None) is not None:
            self._poller.unregister(push)

    def _connect(self, address: str) -> zmq.Socket[bytes] | None:
        """Returns a socket that is connected to the peer. Returns None for an invalid address, and if the process may
        open no more files: peers name their own addresses, and one peer too many must not end this thread."""
        push: zmq.Socket[bytes] | None = None
        try:
            push = self._context.socket(zmq.PUSH)
            self._keys.secure_sender(push)
            push.setsockopt(zmq.LINGER, 0)
            push.setsockopt(zmq.IMMEDIATE, 1)  # Messages to an absent peer fill our own queue, which is counted.
            push.setsockopt(zmq.IPV6, int("[" in address))
            push.connect(address)
        except zmq.ZMQError as error:
            if push is not None:
                push.close()
            with self._lock:
                self._num_dropped += len(self._outgoing.pop(address, ()))
            if address not in self._unconnected:
                self._unconnected.add(address)
                _LOG.warning("the endpoint %s can't connect to %r: %s", self._address, address, error)
            return None
        self._unconnected.discard(address)
        self._pushes[address] = push
        return push

    def _close_forgotten(self) -> None:
        with self._lock:
            forgotten, self._forgotten = self._forgotten, []
        for address in forgotten:
            self._unconnected.discard(address)
            push = self._pushes.pop(address, None)
            if push is None:
                continue
            self._unblock(push)
            push.close()

    def _shut_down(self) -> None:
        with self._lock:
            self._is_closed = True
            self._outgoing.clear()
            for push in self._pushes.values():
                push.close()
            self._pushes.clear()
            if self._reader is not None:
                self._reader.close()
            self._pull.close()
            self._zap.close()
            self._context.term()
            self._is_awake = True
            os.close(self._wake_fd)


def _bind(pull: zmq.Socket[bytes], host: str, port: int) -> str:
    """Binds a socket and returns its address; with port 0 the system chooses the port."""
    pull.setsockopt(zmq.IPV6, int(":" in host))
    pull.bind(f"tcp://{join_host_port(host, port)}")
    return pull.getsockopt_string(zmq.LAST_ENDPOINT)


def _first_bundle(queue: deque[bytes]) -> list[bytes]:
    """Returns the first messages of a queue that travel together. Other threads may append to the queue meanwhile."""
    found, num_bytes = [queue[0]], len(queue[0])
    for index in range(1, min(len(queue), _BUNDLE_MESSAGES)):
        num_bytes += len(queue[index])
        if num_bytes > _BUNDLE_BYTES:
            break
        found.append(queue[index])
    return found


class _SocketReader:
    """A `_SocketReader` receives from a PULL socket in the event loop that handles the messages. A thread in between
    would have to wake for each arrival, and would then wake the loop.

    ZeroMQ's file descriptor becomes readable only when something arrives at a socket that was found empty. So a turn
    goes on until the socket is empty, or asks the loop for a further turn."""

    def __init__(self, socket: zmq.Socket[bytes], address: str, handler: Handler) -> None:
        """Begins delivery in the running loop."""
        self.num_malformed = 0
        self._socket, self._address, self._handler = socket, address, handler
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        """Keeps the socket from being closed while the loop receives from it."""
        self._arrived: deque[PlaneMessage] = deque()
        self._is_turn_due = False
        self._is_closed = False
        # The loop watches a copy of the file descriptor, which stays valid when ZeroMQ closes its own.
        self._fd = os.dup(socket.fileno())
        contextvars.Context().run(self._begin)  # What belongs to the caller's task must not be seen by the handler.

    def _begin(self) -> None:
        self._loop.add_reader(self._fd, self._wake)
        self._ask_for_turn()

    def _ask_for_turn(self) -> None:
        self._is_turn_due = True
        self._loop.call_soon(self._take_turn)

    def _wake(self) -> None:
        if not self._is_turn_due:
            self._take_turn()

    def _take_turn(self) -> None:
        """Delivers the messages of one turn."""
        self._is_turn_due = False
        end_s = time.perf_counter() + TURN_S
        for _ in range(MESSAGES_PER_TURN):
            if not self._arrived and not self._receive():
                return
            if self._is_closed:
                return
            if self._arrived:
                deliver(self._handler, self._arrived.popleft())
            if time.perf_counter() >= end_s:
                break
        self._ask_for_turn()

    def _receive(self) -> bool:
        """Receives what has travelled together. Returns False if nothing has arrived."""
        with self._lock:
            if self._is_closed:
                return False
            # To ask costs a fifth of the exception that `recv` raises without an arrival.
            if not int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
                return False
            data = self._socket.recv(zmq.NOBLOCK)
        try:
            self._arrived.extend(decode_bundle(data))
        except ProtocolError as error:
            self.num_malformed += 1
            _LOG.warning("the endpoint %s dropped an arrival of %d bytes: %s", self._address, len(data), error)
        return True

    def close(self) -> None:
        """Ends delivery; the socket may be closed after that. The caller's thread is not that of a running loop."""
        with self._lock:
            self._is_closed = True
        if not self._loop.is_running():
            self._stop_watching()
            return
        with contextlib.suppress(RuntimeError):  # The loop was closed since, and its watches with it.
            self._loop.call_soon_threadsafe(self._stop_watching)

    def _stop_watching(self) -> None:
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        os.close(self._fd)


# ------------------------------------------------------------ the keys

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
"""At this endpoint libzmq asks whether a peer may connect (rfc.zeromq.org/spec/27)."""
_ZAP_DOMAIN = b"weft"


@dataclass(frozen=True, slots=True)
class PlaneKeys:
    """Holds the keys by which the members of one cluster identify each other, as Z85 text.

    All members share one key pair for the receiving end and one for the sending end, made once per cluster. A sender
    encrypts for the receivers' public key, so it cannot talk to a peer that lacks their secret key. A receiver accepts
    connections only from the senders' public key. The secret halves do not appear in the object's representation,
    and so in no line of a log.
    """

    receiver_public: bytes
    receiver_secret: bytes = field(repr=False)
    sender_public: bytes
    sender_secret: bytes = field(repr=False)

    @staticmethod
    def make() -> PlaneKeys:
        """Makes new keys from the system's random numbers."""
        receiver_public, receiver_secret = zmq.curve_keypair()
        sender_public, sender_secret = zmq.curve_keypair()
        return PlaneKeys(receiver_public, receiver_secret, sender_public, sender_secret)

    def secure_receiver(self, socket: zmq.Socket[Any]) -> None:
        """Secures a receiving socket; the caller must call it before the socket binds. The socket's context needs a
        socket at `ZAP_ENDPOINT` that answers with `zap_reply`."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.receiver_secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # If that socket is missing, libzmq refuses every peer.

    def secure_sender(self, socket: zmq.Socket[Any]) -> None:
        """Secures a sending socket; the caller must call it before the socket connects."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.receiver_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.sender_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.sender_secret)

    def zap_reply(self, request: Sequence[bytes]) -> list[bytes]:
        """Returns the answer to libzmq's question about a peer. Only the key of the cluster's own senders is
        accepted."""
        version, number, domain, _address, _identity, mechanism, *credentials = request
        is_member = (domain, mechanism, credentials) == (_ZAP_DOMAIN, b"CURVE", [z85.decode(self.sender_public)])
        status = (b"200", b"OK") if is_member else (b"400", b"no member of this cluster")
        return [version, number, *status, b"", b""]

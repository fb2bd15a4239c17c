"""Implements the message plane between processes, over ZeroMQ, and the keys that protect it.

A `ZmqPlane` binds one PULL socket and has one PUSH socket for each peer (docs/adr/0056-plane-at-scale.md says why there
is no broker). All sockets belong to one I/O thread. `send` puts bytes into a queue and wakes the thread at most once
per round, so a burst costs one system call. The endpoint binds to the loopback unless another host is given.

The cluster's `PlaneKeys` authenticate and encrypt every connection by ZeroMQ's CURVE: a peer without them can neither
send nor receive anything.

This module knows nothing of what the messages mean, or of how the keys reach the members.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from fabric.contracts import ConfigError, PlaneMessage, ProtocolError, decode_message, encode_message
from fabric.transport.message_plane import Handler, Mailbox

_LOG = logging.getLogger(__name__)


# ------------------------------------------------------------ the endpoint

_RECEIVED_PER_ROUND = 256
"""Limits what one round receives, so that a flood of arrivals does not keep the I/O thread from sending."""
_BACKLOG = 4096
"""This many connections may wait to be accepted: all members of a large cluster connect to a router that starts."""


class ZmqPlane:
    """A `ZmqPlane` is a `fabric.transport.message_plane.Plane` between processes."""

    def __init__(
        self,
        keys: PlaneKeys,
        bind_host: str = "127.0.0.1",
        max_queued_messages: int = 10_000,
        max_message_bytes: int = 256 << 20,
    ) -> None:
        """Binds a free port of `bind_host` (an address that peers can reach) and starts the I/O thread.
        `max_queued_messages` applies to each peer, and again to the messages that have arrived and are not handled;
        further messages wait in the sender. Raises ConfigError when the host cannot be bound."""
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
            port = self._pull.bind_to_random_port(f"tcp://{bind_host}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"the message plane can't bind to {bind_host}: {error}") from error
        self._address = f"tcp://{bind_host}:{port}"
        self._mailbox = Mailbox(max_queued_messages, on_room=self._wake)
        self._lock = threading.Lock()
        self._outgoing: dict[str, deque[bytes]] = {}
        self._to_flush: set[str] = set()
        """Holds the addresses for which messages were queued since the last round; a round must not look at all
        peers."""
        self._unconnected: set[str] = set()
        """Holds the addresses to which no connection could be opened; each is logged once."""
        self._forgotten: list[str] = []
        self._is_awake = False
        self._is_started = False
        self._is_closed = False
        self._num_dropped = 0
        self._num_malformed = 0
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._pushes: dict[str, zmq.Socket[bytes]] = {}
        self._blocked: dict[zmq.Socket[bytes], str] = {}
        """Holds the sockets that accept no more messages at the moment, with their addresses; the poller watches
        them."""
        self._thread = threading.Thread(target=self._run, name=f"plane-{port}", daemon=True)
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
        return self._num_malformed

    def start(self, handler: Handler) -> None:
        self._mailbox.open(handler)
        self._is_started = True
        self._wake()

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
        self._mailbox.close()
        self._thread.join()

    def _wake(self) -> None:
        with self._lock:
            self._wake_locked()

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
                self._watch_arrivals()
                ready = {socket for socket, _ in self._poller.poll()}
                if self._wake_fd in ready:
                    self._sleep_again()
                self._authenticate()
                self._close_forgotten()
                self._receive()
                with self._lock:
                    addresses, self._to_flush = self._to_flush, set()
                addresses |= {address for push, address in self._blocked.items() if push in ready}
                for address in addresses:
                    self._flush(address)
        except Exception:  # This is the loop of the I/O thread; the code below closes the endpoint.
            _LOG.exception("the I/O thread of the endpoint %s failed, and the endpoint is closed", self._address)
        finally:
            self._shut_down()

    def _watch_arrivals(self) -> None:
        """Reads only what the mailbox has room for. The rest waits in the senders, which notice it by their own full
        queues."""
        is_wanted = self._is_started and not self._mailbox.is_full()
        if is_wanted and self._pull not in self._poller:
            self._poller.register(self._pull, zmq.POLLIN)
        elif not is_wanted and self._pull in self._poller:
            self._poller.unregister(self._pull)

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

    def _receive(self) -> None:
        if not self._is_started:
            return
        arrived: list[PlaneMessage] = []
        for _ in range(min(_RECEIVED_PER_ROUND, self._mailbox.num_free())):
            try:
                data = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                arrived.append(decode_message(data))
            except ProtocolError as error:
                self._num_malformed += 1
                _LOG.warning("the endpoint %s dropped an arrival of %d bytes: %s", self._address, len(data), error)
        self._mailbox.put_all(arrived)

    def _flush(self, address: str) -> None:
        """Sends what the peer's socket accepts. While messages are left, the poller watches the socket's readiness."""
        queue = self._outgoing.get(address)
        if queue is None:
            return
        push = self._pushes.get(address) or self._connect(address)
        if push is None:
            return
        while queue:
            try:
                push.send(queue[0], zmq.NOBLOCK)
            except zmq.Again:
                if push not in self._blocked:
                    self._blocked[push] = address
                    self._poller.register(push, zmq.POLLOUT)
                return
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
            self._pull.close()
            self._zap.close()
            self._context.term()
            self._is_awake = True
            os.close(self._wake_fd)


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

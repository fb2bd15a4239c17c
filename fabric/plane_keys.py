"""Holds the keys by which the members of one cluster identify each other on the message plane: those of
ZeroMQ's CURVE.

All members share one key pair for the receiving end and one for the sending end, made once per cluster. A sender
encrypts for the receivers' public key, so it cannot talk to a peer that lacks their secret key. A receiver accepts
connections only from the senders' public key. This module knows nothing of how the keys reach the members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
"""At this endpoint libzmq asks whether a peer may connect (rfc.zeromq.org/spec/27)."""
_ZAP_DOMAIN = b"weft"


@dataclass(frozen=True, slots=True)
class PlaneKeys:
    """Holds the keys as Z85 text. The secret halves do not appear in the object's representation, and so in no line of
    a log."""

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

"""The keys by which the members of one cluster know each other on the message plane: ZeroMQ's CURVE.

All members share one pair for the receiving end and one for the sending end, made once per cluster. A sender encrypts
for the receivers' public key, so it talks to nothing that lacks their secret one; a receiver takes connections from the
senders' public key alone. Knows nothing of how the keys get to the members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
"""Where libzmq asks whether a peer may connect (rfc.zeromq.org/spec/27)."""
_ZAP_DOMAIN = b"weft"


@dataclass(frozen=True, slots=True)
class PlaneKeys:
    """As Z85 text. The secret halves are in no representation, so in no line of a log."""

    receiver_public: bytes
    receiver_secret: bytes = field(repr=False)
    sender_public: bytes
    sender_secret: bytes = field(repr=False)

    @staticmethod
    def make() -> PlaneKeys:
        """New ones, by the system's random numbers."""
        receiver_public, receiver_secret = zmq.curve_keypair()
        sender_public, sender_secret = zmq.curve_keypair()
        return PlaneKeys(receiver_public, receiver_secret, sender_public, sender_secret)

    def secure_receiver(self, socket: zmq.Socket[Any]) -> None:
        """Before it binds. Its context needs a socket at `ZAP_ENDPOINT` that answers with `zap_reply`."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.receiver_secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody comes in unasked, should that socket be missing

    def secure_sender(self, socket: zmq.Socket[Any]) -> None:
        """Before it connects."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.receiver_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.sender_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.sender_secret)

    def zap_reply(self, request: Sequence[bytes]) -> list[bytes]:
        """The answer to libzmq's question about a peer: only our senders' key may come in."""
        version, number, domain, _address, _identity, mechanism, *credentials = request
        is_member = (domain, mechanism, credentials) == (_ZAP_DOMAIN, b"CURVE", [z85.decode(self.sender_public)])
        status = (b"200", b"OK") if is_member else (b"400", b"no member of this cluster")
        return [version, number, *status, b"", b""]

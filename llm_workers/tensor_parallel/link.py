"""Provides a byte-stream connection (`Link`) between rank 0 and one rank process: it carries framed messages, and both
sides notice its end.

The connection exists in addition to the process group, because waiting there has a timeout (and on CUDA keeps the
device busy), and a worker may be idle for hours. A rank that connects must first send the group's token. This module
knows nothing of what the messages mean.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct

from llm_workers.tensor_parallel.wire import Message, decode, encode

_LENGTH = struct.Struct("<I")
TOKEN_BYTES = 32


class LinkClosed(ConnectionError):
    """Says that the other side has ended."""


class Link:
    """Sends and receives messages; one thread may send while another receives. Raises LinkClosed, and TimeoutError
    where a timeout was given."""

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
                raise LinkClosed(f"a rank's connection broke: {error}") from error
            if not part:
                raise LinkClosed("a rank has closed its connection")
            data += part
        return bytes(data)

    def close(self) -> None:
        """Closes the connection, which wakes a thread that is receiving. The call is idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Door:
    """A `Door` is the listening side, where rank processes connect: a free port of one address."""

    def __init__(self, host: str, token: bytes) -> None:
        self._token = token
        self._socket = socket.create_server((host, 0))
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

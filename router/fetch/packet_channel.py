"""Carries messages and file descriptors between two processes on one machine, without blocking either event loop.

A message is one packet of a SOCK_SEQPACKET pair, so messages have no frames of their own, and a descriptor belongs to
the packet that it came with. What can't be sent at once waits in order. The module knows nothing of what the messages
say.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable

MAX_PACKET_BYTES = 64 * 1024
"""A message is smaller than this; a socket's buffer holds several."""
MAX_PACKETS_PER_TURN = 64
"""Limits the packets that one turn of the event loop reads."""


class PacketChannel:
    """A `PacketChannel` is one end of a pair. It belongs to one event loop, and owns its socket until `close`."""

    def __init__(
        self,
        end: socket.socket,
        on_packet: Callable[[bytes, int | None], None],
        on_end: Callable[[], None],
    ) -> None:
        """Begins to read. `on_packet` gets each message with its descriptor, which it closes; `on_end` is called once
        if the other side ends."""
        self._end = end
        self._on_packet = on_packet
        self._on_end = on_end
        self._waiting: deque[tuple[bytes, int | None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        end.setblocking(False)
        self._loop.add_reader(end, self._read)

    def send(self, packet: bytes, descriptor: int | None = None) -> None:
        """Sends a message, with a copy of a descriptor if one is given. It is dropped if the other side has ended."""
        assert len(packet) <= MAX_PACKET_BYTES, f"a packet of {len(packet)} bytes is too large"
        if self._is_closed:
            return
        copy = None if descriptor is None else os.dup(descriptor)
        self._waiting.append((packet, copy))
        if len(self._waiting) == 1:
            self._write()

    def close(self) -> None:
        """Ends the channel without a call of `on_end`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._end)
        self._loop.remove_writer(self._end)
        self._end.close()
        for _, copy in self._waiting:
            if copy is not None:
                os.close(copy)
        self._waiting.clear()

    def _write(self) -> None:
        while self._waiting:
            packet, copy = self._waiting[0]
            try:
                if copy is None:
                    self._end.send(packet)
                else:
                    socket.send_fds(self._end, [packet], [copy])
            except BlockingIOError:
                self._loop.add_writer(self._end, self._write)
                return
            except OSError:
                self._ended()
                return
            self._waiting.popleft()
            if copy is not None:
                os.close(copy)
        self._loop.remove_writer(self._end)

    def _read(self) -> None:
        for _ in range(MAX_PACKETS_PER_TURN):
            if self._is_closed:
                return
            try:
                packet, found, _, _ = socket.recv_fds(self._end, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                packet, found = b"", []
            if not packet:
                self._ended()
                return
            self._on_packet(packet, found[0] if found else None)

    def _ended(self) -> None:
        if not self._is_closed:
            self.close()
            self._on_end()

"""Limits what the answer of a server may cost beside the file in it. A file arrives in large pieces behind a small
head; a server that sends something else (endless interim answers, chunks of one byte, extensions of chunks, trailers,
TLS records of one byte) takes much processor time of this machine for few bytes of a file.

`WireMeter` counts and compares, and is pure. `MeteredStream` is the connection of which it counts what is read. What
the bytes mean is known to the HTTP library alone, and what a file is to neither.
"""

from __future__ import annotations

import ssl
from typing import Any

import httpcore

from fabric.contracts import MediaUnreachable

MAX_HEAD_BYTES = 32 * 2**10
"""Limits the head of an answer, with the interim answers before it. Servers limit what they send to 8 or 16 KiB."""
MAX_INTERIM_ANSWERS = 8
"""Limits the answers with a status below 200, of which nobody needs more than one or two."""
HEAD_READ_BYTES = 4096
"""Limits what is read at once before the head is complete, so that little of a flood is parsed before it is counted."""
MAX_OVERHEAD_BYTES = 128 * 2**10
"""Limits what is read beside the file: the head, chunks' sizes and extensions, trailers, and the 64 KiB that the HTTP
library may have read and not handed on. Beyond that, a file may take twice its bytes."""
MAX_SMALL_PIECES = 512
"""Limits the reads from a connection, and the pieces of a body, that are small: a piece takes about 25 µs."""
LARGE_PIECE_BYTES = 256
"""An answer may have one more read, and one more piece, per this many bytes. TCP fills segments of 536 bytes and more
where a server sends faster than a network carries."""
ANSWER_LIMITS = {
    "bytes of the head of a fetched answer": MAX_HEAD_BYTES,
    "interim answers before a fetched one": MAX_INTERIM_ANSWERS,
    "bytes of a fetched answer besides its file": MAX_OVERHEAD_BYTES,
    "small pieces of a fetched answer": MAX_SMALL_PIECES,
    "bytes of a fetched answer for each further piece": LARGE_PIECE_BYTES,
}
"""Lists the limits, for those who operate a cluster."""
_STATUS_LINE = b"\nHTTP/"


class WireMeter:
    """A `WireMeter` belongs to one answer of a server."""

    def __init__(self) -> None:
        self.num_read_bytes = 0
        self._num_reads = 0
        self._num_file_bytes = 0
        self._num_pieces = 0
        self._num_interim = 0
        self._tail = b""
        """Holds the end of what was read, in which a status line may begin."""
        self._is_in_head = True

    @property
    def num_wanted(self) -> int:
        """Returns how many bytes may be read at once now."""
        return HEAD_READ_BYTES if self._is_in_head else MAX_OVERHEAD_BYTES

    def read(self, data: bytes) -> None:
        """Counts bytes that were read from the connection. Raises MediaUnreachable."""
        self.num_read_bytes += len(data)
        self._num_reads += 1
        if self._is_in_head:
            self._check_head(data)
        if self._num_reads > MAX_SMALL_PIECES + self.num_read_bytes // LARGE_PIECE_BYTES:
            raise MediaUnreachable("the server of the URL sends its answer in too many small pieces")
        if self.num_read_bytes > MAX_OVERHEAD_BYTES + 2 * self._num_file_bytes:
            raise MediaUnreachable("the server of the URL sends little of the file among much else")

    def _check_head(self, data: bytes) -> None:
        if self.num_read_bytes > MAX_HEAD_BYTES:
            raise MediaUnreachable(f"the answer of the URL's server has a head of more than {MAX_HEAD_BYTES} bytes")
        text = self._tail + data
        self._num_interim += text.count(_STATUS_LINE)
        self._tail = text[1 - len(_STATUS_LINE) :]
        if self._num_interim > MAX_INTERIM_ANSWERS:
            raise MediaUnreachable("the server of the URL sends interim answers without end")

    def head_ended(self) -> None:
        """Says that the head is complete, so that the rest belongs to the body."""
        self._is_in_head = False

    def hand_on(self, num_bytes: int) -> None:
        """Counts a piece of the body. Raises MediaUnreachable."""
        self._num_file_bytes += num_bytes
        self._num_pieces += 1
        if self._num_pieces > MAX_SMALL_PIECES + self._num_file_bytes // LARGE_PIECE_BYTES:
            raise MediaUnreachable("the server of the URL sends the file in too many small pieces")


class MeteredStream(httpcore.AsyncNetworkStream):
    """A `MeteredStream` is a connection for one answer, of which `meter` counts what is read. Behind TLS, it counts
    what was decrypted."""

    def __init__(self, stream: httpcore.AsyncNetworkStream, meter: WireMeter) -> None:
        self.meter = meter
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - httpcore names it so
        data = await self._stream.read(min(max_bytes, self.meter.num_wanted), timeout)
        self.meter.read(data)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as above
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as above
    ) -> httpcore.AsyncNetworkStream:
        return MeteredStream(await self._stream.start_tls(ssl_context, server_hostname, timeout), self.meter)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

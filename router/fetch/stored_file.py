"""Holds a fetched file in memory that can be handed to another process: bytes are appended and hashed as they arrive,
and afterwards the file never changes.

The memory is an anonymous file of the kernel (memfd), sealed when it is complete: the receiver of its descriptor knows
that nothing shrinks or rewrites it while it is read. The kernel counts the memory once, however many descriptors there
are. On systems without memfd it is an unlinked temporary file.
"""

from __future__ import annotations

import fcntl
import os
import tempfile

from blake3 import blake3

from modalities.family import ImageHeader

READ_BYTES = 2**20
HAS_MEMFD = hasattr(os, "memfd_create")


class StoredFile:
    """A `StoredFile` owns one descriptor until `close`."""

    def __init__(
        self,
        file: int,
        num_bytes: int = 0,
        digest: bytes = b"",
        modality_to_header: dict[str, ImageHeader | None] | None = None,
    ) -> None:
        self._file = file
        self.num_bytes = num_bytes
        self.digest = digest
        """Holds the digest of the content, as `content_digest` computes it, once the file is complete."""
        self.modality_to_header = {} if modality_to_header is None else modality_to_header
        """Holds what was read of the content, for all that share the file; None stands for a header that takes more
        than a look at the bytes."""

    def share(self) -> StoredFile:
        """Returns the same file with a descriptor of its own."""
        return StoredFile(os.dup(self._file), self.num_bytes, self.digest, self.modality_to_header)

    @property
    def descriptor(self) -> int:
        return self._file

    def read(self) -> bytes:
        """Returns the content. Raises OSError if the file is shorter than `num_bytes`."""
        return read_file(self._file, self.num_bytes)

    def read_head(self, num_bytes: int) -> bytes:
        """Returns at most so many of the first bytes."""
        return os.pread(self._file, num_bytes, 0)

    def close(self) -> None:
        """Gives the descriptor back. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class FileWriter:
    """A `FileWriter` receives a file piece by piece."""

    def __init__(self) -> None:
        """Creates an empty file. Raises OSError if the system gives no memory or descriptor."""
        self._file = _new_file()
        self._hash = blake3()
        self.num_bytes = 0

    def append(self, piece: bytes) -> None:
        """Appends and hashes a piece. Raises OSError."""
        self._hash.update(piece)
        view = memoryview(piece)
        while view:
            view = view[os.write(self._file, view) :]
        self.num_bytes += len(piece)

    def finish(self) -> StoredFile:
        """Returns the complete file, which the caller closes."""
        if HAS_MEMFD:
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)
        file, self._file = self._file, -1
        return StoredFile(file, self.num_bytes, self._hash.digest())

    def close(self) -> None:
        """Drops the file, unless it was finished. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_file(file: int, num_bytes: int) -> bytes:
    """Returns the first `num_bytes` bytes of a file. Raises OSError if it has fewer."""
    content = os.pread(file, num_bytes, 0)
    if len(content) < num_bytes:  # One call reads at most 2 GiB.
        pieces = [content]
        at = len(content)
        while at < num_bytes:
            piece = os.pread(file, num_bytes - at, at)
            if not piece:
                raise OSError(f"a file of {num_bytes} bytes ends after {at}")
            pieces.append(piece)
            at += len(piece)
        content = b"".join(pieces)
    return content


def _new_file() -> int:
    if HAS_MEMFD:
        return os.memfd_create("weft-fetch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())

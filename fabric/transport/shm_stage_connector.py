"""Implements the stage connector between the processes of one host: an inbox is a directory in shared memory.

    /dev/shm/weft-stages-1000/        one directory for each user
        3f0c8a17d2b94e61/             the inbox of one connector, locked by its owner
            bell                      the socket on which the owner waits
            1-chat-7.0_1_12           data from stage 1 under the key `chat-7.0_1_12`

A sender writes the data into a file of its own directory and then renames it into the inbox, so the owner never sees a
part of it, and what a killed sender had begun lies in the sender's directory. Then the sender rings: it sends one byte
to the bell, a datagram socket, so a waiting owner needs no processor time. Small data, such as one token, needs no
file: the ring itself carries it, unless the socket's short queue is full.

The owner holds a lock (flock) on its directory, which the kernel takes away when the process ends for any reason. Each
connector that starts, and each one that closes, removes the directories whose lock is free. A lock on the directory of
the user keeps these sweeps apart from the making of directories. A forked child of an owner would keep its lock, so a
process that owns a connector must not fork without exec.

This module knows nothing of what the data means.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from fabric.contracts import ArenaFull, ConfigError, TransferFailed
from fabric.transport.stage_connector import (
    INBOX_FULL,
    INBOX_GONE,
    MAX_UNREAD,
    InboxEntry,
    check_own,
    new_inbox,
)

_BELL = "bell"
_BEGUN = "begun-"
_MAX_NAME_BYTES = 255
_RING = b"!"
_INLINE_BYTES = 4096
"""Data up to this size travels in the ring."""
_LARGEST_RING_BYTES = _MAX_NAME_BYTES + 1 + _INLINE_BYTES
_FULL_PAUSE_S = 0.01
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)


def stage_directory() -> Path:
    """Returns the directory of this user in the host's shared memory."""
    return Path(f"/dev/shm/weft-stages-{os.getuid()}")


def remove_inboxes_without_owner(root: Path | None = None) -> None:
    """Removes the inboxes of processes that were killed. Connectors do so when they start and when they close; this is
    for a process that outlives all connectors of a cluster. It raises nothing if the directory can't be used."""
    root = root or stage_directory()
    if root.is_dir():
        with contextlib.suppress(OSError), _locked_root(root):
            _sweep(root)
            root.rmdir()  # This fails while other inboxes are there.


class SharedMemoryStageConnector:
    """Implements `fabric.transport.stage_connector.StageConnector` with files in shared memory."""

    def __init__(self, root: Path | None = None) -> None:
        """Makes the inbox and removes those of processes that are gone. Raises ConfigError if the root directory can't
        be used."""
        self._root = root or stage_directory()
        self._inbox = new_inbox()
        self._path = self._root / self._inbox
        self._numbers = itertools.count()
        self._reading = threading.Lock()
        self._known: set[str] = set()
        """Holds the names of the files that `arrivals` has reported and that were not taken since."""
        self._inline: dict[str, bytes] = {}
        """Holds data that has come in rings and was not taken, by the name that its file would have."""
        self._closing = threading.Lock()
        self._is_closed = self._is_woken = False
        try:
            with _locked_root(self._root) as root:
                _sweep(root)
                self._path.mkdir(mode=0o700)
                self._lock = _lock(self._path)
        except OSError as error:
            raise ConfigError(f"the stage connector can't use {self._root}: {error}") from error
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._bell.bind(str(self._path / _BELL))
        self._drain = self._bell.dup()  # It has a timeout of its own.
        self._drain.setblocking(False)
        self._ringer = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ringer.setblocking(False)

    @property
    def inbox(self) -> str:
        return self._inbox

    # ------------------------------------------------------------ send

    def put(self, from_stage: int, to_stage: str, key: str, data: bytes) -> None:
        if not to_stage.isalnum():
            raise TransferFailed(INBOX_GONE.format(place="host", inbox=to_stage))
        target, name = self._root / to_stage, _file_name(from_stage, key)
        if len(data) <= _INLINE_BYTES:
            is_sent = self._post(target, name.encode() + b"\0" + data)
            if is_sent is not None:
                self._check_there(is_sent, to_stage)
                return
        begun = self._path / f"{_BEGUN}{next(self._numbers)}"
        try:
            if len(os.listdir(target)) > MAX_UNREAD:
                raise ArenaFull(INBOX_FULL)
            with open(begun, "wb", buffering=0) as file:
                view = memoryview(data)
                while view.nbytes:
                    view = view[file.write(view) :]
            os.rename(begun, target / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                begun.unlink()
            if error.errno in _NO_ROOM:
                raise ArenaFull(f"the shared memory of this host has no room for {len(data)} bytes") from error
            raise TransferFailed(INBOX_GONE.format(place="host", inbox=to_stage)) from error
        self._check_there(self._ring(target), to_stage)

    def _check_there(self, is_there: bool, inbox: str) -> None:
        """Unless the owner of an inbox is there, removes the inboxes without owner and raises TransferFailed."""
        if not is_there:
            with _locked_root(self._root) as root:
                _sweep(root)
            raise TransferFailed(INBOX_GONE.format(place="host", inbox=inbox))

    def _ring(self, target: Path) -> bool:
        """Sends a byte to the bell of an inbox. Returns False if its owner is gone. An owner whose queue of rings is
        full looks into its inbox anyway."""
        return self._post(target, _RING) is not False

    def _post(self, target: Path, message: bytes) -> bool | None:
        """Sends a ring. Returns False if the owner of the inbox is gone, and None if its queue is full."""
        try:
            self._ringer.sendto(message, str(target / _BELL))
        except BlockingIOError:
            return None
        except OSError as error:
            return None if error.errno in (errno.ENOBUFS, *_NO_ROOM) else False
        return True

    # ------------------------------------------------------------ receive

    def get(self, from_stage: int, to_stage: str, key: str, timeout: float) -> bytes | None:
        check_own(self, to_stage)
        name, end_s = _file_name(from_stage, key), time.monotonic() + timeout
        if name not in self._inline:
            self._hush()
        while (data := self._take(name)) is None:
            left_s = end_s - time.monotonic()
            if left_s <= 0 or self._is_closed:
                return None
            self._listen(left_s)
        return data

    def arrivals(self, timeout: float) -> list[InboxEntry]:
        entries = self._look()
        if not entries and timeout > 0 and not self._is_woken:
            self._listen(timeout)
            entries = self._look()
        self._is_woken = False
        return entries

    def wake(self) -> None:
        self._is_woken = True
        self._ring(self._path)

    def discard(self, prefix: str) -> int:
        start, num_dropped = quote(prefix, safe=""), 0
        num_known = len(self._inline)
        self._hush()
        if len(self._inline) > num_known:  # Another thread may wait for the rings that this one has taken.
            self.wake()
        with self._reading:
            for name in [name for name in self._inline if name.partition("-")[2].startswith(start)]:
                del self._inline[name]
                self._known.discard(name)
                num_dropped += 1
            for name in self._names():
                if name.partition("-")[2].startswith(start):
                    with contextlib.suppress(FileNotFoundError):
                        (self._path / name).unlink()
                        num_dropped += 1
                    self._known.discard(name)
        return num_dropped

    def _look(self) -> list[InboxEntry]:
        """Returns the entries that were not reported before."""
        self._hush()
        with self._reading:
            names = [*self._inline, *self._names()]
            fresh = [name for name in names if name not in self._known]
            self._known = set(names)
        return [_entry(name) for name in fresh]

    def _names(self) -> list[str]:
        """Returns the files of the inbox that hold data."""
        try:
            return [name for name in os.listdir(self._path) if name != _BELL and not name.startswith(_BEGUN)]
        except FileNotFoundError:
            return []

    def _take(self, name: str) -> bytes | None:
        path = self._path / name
        with self._reading:
            if (carried := self._inline.pop(name, None)) is not None:
                # The same data may have come a second time, in a file because the queue was full.
                path.unlink(missing_ok=True)
                self._known.discard(name)
                return carried
            try:
                data = path.read_bytes()
                path.unlink()
            except FileNotFoundError:
                return None
            self._known.discard(name)
        return data

    def _listen(self, timeout: float) -> None:
        """Waits until somebody rings, at most `timeout` seconds."""
        if self._is_closed:
            return
        if len(self._inline) >= MAX_UNREAD:
            time.sleep(min(timeout, _FULL_PAUSE_S))
            return
        with contextlib.suppress(TimeoutError, OSError):
            self._bell.settimeout(timeout)
            self._keep(self._bell.recv(_LARGEST_RING_BYTES))

    def _hush(self) -> None:
        """Takes the rings that came so far; what they announce is in the inbox already. With too much unread data,
        they stay in the queue, and senders use files."""
        with contextlib.suppress(OSError):
            while len(self._inline) < MAX_UNREAD:
                self._keep(self._drain.recv(_LARGEST_RING_BYTES))

    def _keep(self, message: bytes) -> None:
        """Keeps the data of a ring, if it carries some."""
        name, _, data = message.partition(b"\0")
        if name != _RING:
            with self._reading:
                self._inline[name.decode()] = data

    # ------------------------------------------------------------ end

    @property
    def is_alive(self) -> bool:
        return not self._is_closed and self._path.exists()

    def close(self) -> None:
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        self.wake()
        with contextlib.suppress(OSError), _locked_root(self._root) as root:
            # No sender finds the directory under its new name, so nothing is put there while it is emptied.
            gone = self._path.rename(root / f"{_BEGUN}{self._inbox}")
            shutil.rmtree(gone, ignore_errors=True)
            os.close(self._lock)
            _sweep(root)
            root.rmdir()  # This fails while other inboxes are there.
        self._bell.close()
        self._drain.close()
        self._inline.clear()
        self._ringer.close()


# ------------------------------------------------------------ names of files


def _file_name(from_stage: int, key: str) -> str:
    """Returns the name of the file for a key. Raises ValueError for a key that is too long for a name."""
    name = f"{from_stage}-{quote(key, safe='')}"
    if len(name) > _MAX_NAME_BYTES:
        raise ValueError(f"the key {key!r} is too long for the name of a file")
    return name


def _entry(name: str) -> InboxEntry:
    from_stage, _, key = name.partition("-")
    return InboxEntry(int(from_stage), unquote(key))


# ------------------------------------------------------------ locks on directories


def _lock(path: Path) -> int:
    """Locks a directory without waiting, and returns the descriptor that holds the lock. Raises BlockingIOError if
    another process holds it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def _locked_root(root: Path) -> Iterator[Path]:
    """Makes the root directory if it is missing, and holds its lock in the block. The directory may be removed by
    another process before the lock is there; then it is made again. Raises PermissionError if it belongs to another
    user, who could change what is in it."""
    while True:
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700, parents=True)
        try:
            descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            held = os.fstat(descriptor)
            if held.st_uid != os.getuid() or stat.S_IMODE(held.st_mode) & 0o022:
                raise PermissionError(errno.EACCES, "the directory belongs to another user or others may write to it")
            with contextlib.suppress(FileNotFoundError):
                if os.stat(root).st_ino == held.st_ino:
                    yield root
                    return
        finally:
            os.close(descriptor)


def _sweep(root: Path) -> None:
    """Removes the inboxes whose owner is gone. The caller holds the lock of the root."""
    for path in root.iterdir():
        with contextlib.suppress(OSError):
            descriptor = _lock(path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)

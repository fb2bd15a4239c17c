"""Runs `weft serve` as two processes: a supervisor that receives the signals, and the server that it starts.

While Ray starts, it replaces the handler of SIGTERM three times: twice with a Python handler that exits, then with one
of its core that prints a stack trace and aborts. So the process that starts Ray can't keep a handler of its own at
every moment. The supervisor imports no Ray and keeps its handlers. It starts the server in a session of its own, where
the Ctrl-C of a terminal does not reach it, and adopts every process whose parent dies, so that it can end them all. The
two processes talk over a pair of connected sockets, the line.

The first signal asks the server to drain, up to a time limit. A second signal, or the end of that time, ends every
process at once. In both cases the supervisor removes the folder for temporary files of all these processes. If the
server did not end by itself, the supervisor runs a command of the caller, which removes what the server may have left
elsewhere. The module knows nothing of what is served.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
"""This option of prctl(2) makes a process adopt orphans."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FOLDER_PREFIX = "weft-"
"""The name of the folder for temporary files begins with this prefix."""
CLEAN_UP_S = 40.0
"""The removal of what a killed server has left may take this many seconds."""
_READY = b"r"
_DRAIN = b"d"
_END_S = 10.0
"""Killed processes may take this many seconds to vanish; after that, the supervisor leaves those that hang in the
kernel."""
_POLL_S = 0.02
_MAX_TEMP_DIR_BYTES = 28
"""Limits the path of the parent of the folder for temporary files. The path of a Unix socket has 107 bytes at most; Ray
uses 62 of them below its folder, and the name of the folder takes 14."""


def supervise(command: Sequence[str], stop_limit_s: float, clean_up: Sequence[str] = ()) -> int:
    """Runs `command` until it ends or a signal asks for the end. It appends the file descriptor of the server's end of
    the line to `command` as the last argument.

    `stop_limit_s` limits the time from the first signal to the end of the server. If the server was killed or failed,
    this function then runs `clean_up` until it ends, `CLEAN_UP_S` are over or the next signal arrives. Returns the
    server's exit status, or 0 if a signal asked for the end. Side effects: it sets signal handlers of this process, and
    it creates a folder for temporary files, which is the server's TMPDIR and which it removes at the end."""
    _adopt_orphans()
    folder = _temporary_folder()
    ours, theirs = socket.socketpair()
    try:
        with _signals_as_bytes() as signals:
            server = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=os.environ | {"TMPDIR": folder},
            )
            theirs.close()
            try:
                return _watch(server, ours, signals, stop_limit_s)
            finally:
                end_descendants()
                if clean_up and server.returncode != 0:
                    _run_briefly(clean_up, signals, folder)
    finally:
        ours.close()
        shutil.rmtree(folder, ignore_errors=True)


def _temporary_folder() -> str:
    """Creates a folder for temporary files in the usual place, or in /tmp if the path of that place is too long for
    Ray's sockets. Returns its path."""
    usual = tempfile.gettempdir()
    folder = usual if len(os.fsencode(usual)) <= _MAX_TEMP_DIR_BYTES else "/tmp"
    return tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=folder)


def _watch(server: subprocess.Popen[bytes], line: socket.socket, signals: socket.socket, stop_limit_s: float) -> int:
    """Waits until the server has ended, or until the supervisor must not wait any longer. Returns the exit status of
    `weft serve`."""
    is_ready = False
    deadline_s: float | None = None
    watched = [signals, line]
    while True:
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        readable, _, _ = select.select(watched, [], [], left_s)
        if line in readable:
            if line.recv(1) == _READY:
                is_ready = True
            else:  # The server has ended, or is about to.
                watched.remove(line)
        numbers = signals.recv(64) if signals in readable else b""
        num_stops = sum(number in STOP_SIGNALS for number in numbers)
        _reap(server)
        if num_stops and (deadline_s is not None or num_stops > 1 or not is_ready):
            return 0  # This is a second signal, or the server accepts no requests yet.
        if server.returncode is not None:
            return 0 if deadline_s is not None else _exit_status(server.returncode)
        if num_stops:
            deadline_s = time.monotonic() + stop_limit_s
            with contextlib.suppress(OSError):
                line.send(_DRAIN)
        elif left_s == 0.0:
            print(
                "weft: the cluster has not stopped in time, so every process is ended now", file=sys.stderr, flush=True
            )
            return 0


def _run_briefly(command: Sequence[str], signals: socket.socket, folder: str) -> None:
    """Runs a command until it ends, `CLEAN_UP_S` are over or a further signal arrives."""
    process = subprocess.Popen(command, start_new_session=True, env=os.environ | {"TMPDIR": folder})
    deadline_s = time.monotonic() + CLEAN_UP_S
    while process.returncode is None and (left_s := deadline_s - time.monotonic()) > 0:
        readable, _, _ = select.select([signals], [], [], left_s)
        if readable and any(number in STOP_SIGNALS for number in signals.recv(64)):
            break
        _reap(process)
    end_descendants()


def _exit_status(returncode: int) -> int:
    """Returns the exit status that a shell would report: 128 plus the number of the signal for a server that a signal
    has killed."""
    return returncode if returncode >= 0 else 128 - returncode


def _reap(server: subprocess.Popen[bytes]) -> None:
    """Collects the exit status of every child that has ended: the server and adopted processes."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid == server.pid:
                server.returncode = os.waitstatus_to_exitcode(status)


@contextlib.contextmanager
def _signals_as_bytes() -> Iterator[socket.socket]:
    """Yields a socket that delivers the numbers of the signals that arrive, one byte each."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    # Signals that this process was started to ignore stay ignored: `nohup` and background jobs of a script rely on it.
    numbers = [signal.SIGCHLD, *(number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN)]
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()


def _adopt_orphans() -> None:
    """Makes a descendant whose parent dies a child of this process instead of a child of init."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants(root: int) -> list[int]:
    """Returns the ids of the processes below `root` that have not ended, from /proc; the list is empty on systems
    without /proc."""
    parent_to_children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text()
        except OSError:  # The process has ended in the meantime.
            continue
        state, parent = text[text.rindex(")") + 2 :].split()[:2]
        if state not in "ZX":
            parent_to_children.setdefault(int(parent), []).append(int(entry.parent.name))
    found, below = [], [root]
    while below:
        children = parent_to_children.get(below.pop(), [])
        found += children
        below += children
    return found


def end_descendants() -> None:
    """Kills every process below this one and collects its exit status, until none is left or `_END_S` are over."""
    deadline_s = time.monotonic() + _END_S
    while time.monotonic() < deadline_s:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # There is no child left.
            return
        time.sleep(_POLL_S)


class Lifeline:
    """Holds the server's end of the line to its supervisor, and lets the server wait until it must stop."""

    def __init__(self, fileno: int) -> None:
        """Starts to listen on the line. Side effect: this process ignores SIGINT, which the supervisor handles."""
        self.is_cut = False
        """Says whether the supervisor has died. The server must not outlive it, so it then stops without draining."""
        self._stop = threading.Event()
        self._line = socket.socket(fileno=fileno)
        self._line.set_inheritable(False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=self._listen, name="weft-lifeline", daemon=True).start()

    def tell_ready(self) -> None:
        """Reports to the supervisor that the server is ready. After this call the first signal drains the server;
        before it, the first signal ends the start."""
        with contextlib.suppress(OSError):
            self._line.send(_READY)

    def wait(self) -> None:
        """Waits until the supervisor asks for the end or has died, or until `stop` is called."""
        self._stop.wait()

    def stop(self) -> None:
        self._stop.set()

    def _listen(self) -> None:
        try:
            said = self._line.recv(1)
        except OSError:
            said = b""
        self.is_cut = said != _DRAIN
        self._stop.set()

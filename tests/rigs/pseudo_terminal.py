"""Runs a command on a pseudo-terminal, and shows what a user would see there."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyte

CTRL_C, CTRL_D, ENTER, ALT_ENTER, END = "\x03", "\x04", "\r", "\x1b\r", "\x1b[F"


class PseudoTerminal:
    """A `PseudoTerminal` has a screen of `columns` x `rows` characters on which a command runs."""

    def __init__(self, process: subprocess.Popen[bytes], end: int, columns: int, rows: int) -> None:
        self.process = process
        self._end = end
        self._screen = pyte.Screen(columns, rows)
        self._screen.write_process_input = lambda data: os.write(end, data.encode())  # It answers what programs ask.
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        """Holds every byte that the command wrote."""

    def send(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def pump(self, wait_s: float) -> bool:
        """Takes what the command has written. Returns False if there was nothing."""
        if not select.select([self._end], [], [], wait_s)[0]:
            return False
        try:
            data = os.read(self._end, 65536)
        except OSError:  # The command has ended and has closed its end.
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)

    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]

    def shows(self, condition: str | Callable[[str], bool], timeout_s: float = 60.0) -> str:
        """Waits until the screen has a text, or fulfils a condition, and returns the screen."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            text = "\n".join(self.lines())
            if condition in text if isinstance(condition, str) else condition(text):
                return text
            assert time.monotonic() < deadline_s, f"the screen has no {condition!r}:\n{text}"
            assert self.pump(0.05) or self.process.poll() is None, f"the command ended:\n{text}"

    def ended(self, timeout_s: float = 90.0) -> int:
        """Waits until the command has ended, and returns its status."""
        deadline_s = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline_s, "\n".join(self.lines())
            self.pump(0.05)
        while self.pump(0.0):
            pass
        return int(self.process.returncode)


@contextmanager
def on_terminal(*words: str, columns: int = 80, rows: int = 24, home: Path, **env: str) -> Iterator[PseudoTerminal]:
    """Runs `weft` with these words. `home` is the user's folder, and `env` adds to the environment."""
    own, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    environment |= {"HOME": str(home), "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **env}
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,
    )
    os.close(theirs)
    try:
        yield PseudoTerminal(process, own, columns, rows)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        os.close(own)

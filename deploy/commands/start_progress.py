"""Shows what a cluster waits for while it starts: one line that changes on a terminal, a line for each change
elsewhere.

The module knows nothing of what is waited for (`deploy.start_phases`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from deploy.commands.terminal import may_animate

CLEAR = "\r\x1b[K"
"""Moves to the beginning of the line and clears it."""


class StartProgress:
    """A `StartProgress` shows texts on a stream. Call `close` before something else is printed there."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._began_s = clock()
        self._is_live = may_animate(stream)
        self._shown = ""

    def show(self, text: str) -> None:
        """Shows what the cluster waits for now; an empty text shows nothing."""
        if self._is_live and text:
            seconds = self._clock() - self._began_s
            self._write(f"{CLEAR}weft: {text}, {seconds:.0f} s")
        elif text and text != self._shown:
            self._write(f"weft: {text}\n")
        self._shown = text or self._shown

    def close(self) -> None:
        if self._is_live and self._shown:
            self._write(CLEAR)
        self._shown = ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

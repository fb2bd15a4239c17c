"""Shows what a cluster waits for while it starts: one line that changes on a terminal, with a bar while weights load,
and elsewhere a line for each change and each further tenth of the weights.

The module knows nothing of what is waited for (`deploy.start_phases`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from rich.progress_bar import ProgressBar

from deploy.commands.terminal import console, may_animate
from deploy.start_phases import LoadedBytes, StartState

BAR_WIDTH = 20
CLEAR = "\r\x1b[K"
"""Moves to the beginning of the line and clears it."""


class StartProgress:
    """A `StartProgress` shows states on a stream. Call `close` before something else is printed there."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._began_s = clock()
        self._is_live = may_animate(stream)
        self._shown = ""
        self._tenths = 0
        """Counts the tenths of the weights of the last line."""

    def show(self, state: StartState) -> None:
        """Shows what the cluster waits for now; an empty text shows nothing."""
        text, loaded = state
        if self._is_live and text:
            seconds = self._clock() - self._began_s
            bar = f" {self._bar(loaded)} {loaded}" if loaded.total else ""
            self._write(f"{CLEAR}weft: {text}, {seconds:.0f} s{bar}")
        elif text:
            tenths = int(10 * loaded.share)
            if text != self._shown or tenths > self._tenths:
                self._write(f"weft: {text}, {loaded}\n" if loaded.total else f"weft: {text}\n")
                self._tenths = tenths
        self._shown = text or self._shown

    def _bar(self, loaded: LoadedBytes) -> str:
        """Returns a bar as this terminal can show it."""
        output = console(self._stream)
        with output.capture() as captured:
            output.print(ProgressBar(loaded.total, loaded.loaded, width=BAR_WIDTH), end="")
        return captured.get()

    def close(self) -> None:
        if self._is_live and self._shown:
            self._write(CLEAR)
        self._shown = ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

"""Restores the signals that the parent of this process has set to be ignored.

`nohup` and background jobs of a script set some, and child processes inherit that. `weft serve` obeys it on purpose, so
a test that interrupts a cluster would wait for nothing.
"""

from __future__ import annotations

import signal


def restore_signals() -> None:
    """Gives the signals that stop a cluster their default handlers where they are ignored. Call it in the main thread,
    before the first cluster starts."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

"""Contains what the engines of a worker have in common: the thread that repeats an engine's turns and runs the commands
of other threads (`EngineThread`), and the snapshots of the prefix cache that are being delivered (`OpenSnapshots`).

What a turn computes is up to each engine. This module knows nothing of schedulers, of vLLM, or of what a command does.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from fabric.contracts import EngineFailed, WeftError
from llm_workers.engine_interface import BlockSnapshot, Update
from llm_workers.scheduling import ChainPage

Command = Callable[[Update], None]
SNAPSHOT_PAGE_BLOCKS = 2048
"""A turn of an engine adds at most this many blocks of a snapshot to its update, which takes about a millisecond, so
that a snapshot delays no step for long."""


class EngineThread:
    """An `EngineThread` runs an engine in a thread of its own. The engine's state belongs to this thread; other threads
    change it by commands, which run between two turns. Only `run_commands` and `died` are for the engine itself."""

    def __init__(self, run: Callable[[], None]) -> None:
        """Creates a thread that is not started. `run` repeats turns, each of which begins with `run_commands`, until
        that returns False. It catches every error and hands over what `died` returns."""
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._death: WeftError | None = None
        self._thread = threading.Thread(target=run, name="weft-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the engine after the current step and joins the thread. The call is idempotent."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def check_health(self) -> None:
        """Raises the error of which the engine has died, and EngineFailed if it was stopped."""
        if self._death is not None:
            raise self._death
        if self._thread.ident is not None and not self._thread.is_alive():
            raise EngineFailed("the engine has stopped")

    def command(self, command: Command) -> None:
        """Has `command` run at the beginning of the next turn, with the update of that turn. The call never blocks."""
        self._commands.put(command)

    def run_commands(self, update: Update, *, is_idle: bool) -> bool:
        """Runs all queued commands. With `is_idle`, there is nothing to compute, so the call first waits until a
        command arrives. Returns False after a call of `stop`. Raises what a command raises."""
        may_wait = is_idle
        while True:
            try:
                command = self._commands.get(block=may_wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(update)
            may_wait = False

    def died(self, error: WeftError) -> Update:
        """Keeps the error of which the engine has died, and returns the engine's last update, which says so."""
        self._death = error
        return Update(death=error)


class OpenSnapshots:
    """Holds the snapshots whose pages have not all been delivered, at most one for each router. The routers take turns,
    so none waits for the whole snapshot of another."""

    def __init__(self) -> None:
        self._address_to_pages: dict[str, Iterator[ChainPage]] = {}

    def __len__(self) -> int:
        return len(self._address_to_pages)

    def begin(self, address: str, snapshot: Callable[[int], Iterator[ChainPage]]) -> None:
        """Begins a snapshot for the router at `address`, in place of an earlier one. `snapshot` takes the largest
        number of blocks of a page, and returns the pages; it is called now."""
        self._address_to_pages[address] = snapshot(SNAPSHOT_PAGE_BLOCKS)

    def next_page(self) -> BlockSnapshot:
        """Returns the next page for the router whose turn it is. At least one snapshot must be open."""
        address = next(iter(self._address_to_pages))
        pages = self._address_to_pages.pop(address)
        page = next(pages)
        if not page.is_last:
            self._address_to_pages[address] = pages
        return BlockSnapshot(address, *page)

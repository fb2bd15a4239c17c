"""Keeps the costs that a router has learned in a file, so that the next run begins with them.

`CostFile.read` never fails: a file that is missing, broken or of another model is as good as none, and the log says so.
The file is written by a thread, because a slow disk must not stop the event loop, and by renaming, so that no reader
sees a part of it. Several routers may share a file: each keeps the newer line of what it has learned and what the file
says. The module knows nothing of what the costs mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from router.planning import SavedCosts, decode_costs, encode_costs

_LOG = logging.getLogger(__name__)
PERIOD_S = 60.0
"""The router writes its costs this often, and when it stops."""
MAX_BYTES = 4 * 2**20
"""A larger file is not read; a file of a large cluster has about 100 KB."""


class CostFile:
    """A `CostFile` is the file of one router, or none if `path` is None. `wall_time` returns seconds since 1970."""

    def __init__(self, path: Path | None, model: str, wall_time: Callable[[], float]) -> None:
        self._path, self._model, self._wall_time = path, model, wall_time

    def read(self) -> SavedCosts:
        """Returns the costs in the file. If they can't be used, it logs why and returns none."""
        if self._path is None:
            return SavedCosts()
        try:
            return self._costs_of(self._path)
        except FileNotFoundError:
            _LOG.info("the file of learned costs %s does not exist yet, so costs begin with their defaults", self._path)
        except OSError as error:
            _LOG.warning("the file of learned costs %s can't be read: %s", self._path, error.strerror)
        except ValueError as error:
            _LOG.warning("the file of learned costs %s is ignored: %s", self._path, error)
        return SavedCosts()

    async def keep(self, learned: Callable[[float], SavedCosts]) -> None:
        """Writes the costs every `PERIOD_S` until it is cancelled. `learned` returns them, given the wall time."""
        while self._path is not None:
            await asyncio.sleep(PERIOD_S)
            await self.write(learned)

    async def write(self, learned: Callable[[float], SavedCosts]) -> None:
        """Writes the costs now. A file that can't be written is logged."""
        if self._path is None:
            return
        costs = learned(self._wall_time())
        try:
            await asyncio.to_thread(self._write, self._path, costs)
        except OSError as error:
            _LOG.warning("the file of learned costs %s can't be written: %s", self._path, error.strerror)

    def _costs_of(self, path: Path) -> SavedCosts:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        return decode_costs(content, self._model, self._wall_time())

    def _write(self, path: Path, costs: SavedCosts) -> None:
        with contextlib.suppress(OSError, ValueError):  # A file that can't be read is replaced.
            costs = costs.merged(self._costs_of(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_bytes(encode_costs(costs, self._model))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

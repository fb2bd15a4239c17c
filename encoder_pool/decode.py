"""Media bytes to encoder inputs, outside of the serving process: hostile files and slow codecs meet spawned helpers.

A file that kills its process fails alone, and is tried once more (the kernel may have been short of memory); one that
is out of time is refused. What nobody waits for any more is ended with its process, unless it is done very soon.
Knows nothing of batching, features or requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from encoder_pool.decode_process import (
    DEFAULT_LIMITS,
    Decoded,
    DecodeLimits,
    DecodeProcess,
    OnUnits,
    ProcessDied,
    check_inputs,
    decode_item,
)
from fabric.errors import EncodeFailed, InvalidMedia
from fabric.messages import MediaItem
from modalities.family import EncoderInput, Family

__all__ = ["DecodeBroke", "DecodeLimits", "DecodePool", "Decoded", "Decoder", "check_inputs"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

NUM_THREADS = 2
"""That decode where there are no processes: a long item must not hold up a short one."""
GRACE_S = 0.25
"""For an item that nobody waits for any more: a new process costs more than most pictures."""


class DecodeBroke(Exception):
    """The process died over this item. Transient: it may have been short of memory through no fault of the item."""


class Decoder(Protocol):
    @property
    def num_parallel(self) -> int:
        """Items worth giving it at once."""
        ...

    async def decode(self, data: bytes, item: MediaItem, on_units: OnUnits) -> Decoded:
        """Decodes and preprocesses one item into the units that were planned; `on_units` is called in the event loop
        with those that are ready before the last. Cancelling it frees what it takes.

        Raises InvalidMedia (broken, or not what was planned), EncodeFailed (our own failure on it), or DecodeBroke:
        the item may be tried once more.
        """
        ...


class DecodePool:
    """Keeps `Decoder`, with `num_processes` processes (0: threads of this process, using `family`). Lives in one event
    loop."""

    def __init__(
        self, family: Family, model_dir: str, num_processes: int, limits: DecodeLimits = DEFAULT_LIMITS
    ) -> None:
        self._family = family
        self._model_dir = model_dir
        self._num_processes = num_processes
        self._limits = limits
        self._threads = ThreadPoolExecutor(self.num_parallel, thread_name_prefix="decode")
        """One waits for each process."""
        self._processes: set[DecodeProcess] = set()
        self._idle: asyncio.Queue[DecodeProcess] = asyncio.Queue()
        self._left: set[asyncio.Task[None]] = set()
        """Items that nobody waits for any more, on their way out."""
        self._is_closed = False

    @property
    def num_parallel(self) -> int:
        return self._num_processes or NUM_THREADS

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    async def start(self) -> None:
        """Starts every process and loads the family there, so that the first request doesn't wait for it. Raises
        EncodeFailed."""
        for _ in range(self._num_processes):
            self._add()
        try:
            await asyncio.gather(*(self._run(process.wait_until_ready) for process in self._processes))
        except ProcessDied as error:
            raise EncodeFailed("a decode process died at its start") from error

    async def decode(self, data: bytes, item: MediaItem, on_units: OnUnits) -> Decoded:
        loop = asyncio.get_running_loop()

        def hand_over(units: list[EncoderInput]) -> None:
            loop.call_soon_threadsafe(on_units, units)

        if self._num_processes == 0:
            return await self._run(decode_item, self._family, data, item, hand_over)
        process = await self._idle.get()
        work = self._run(process.decode, data, item, hand_over)
        try:
            return await asyncio.shield(work)
        except ProcessDied as error:
            if error.is_late:
                message = f"it could not be decoded within {self._limits.timeout_s:g} s"
                raise InvalidMedia(message, param=item.part) from None
            logger.warning("a decode process died over %s", item.mm_hash)
            raise DecodeBroke(f"decoding of {item.mm_hash} broke") from error
        finally:
            self._take_back(process, work)

    async def close(self) -> None:
        """Ends processes, whatever they work on, and threads, after the item each works on."""
        self._is_closed = True
        for process in self._processes:
            process.kill()
        await asyncio.gather(*self._left, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)
        for process in self._processes:
            await asyncio.to_thread(process.join)
        self._processes.clear()

    def _take_back(self, process: DecodeProcess, work: asyncio.Future[Decoded]) -> None:
        """Makes a process idle again, at once or soon, or puts another in its place."""
        if work.done() and not isinstance(work.exception(), ProcessDied):
            self._idle.put_nowait(process)
            return
        task = asyncio.create_task(self._end(process, work))
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    async def _end(self, process: DecodeProcess, work: asyncio.Future[Decoded]) -> None:
        await asyncio.wait([work], timeout=GRACE_S)
        if not work.done():
            process.kill()
            await asyncio.wait([work])
        if not isinstance(work.exception(), ProcessDied):
            self._idle.put_nowait(process)
            return
        self._processes.discard(process)
        await asyncio.to_thread(process.join)
        if not self._is_closed:
            self._add()

    def _add(self) -> None:
        process = DecodeProcess(self._model_dir, self._limits)
        self._processes.add(process)
        self._idle.put_nowait(process)

    def _run(self, work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

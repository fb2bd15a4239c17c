"""Decodes media bytes into encoder inputs outside of the serving process, in spawned helpers that can fail on hostile
files and slow codecs.

A file that kills its process fails alone, and is tried once more (the kernel may have been short of memory). A file
that takes too much processor time or memory is refused. A file that is late because the machine was too busy may be
sent again. Items that are decoded at the same time never take more memory than a budget, as estimated from their
headers. When no request waits for an item any more, its process is killed, unless the item is done very soon. The
module knows nothing of batching, features or requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from encoder_pool.byte_budget import ByteBudget, Hold
from encoder_pool.decode_limits import DEFAULT_LIMITS, DecodeLimits
from encoder_pool.decode_process import (
    Decoded,
    DecodeProcess,
    DiedIdle,
    OnUnits,
    ProcessDied,
    check_inputs,
    decode_item,
)
from fabric.errors import EncodeFailed, InvalidMedia, MachineBusy
from fabric.messages import MediaItem
from modalities.family import EncoderInput, Family

__all__ = ["DecodeBroke", "DecodeLimits", "DecodePool", "Decoded", "Decoder", "check_inputs"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

NUM_THREADS = 2
"""This many threads decode where there are no processes; there are two so that a long item does not delay a short
one."""
GRACE_S = 0.25
"""A process gets this much time to finish an item that no request waits for, because a new process costs more than most
pictures."""
RETRY_PAUSE_S = 1.0
"""A failed start of a process is tried again after this pause, because resources that the machine lacks may become free
meanwhile."""
MAX_FAILURES = 10
"""The pool is reported as dead after this many failures in a row, either of starts or of processes that died idle. It
still keeps trying."""


class DecodeBroke(Exception):
    """Means that the process died while it decoded this item. The error is transient: the process may have been short
    of memory through no fault of the item."""


class Decoder(Protocol):
    """A `Decoder` turns the bytes of media items into encoder inputs."""

    @property
    def num_parallel(self) -> int:
        """Returns the number of items that are worth giving it at once."""
        ...

    async def decode(self, data: bytes, item: MediaItem, on_units: OnUnits) -> Decoded:
        """Decodes and preprocesses one item into the planned units. Calls `on_units` in the event loop with units that
        are ready before the last. A sound may be returned as a waveform, from which the encoder's device makes units.
        Cancelling the call frees what the item takes. The caller must not pass an item that takes more memory than the
        budget of all items together.

        Raises InvalidMedia (the item is broken, differs from the plan, or takes too much work), MachineBusy (it was not
        done in time), EncodeFailed (this program failed on it), or DecodeBroke (the item may be tried once more).
        """
        ...


class DecodePool:
    """Implements `Decoder` with `num_processes` processes (0 means threads of this process, which use `family`). It
    lives in one event loop."""

    def __init__(
        self,
        family: Family,
        model_dir: str,
        num_processes: int,
        limits: DecodeLimits = DEFAULT_LIMITS,
        max_raw_cost: int = 0,
    ) -> None:
        """Sounds of up to `max_raw_cost` mel frames are returned as waveforms rather than as units."""
        self._family = family
        self._model_dir = model_dir
        self._num_processes = num_processes
        self._memory = ByteBudget(limits.total_bytes)
        self._limits = limits
        self._max_raw_cost = max_raw_cost
        self._threads = ThreadPoolExecutor(self.num_parallel, thread_name_prefix="decode")
        """Has one thread for each process, which waits for it. Without processes these threads decode."""
        self._processes: set[DecodeProcess] = set()
        self._idle: asyncio.Queue[DecodeProcess] = asyncio.Queue()
        self._left: set[asyncio.Task[None]] = set()
        """Holds the tasks that wait for a process with an unfinished item, or kill and replace the process."""
        self._closed = asyncio.Event()
        self._num_failed_starts = 0
        """Counts the failed starts since the last successful one."""
        self._num_idle_deaths = 0
        """Counts the processes that started well but were dead when they were needed, since a process last answered."""

    @property
    def num_parallel(self) -> int:
        return self._num_processes or NUM_THREADS

    @property
    def is_alive(self) -> bool:
        """Returns False while processes can't be started, or die before they receive an item."""
        return max(self._num_failed_starts, self._num_idle_deaths) < MAX_FAILURES

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    async def start(self) -> None:
        """Starts every process and loads the family there, so that the first request does not wait for it. Raises
        EncodeFailed."""
        starts = (self._add() for _ in range(self._num_processes))
        for error in await asyncio.gather(*starts, return_exceptions=True):
            if error is not None:
                raise error

    async def decode(self, data: bytes, item: MediaItem, on_units: OnUnits) -> Decoded:
        loop = asyncio.get_running_loop()

        def hand_over(units: list[EncoderInput]) -> None:
            loop.call_soon_threadsafe(on_units, units)

        is_raw = item.modality == "audio" and item.cost <= self._max_raw_cost
        while True:
            hold = await self._memory.take(item.decode_bytes)
            if self._num_processes == 0:
                return await self._decode_here(hold, data, item, hand_over, is_raw)
            try:
                process = await self._idle.get()
            except BaseException:
                hold.release()
                raise
            work = self._run(process.decode, data, item, hand_over, is_raw)
            try:
                return await self._in_time(work, item)
            except DiedIdle:
                self._num_idle_deaths += 1
                logger.warning("a decode process died idle (%d in a row)", self._num_idle_deaths)
            except ProcessDied as error:
                if error.is_out_of_cpu:
                    limit_s = self._limits.cpu_s(item.modality)
                    message = f"decoding it takes more than {limit_s:g} s of processor time"
                    raise InvalidMedia(message, param=item.part) from None
                logger.warning("a decode process died over %s", item.mm_hash)
                raise DecodeBroke(f"decoding of {item.mm_hash} broke") from error
            finally:
                self._take_back(process, work, hold)

    async def _decode_here(self, hold: Hold, data: bytes, item: MediaItem, hand_over: OnUnits, is_raw: bool) -> Decoded:
        """Decodes in a thread of this process. The thread can't be ended, so it keeps its memory until it is done."""
        work = self._run(decode_item, self._family, data, item, hand_over, is_raw)
        work.add_done_callback(lambda _: hold.release())
        return await asyncio.shield(work)

    async def _in_time(self, work: asyncio.Future[Decoded], item: MediaItem) -> Decoded:
        """Waits for the result, and raises MachineBusy when the time limit by the clock is over; the caller must then
        end the process."""
        limit_s = self._limits.timeout_s(item.modality)
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(work)
        except TimeoutError:
            logger.warning("decoding of %s was not done within %g s", item.mm_hash, limit_s)
            message = f"this machine is too busy to decode it within {limit_s:g} s"
            raise MachineBusy(message, param=item.part) from None

    async def close(self) -> None:
        """Kills all processes, and ends each thread after its current item."""
        self._closed.set()
        for process in self._processes:
            process.kill()
        await asyncio.gather(*self._left, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)
        for process in list(self._processes):
            await asyncio.to_thread(process.join)
        self._processes.clear()

    def _take_back(self, process: DecodeProcess, work: asyncio.Future[Decoded], hold: Hold) -> None:
        """Makes a process idle again, now or soon, if it has answered in full; otherwise replaces it by a new one. The
        memory of the item returns to the budget once it is free."""
        if work.done() and process.is_clean:
            hold.release()
            self._answered(process)
            return
        task = asyncio.create_task(self._end(process, work, hold))
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    def _answered(self, process: DecodeProcess) -> None:
        self._num_idle_deaths = 0
        self._idle.put_nowait(process)

    async def _end(self, process: DecodeProcess, work: asyncio.Future[Decoded], hold: Hold) -> None:
        await asyncio.wait([work], timeout=GRACE_S)
        if work.done() and process.is_clean:
            hold.release()
            self._answered(process)
            return
        process.kill()
        await asyncio.wait([work])
        self._processes.discard(process)
        await asyncio.to_thread(process.join)
        hold.release()
        await self._refill()

    async def _refill(self) -> None:
        """Starts a process in place of one that has ended, and retries until that succeeds."""
        while not self._closed.is_set():
            try:
                await self._add()
                return
            except EncodeFailed as error:
                logger.warning("%s (%d times in a row)", error, self._num_failed_starts)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), RETRY_PAUSE_S)

    async def _add(self) -> None:
        """Starts a process, which becomes idle once it has loaded the family. Raises EncodeFailed."""
        try:
            process = DecodeProcess(self._model_dir, self._limits)
        except OSError as error:
            self._num_failed_starts += 1
            raise EncodeFailed("a decode process could not be started") from error
        self._processes.add(process)
        try:
            await self._run(process.wait_until_ready)
        except DiedIdle as error:
            self._num_failed_starts += 1
            self._processes.discard(process)
            await asyncio.to_thread(process.join)
            raise EncodeFailed("a decode process died at its start") from error
        self._num_failed_starts = 0
        self._idle.put_nowait(process)

    def _run(self, work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

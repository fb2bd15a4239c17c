"""Media bytes to encoder inputs, outside of the serving process: hostile files and slow codecs meet spawned helpers.

A file that kills its process fails alone, and is tried once more (the kernel may have been short of memory); one that
takes too much processor time or memory is refused; one that is late because the machine did not get to it may be sent
again. Items that are decoded at once never take more memory than a budget, by their headers. What nobody waits for any
more is ended with its process, unless it is done very soon. Knows nothing of batching, features or requests.
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
"""That decode where there are no processes: a long item must not hold up a short one."""
GRACE_S = 0.25
"""For an item that nobody waits for any more: a new process costs more than most pictures."""
RETRY_PAUSE_S = 1.0
"""Between attempts to start a process: what the machine lacks may come back."""
MAX_FAILURES = 10
"""In a row, of starts, or of processes that died idle; then the pool counts as dead, though it goes on trying."""


class DecodeBroke(Exception):
    """The process died over this item. Transient: it may have been short of memory through no fault of the item."""


class Decoder(Protocol):
    @property
    def num_parallel(self) -> int:
        """Items worth giving it at once."""
        ...

    async def decode(self, data: bytes, item: MediaItem, on_units: OnUnits) -> Decoded:
        """Decodes and preprocesses one item into the units that were planned; `on_units` is called in the event loop
        with those that are ready before the last. A sound may come as a waveform, to be made into units on the
        encoder's device. Cancelling it frees what it takes. An item that takes more memory than all of them have
        together must not be given to it.

        Raises InvalidMedia (broken, not what was planned, or too much work), MachineBusy (not done in time),
        EncodeFailed (our own failure on it), or DecodeBroke: the item may be tried once more.
        """
        ...


class DecodePool:
    """Keeps `Decoder`, with `num_processes` processes (0: threads of this process, using `family`). Lives in one event
    loop."""

    def __init__(
        self,
        family: Family,
        model_dir: str,
        num_processes: int,
        limits: DecodeLimits = DEFAULT_LIMITS,
        max_raw_cost: int = 0,
    ) -> None:
        """Sounds up to `max_raw_cost` mel frames are not made into units, but given as waveforms."""
        self._family = family
        self._model_dir = model_dir
        self._num_processes = num_processes
        self._memory = ByteBudget(limits.total_bytes)
        self._limits = limits
        self._max_raw_cost = max_raw_cost
        self._threads = ThreadPoolExecutor(self.num_parallel, thread_name_prefix="decode")
        """One waits for each process."""
        self._processes: set[DecodeProcess] = set()
        self._idle: asyncio.Queue[DecodeProcess] = asyncio.Queue()
        self._left: set[asyncio.Task[None]] = set()
        """Items that nobody waits for any more, on their way out."""
        self._closed = asyncio.Event()
        self._num_failed_starts = 0
        """Since one went well."""
        self._num_idle_deaths = 0
        """Processes that started well and were gone when they were needed, since one answered."""

    @property
    def num_parallel(self) -> int:
        return self._num_processes or NUM_THREADS

    @property
    def is_alive(self) -> bool:
        """False while processes can't be started, or none lives long enough to be given anything."""
        return max(self._num_failed_starts, self._num_idle_deaths) < MAX_FAILURES

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    async def start(self) -> None:
        """Starts every process and loads the family there, so that the first request doesn't wait for it. Raises
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
        """In a thread of this process, which can't be ended: what it takes is its own until it is done."""
        work = self._run(decode_item, self._family, data, item, hand_over, is_raw)
        work.add_done_callback(lambda _: hold.release())
        return await asyncio.shield(work)

    async def _in_time(self, work: asyncio.Future[Decoded], item: MediaItem) -> Decoded:
        """Raises MachineBusy when the time by the clock is up; the process is then still to be ended."""
        limit_s = self._limits.timeout_s(item.modality)
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(work)
        except TimeoutError:
            logger.warning("decoding of %s was not done within %g s", item.mm_hash, limit_s)
            message = f"this machine is too busy to decode it within {limit_s:g} s"
            raise MachineBusy(message, param=item.part) from None

    async def close(self) -> None:
        """Ends processes, whatever they work on, and threads, after the item each works on."""
        self._closed.set()
        for process in self._processes:
            process.kill()
        await asyncio.gather(*self._left, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)
        for process in list(self._processes):
            await asyncio.to_thread(process.join)
        self._processes.clear()

    def _take_back(self, process: DecodeProcess, work: asyncio.Future[Decoded], hold: Hold) -> None:
        """Makes a process idle again, at once or soon, if it has answered in full; or puts another in its place. The
        item's memory is given back once it is free."""
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
        """Starts a process in the place of one that has ended, however often that fails."""
        while not self._closed.is_set():
            try:
                await self._add()
                return
            except EncodeFailed as error:
                logger.warning("%s (%d times in a row)", error, self._num_failed_starts)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), RETRY_PAUSE_S)

    async def _add(self) -> None:
        """Starts a process, which is idle once it has loaded the family. Raises EncodeFailed."""
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

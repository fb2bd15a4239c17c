"""Decodes media bytes into encoder inputs outside of the serving process, in sandboxes (`fabric/sandbox/`) that can
fail on hostile files and slow codecs.

`Decoder` is the interface that the pipeline uses, and `DecodePool` implements it with decode processes. A `ByteBudget`
keeps the items that are decoded at the same time within a budget of memory, as estimated from their headers.

A file that kills its process fails alone, and is tried once more (the kernel may have been short of memory). A file
that takes too much processor time or memory is refused. A file that is late because the machine was too busy may be
sent again. When no request waits for an item any more, its process is killed, unless the item is done very soon.

The module lives in one event loop. It knows nothing of batching, features or requests; `decode_process` contains what
runs inside the processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from encoder_pool.decode_process import Decoded, DecodeJob, OnUnits, decode_item, enter_decoding, given_input
from encoder_pool.encoder_config import DEFAULT_LIMITS, DecodeLimits
from fabric.contracts import EncodeFailed, InvalidMedia, MachineBusy, MediaItem, WeftError
from fabric.sandbox import Death, JobLimits, NotStarted, SandboxDied, SandboxProcess
from modalities.family import EncoderInput, Family

logger = logging.getLogger(__name__)
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


class Decoder(Protocol):
    """A `Decoder` turns the bytes of media items into encoder inputs."""

    @property
    def num_parallel(self) -> int:
        """Returns the number of items that are worth giving it at once."""
        ...

    async def decode(self, data: bytes, item: MediaItem, on_units: OnUnits) -> Decoded:
        """Decodes and preprocesses one item into the planned units. Calls `on_units` in the event loop with units that
        are ready before the last. Features that a client has sent are returned as they are. A sound may be returned as
        a waveform, from which the encoder's device makes units. Cancelling the call frees what the item takes. The
        caller must not pass an item that takes more memory than the budget of all items together.

        Raises InvalidMedia (the item is broken, differs from the plan, or takes too much work), MachineBusy (it was not
        done in time), EncodeFailed (this program failed on it), or DecodeBroke (the item may be tried once more).
        """
        ...


class DecodeBroke(Exception):
    """Means that the process died while it decoded this item. The error is transient: the process may have been short
    of memory through no fault of the item."""


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
        self._num_processes = num_processes
        self._memory = ByteBudget(limits.total_bytes)
        self._limits = limits
        self._max_raw_cost = max_raw_cost
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="decode")
        """Has the threads that decode if there are no processes."""
        enter = partial(enter_decoding, model_dir)
        self._processes = [SandboxProcess(enter, limits.memory_bytes, "weft-decode") for _ in range(num_processes)]
        self._idle: asyncio.Queue[SandboxProcess[DecodeJob]] = asyncio.Queue()
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
        return [process.pid for process in self._processes if process.pid is not None]

    async def start(self) -> None:
        """Starts every process and loads the family there, so that the first request does not wait for it. Raises
        EncodeFailed."""
        starts = (self._start(process) for process in self._processes)
        for error in await asyncio.gather(*starts, return_exceptions=True):
            if error is not None:
                raise error

    async def decode(self, data: bytes, item: MediaItem, on_units: OnUnits) -> Decoded:
        if item.is_given:
            return Decoded([given_input(data, item)], 0.0)
        is_raw = item.modality == "audio" and item.cost <= self._max_raw_cost
        while True:
            hold = await self._memory.take(item.decode_bytes)
            if self._num_processes == 0:
                return await self._decode_here(hold, data, item, on_units, is_raw)
            try:
                process = await self._idle.get()
            except asyncio.CancelledError:
                hold.release()
                raise
            work = asyncio.create_task(self._decode_in(process, data, DecodeJob(item, is_raw), on_units))
            try:
                return await asyncio.shield(work)
            except SandboxDied as error:
                if error.had_job or error.death is Death.OVERDUE:
                    raise self._verdict(error, item) from error
                self._num_idle_deaths += 1
                logger.warning("a decode process died while it was idle (%d times in a row)", self._num_idle_deaths)
            finally:
                self._take_back(process, work, hold)

    async def _decode_in(
        self, process: SandboxProcess[DecodeJob], data: bytes, job: DecodeJob, on_units: OnUnits
    ) -> Decoded:
        """Decodes one item in a process. Raises SandboxDied, and what `decode_item` raises."""
        modality = job.item.modality
        limits = JobLimits(
            self._limits.cpu_s(modality),
            job.item.decode_bytes or self._limits.memory_bytes,
            self._limits.timeout_s(modality),
        )
        outcomes: list[object] = []

        def take(answer: object) -> None:
            if isinstance(answer, list):
                on_units(answer)
            else:
                outcomes.append(answer)

        await process.run(job, data, limits, take)
        (outcome,) = outcomes
        if isinstance(outcome, WeftError):
            raise outcome
        assert isinstance(outcome, Decoded)
        return outcome

    def _verdict(self, error: SandboxDied, item: MediaItem) -> InvalidMedia | MachineBusy | DecodeBroke:
        """Returns the error that says why an item's process ended."""
        if error.death is Death.OUT_OF_CPU:
            limit_s = self._limits.cpu_s(item.modality)
            message = f"decoding the medium takes more than {limit_s:g} s of processor time"
            return InvalidMedia(message, param=item.part)
        if error.death is Death.OVERDUE:
            limit_s = self._limits.timeout_s(item.modality)
            logger.warning("the decoding of %s did not end within %g s", item.mm_hash, limit_s)
            return MachineBusy(f"this machine is too busy to decode the medium within {limit_s:g} s", param=item.part)
        logger.warning("a decode process died while it decoded %s", item.mm_hash)
        return DecodeBroke(f"the process that decoded {item.mm_hash} has died")

    async def _decode_here(self, hold: Hold, data: bytes, item: MediaItem, on_units: OnUnits, is_raw: bool) -> Decoded:
        """Decodes in a thread of this process. The thread can't be ended, so it keeps its memory until it is done."""
        loop = asyncio.get_running_loop()

        def hand_over(units: list[EncoderInput]) -> None:
            loop.call_soon_threadsafe(on_units, units)

        work = loop.run_in_executor(self._threads, decode_item, self._family, data, item, hand_over, is_raw)
        work.add_done_callback(lambda _: hold.release())
        return await asyncio.shield(work)

    async def close(self) -> None:
        """Ends all processes, and ends each thread after its current item."""
        self._closed.set()
        await asyncio.gather(*(process.close() for process in self._processes))
        await asyncio.gather(*self._left, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)

    def _take_back(self, process: SandboxProcess[DecodeJob], work: asyncio.Task[Decoded], hold: Hold) -> None:
        """Makes a process idle again, now or soon, if it has answered in full; otherwise replaces it by a new one. The
        memory of the item returns to the budget once it is free."""
        if work.done() and process.is_ready:
            hold.release()
            self._answered(process)
            return
        task = asyncio.create_task(self._end(process, work, hold))
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    def _answered(self, process: SandboxProcess[DecodeJob]) -> None:
        self._num_idle_deaths = 0
        self._idle.put_nowait(process)

    async def _end(self, process: SandboxProcess[DecodeJob], work: asyncio.Task[Decoded], hold: Hold) -> None:
        await asyncio.wait([work], timeout=GRACE_S)
        if not work.done():
            process.kill()
            await asyncio.wait([work])
        hold.release()
        if process.is_ready:
            self._answered(process)
        else:
            await self._restart(process)

    async def _restart(self, process: SandboxProcess[DecodeJob]) -> None:
        """Starts a process in place of one that has ended, and retries until that succeeds."""
        while not self._closed.is_set():
            try:
                await self._start(process)
                return
            except EncodeFailed as error:
                logger.warning("%s (%d times in a row)", error, self._num_failed_starts)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), RETRY_PAUSE_S)

    async def _start(self, process: SandboxProcess[DecodeJob]) -> None:
        """Starts a process, which becomes idle once it has loaded the family. Raises EncodeFailed."""
        try:
            await process.start()
        except NotStarted as error:
            self._num_failed_starts += 1
            raise EncodeFailed(f"a decode process {error}") from error
        self._num_failed_starts = 0
        self._idle.put_nowait(process)


# ------------------------------------------------------------ the budget of memory


class ByteBudget:
    """A `ByteBudget` shares a fixed number of bytes among many takers. A taker that finds too few bytes left waits;
    takers are served in order of arrival. The budget knows nothing of what the bytes are for."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, num_bytes: int) -> Hold:
        """Waits until `num_bytes` are left and no earlier taker waits, then takes them. Callers must not ask for more
        than the whole budget. A cancelled call has taken nothing."""
        assert num_bytes <= self.num_bytes, f"{num_bytes} bytes exceed the whole budget of {self.num_bytes}"
        if self._waiting or not self._fits(num_bytes):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((num_bytes, turn))
            try:
                await turn  # `_serve` has already taken the bytes for this call
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.num_taken -= num_bytes
                else:
                    with contextlib.suppress(ValueError):  # `_serve` may already have removed it
                        self._waiting.remove((num_bytes, turn))
                self._serve()
                raise
        else:
            self.num_taken += num_bytes
        return Hold(self, num_bytes)

    def give_back(self, num_bytes: int) -> None:
        """Returns bytes to the budget; only holds call it."""
        self.num_taken -= num_bytes
        self._serve()

    def _fits(self, num_bytes: int) -> bool:
        return self.num_taken + num_bytes <= self.num_bytes

    def _serve(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            num_bytes, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.num_taken += num_bytes
                turn.set_result(None)


class Hold:
    """A `Hold` is a number of taken bytes. `release` returns them and may be called twice."""

    def __init__(self, budget: ByteBudget, num_bytes: int) -> None:
        self._budget: ByteBudget | None = budget
        self._num_bytes = num_bytes

    def release(self) -> None:
        budget, self._budget = self._budget, None
        if budget is not None:
            budget.give_back(self._num_bytes)

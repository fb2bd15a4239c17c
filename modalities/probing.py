"""Probes media outside of the serving process, because reading a hostile file may crash the process, hang it or exhaust
its memory.

Each helper process probes one file at a time. So a file that kills its helper, or takes too much processor time or
memory, fails alone, and the helper is replaced. A file that is only late because the machine is too busy is not refused
as broken. Helpers are spawned and never forked, since threads of NIXL and gRPC exist, and each helper ends with its
parent. This module knows nothing of requests or models.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Generic, NamedTuple, TypeVar

from fabric.errors import InvalidMedia, MachineBusy, NoCapacity, Overloaded, WeftError
from fabric.helper_process import (
    bind_to_parent,
    exit_code_of,
    is_killed_by_system,
    is_out_of_cpu,
    limit_memory,
    limited,
)
from modalities.family import MediaHeader
from modalities.plugin import ModalityPlugin
from modalities.registry import REGISTRY, Registry

logger = logging.getLogger(__name__)
T = TypeVar("T")

START_TIMEOUT_S = 60.0
"""Limits the time for a helper's interpreter and imports to start, on a machine under load."""


MODALITY_TO_CPU_S = {"image": 1.0}
"""Limits the processor time per file for the modalities named here. The header of a picture takes milliseconds."""
OTHER_CPU_S = 5.0
"""Limits the processor time per file for all other modalities. Containers are read to their end: an hour of video takes
about a second."""


class ProbeLimits(NamedTuple):
    """Holds the limits for one item in a helper process. A thread of this process has no limits because it can't be
    ended."""

    modality_to_cpu_s: Mapping[str, float] = MODALITY_TO_CPU_S
    """Limits the helper's processor time; a file that takes more is refused. `OTHER_CPU_S` applies to the modalities
    that are not listed."""
    memory_bytes: int = 2 * 2**30
    """Limits the data of the helper process, as Linux counts them; the interpreter's own data are a part of them."""
    timeout_s: float = 15.0
    """Limits the time by the clock. If a file takes longer but stays within its processor time, the machine counts as
    too busy."""
    wait_s: float = 10.0
    """Limits the wait for an idle helper. Requests that wait keep their place among the admitted requests."""

    def cpu_s(self, modality: str) -> float:
        return self.modality_to_cpu_s.get(modality, OTHER_CPU_S)


DEFAULT_LIMITS = ProbeLimits()


def shipped_registry() -> Registry:
    """Returns the registry that helpers use unless the pool is given another one."""
    return REGISTRY


class InTurn(Generic[T]):
    """An `InTurn` hands out objects that have one user at a time, to waiting tasks in the order of their arrival.
    (asyncio's queue wakes the first waiting task, but lets a newcomer take the object for which that task was woken.)
    It belongs to one event loop."""

    def __init__(self, free: Iterable[T]) -> None:
        self._free = list(free)
        self._waiting: deque[asyncio.Future[T]] = deque()

    async def take(self, timeout_s: float) -> T:
        """Returns the object that was given back last, or the next one that is given back to this task. Raises
        TimeoutError if there is none within `timeout_s`."""
        if self._free:
            return self._free.pop()
        turn: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(timeout_s):
                return await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.give_back(turn.result())
            else:
                # `give_back` may have already removed it in the same turn of the event loop.
                with contextlib.suppress(ValueError):
                    self._waiting.remove(turn)
            raise

    def give_back(self, one: T) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(one)
                return
        self._free.append(one)


class ProbePool:
    """Probes files in `num_processes` helpers, or in one thread of this process if the number is 0. It belongs to one
    event loop.

    `registry` is called here and in every helper. It must be a function of a module, and serves modalities that are
    registered from outside."""

    def __init__(
        self,
        num_processes: int = 1,
        limits: ProbeLimits = DEFAULT_LIMITS,
        registry: Callable[[], Registry] = shipped_registry,
    ) -> None:
        self._registry = registry()
        self._limits = limits
        # A helper belongs to the thread that spawned it and dies with that thread, so no thread ends before `close`.
        self._threads = ThreadPoolExecutor(max(1, num_processes), thread_name_prefix="probe")
        self._helpers = [_Helper(limits, registry) for _ in range(num_processes)]
        self._idle = InTurn(self._helpers)

    async def start(self) -> None:
        """Starts every helper, so that the first request does not wait for it. Raises NoCapacity if a helper can't be
        started."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._threads, helper.start) for helper in self._helpers))

    async def probe(self, modality: str, data: bytes, param: str) -> MediaHeader:
        """Returns the header that the plugin of `modality` finds. The plugin runs in a helper if it needs one, and
        otherwise directly here.

        Calls wait for an idle helper in the order of their arrival. Raises UnsupportedModality if the modality is
        unknown, and InvalidMedia (naming `param`) if the file is broken, kills its helper, or takes too much processor
        time or memory. Raises Overloaded if no helper becomes idle within the limit, MachineBusy if the helper does not
        get its processor time within the limit, and NoCapacity if no helper can be started."""
        plugin = self._registry.modality(modality)
        if not plugin.needs_process:
            return plugin.probe(data, param)
        loop = asyncio.get_running_loop()
        if not self._helpers:
            return await loop.run_in_executor(self._threads, _probe, plugin, data, param)
        helper = await self._idle_helper()
        gone = threading.Event()
        work = loop.run_in_executor(self._threads, helper.probe, modality, data, param, gone)
        work.add_done_callback(lambda _: self._idle.give_back(helper))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            gone.set()
            helper.end(gone)
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    async def close(self) -> None:
        """Ends helpers and threads at once, and returns when they have ended. Probes in progress fail."""
        for helper in self._helpers:
            helper.close()
        await asyncio.to_thread(self._threads.shutdown, True, cancel_futures=True)
        for helper in self._helpers:
            await asyncio.to_thread(helper.release)

    async def _idle_helper(self) -> _Helper:
        """Returns an idle helper. Raises Overloaded if none becomes idle within the limit."""
        try:
            return await self._idle.take(self._limits.wait_s)
        except TimeoutError as error:
            message = f"no helper was free to read a file within {self._limits.wait_s:g} s"
            raise Overloaded(message, retry_after_s=self._limits.timeout_s) from error

    @property
    def num_busy(self) -> int:
        """Counts the helpers that read a file now."""
        return sum(helper.is_busy for helper in self._helpers)

    @property
    def num_replaced(self) -> int:
        """Counts the helpers that died or had to be ended since the start."""
        return sum(helper.num_ended for helper in self._helpers)


class _Helper:
    """A `_Helper` is one process and the pipe to it. One thread uses it at a time."""

    def __init__(self, limits: ProbeLimits, registry: Callable[[], Registry]) -> None:
        self._limits = limits
        self._registry = registry
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._lock = threading.Lock()
        """Protects `_item` while a thread kills the process because of it, so that the kill never hits the next
        item."""
        self._item: threading.Event | None = None
        """Holds the `gone` event of the call that the process serves, or None."""
        self._is_closed = False
        self.num_ended = 0

    @property
    def is_busy(self) -> bool:
        return self._item is not None

    def start(self) -> None:
        """Starts the process if none is alive. Blocks until it is ready. Raises NoCapacity if it can't be started."""
        if self._process is not None:
            assert self._pipe is not None
            # A pipe that is readable out of turn is closed at its other end.
            if self._process.is_alive() and not self._pipe.poll(0):
                return
            self._clear()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(theirs, os.getpid(), self._limits, self._registry),
            daemon=True,
            name="probe",
        )
        try:
            self._process.start()
            theirs.close()
            is_ready = not self._is_closed and self._pipe.poll(START_TIMEOUT_S) and self._pipe.recv() is None
        except (EOFError, OSError):
            is_ready = False
        if not is_ready:
            self._clear()
            raise NoCapacity("a helper process for probing could not be started")

    def probe(self, modality: str, data: bytes, param: str, gone: threading.Event) -> MediaHeader:
        """Probes a file in the process. Blocks at most for the limit and the start of a process. `gone` is set when no
        caller waits for the result any more. Raises InvalidMedia if the file is broken or ends the process, MachineBusy
        if the machine is too busy, and NoCapacity if no process can be started or no caller waits."""
        pipe = self._announce(modality, param)
        overdue = threading.Event()
        self._item = gone
        watch = threading.Timer(self._limits.timeout_s, self._end_overdue, (gone, overdue))
        watch.daemon = True
        watch.start()
        try:
            if gone.is_set():
                raise EOFError  # The result is the same as if `end` had been called in time.
            pipe.send_bytes(data)
            found: MediaHeader | WeftError = pipe.recv()
        except (EOFError, OSError) as error:
            exit_code = self._clear()
            self.num_ended += 1
            if self._is_closed or gone.is_set():
                raise NoCapacity("nobody waits for this file any more") from error
            logger.warning("a probe of %d bytes (%s) ended its process (%s)", len(data), modality, exit_code)
            raise self._verdict(modality, param, exit_code, overdue.is_set()) from error
        finally:
            watch.cancel()
            with self._lock:
                self._item = None
        if isinstance(found, WeftError):
            raise found
        return found

    def _verdict(self, modality: str, param: str, exit_code: int | None, is_overdue: bool) -> WeftError:
        """Returns the error that says why a file's process ended."""
        if is_out_of_cpu(exit_code):
            why = f"reading it takes more than {self._limits.cpu_s(modality):g} s of processor time"
            return InvalidMedia(f"{param}: {why}", param=param)
        if is_overdue or is_killed_by_system(exit_code):
            why = f"within {self._limits.timeout_s:g} s" if is_overdue else "in the memory that is left"
            return MachineBusy(f"{param}: this machine is too busy to read the file {why}", param=param)
        return InvalidMedia(f"{param}: the file could not be read without breaking its reader", param=param)

    def _announce(self, modality: str, param: str) -> Connection:
        """Announces a file to the process and returns the pipe. This step detects a process that died or was stopped
        while it was idle, so that no file is blamed for it. Raises NoCapacity if two attempts fail."""
        for _ in range(2):
            self.start()
            assert self._pipe is not None
            try:
                self._pipe.send((modality, param))
                if self._pipe.poll(self._limits.timeout_s) and self._pipe.recv() is None:
                    return self._pipe
            except (EOFError, OSError):
                pass
            logger.warning("a process for probing died or was stopped idle")
            self._clear()
        raise NoCapacity("helper processes for probing do not live")

    def end(self, gone: threading.Event) -> None:
        """Kills the process if it still works for the call with this event. Any thread may call it. The next probe
        starts another process."""
        with self._lock:
            if self._item is gone and self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """Kills the process and marks the helper as closed, so that it serves no further file."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()

    def release(self) -> None:
        """Blocks until the process of a closed helper has ended. It must be called only when no thread uses the helper
        any more."""
        if self._process is not None:
            self._clear()

    def _end_overdue(self, gone: threading.Event, overdue: threading.Event) -> None:
        with self._lock:
            if self._item is gone and self._process is not None:
                overdue.set()
                self._process.kill()

    def _clear(self) -> int | None:
        """Ends the process and returns its exit code."""
        process, pipe = self._process, self._pipe
        assert process is not None
        assert pipe is not None
        with self._lock:
            self._process = self._pipe = self._item = None
        process.kill()
        exit_code = exit_code_of(process)
        pipe.close()
        return exit_code


def _serve(pipe: Connection, parent_pid: int, limits: ProbeLimits, registry: Callable[[], Registry]) -> None:
    """Runs the loop of a helper process, which ends when the parent closes the pipe."""
    bind_to_parent(parent_pid)
    plugins = registry()
    limit_memory(limits.memory_bytes)
    pipe.send(None)
    while True:
        try:
            modality, param = pipe.recv()
            pipe.send(None)
            data = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            with limited(limits.cpu_s(modality)):
                found: object = _probe(plugins.modality(modality), data, param)
        except WeftError as error:
            found = error
        pipe.send(found)


def _probe(plugin: ModalityPlugin, data: bytes, param: str) -> MediaHeader:
    try:
        return plugin.probe(data, param)
    except WeftError:
        raise
    except MemoryError as error:
        raise InvalidMedia(f"{param}: reading it takes more memory than it may", param=param) from error
    except Exception as error:  # This runs in the loop of a helper process: a bug on one file must not end the loop.
        logger.exception("probing a file of %d bytes (%s) failed", len(data), plugin.modality)
        raise InvalidMedia(f"{param}: the file could not be read", param=param) from error

"""Probing media outside of the serving process: what walks a hostile file may crash, hang or grow there.

Each helper process probes one file at a time, so a file that kills its helper, or takes it too much processor time or
memory, fails alone, and the helper is replaced. A file that is only late, because the machine did not get to it, is not
to blame. Spawned, never forked (threads of NIXL and gRPC exist); each helper ends with its parent. Knows nothing of
requests and models.
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
"""For a helper's interpreter and imports, on a machine under load."""


MODALITY_TO_CPU_S = {"image": 1.0}
"""A header of a picture takes milliseconds."""
OTHER_CPU_S = 5.0
"""Containers are walked to their end: an hour of video takes about a second."""


class ProbeLimits(NamedTuple):
    """Of one item, in a helper process. A thread of this process has none: it can't be ended."""

    modality_to_cpu_s: Mapping[str, float] = MODALITY_TO_CPU_S
    """Processor time of the helper; a file that takes it more is refused. `OTHER_CPU_S` for those that are not here."""
    memory_bytes: int = 2 * 2**30
    """Of the process, as Linux counts its data; the interpreter's own is a part of it."""
    timeout_s: float = 15.0
    """By the clock. What takes longer with less processor time than it may have met a machine that is too busy."""
    wait_s: float = 10.0
    """For a helper that is idle: those who wait hold their place among the requests that are admitted."""

    def cpu_s(self, modality: str) -> float:
        return self.modality_to_cpu_s.get(modality, OTHER_CPU_S)


DEFAULT_LIMITS = ProbeLimits()


def shipped_registry() -> Registry:
    """What a helper knows, unless told otherwise."""
    return REGISTRY


class InTurn(Generic[T]):
    """Things that one at a time may have, handed to those who wait for one in the order in which they came. (The queue
    of asyncio wakes the first of them, and lets a newcomer take what it was woken for.) Lives in one event loop."""

    def __init__(self, free: Iterable[T]) -> None:
        self._free = list(free)
        self._waiting: deque[asyncio.Future[T]] = deque()

    async def take(self, timeout_s: float) -> T:
        """The one that was given back last, or the next that is. Raises TimeoutError."""
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
                with contextlib.suppress(ValueError):  # `give_back` may have passed it over in the same turn
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
    """Probes with `num_processes` helpers (0: in one thread of this process). Lives in one event loop.

    `registry` is called here and in every helper: a function of a module, for modalities that are registered from
    outside."""

    def __init__(
        self,
        num_processes: int = 1,
        limits: ProbeLimits = DEFAULT_LIMITS,
        registry: Callable[[], Registry] = shipped_registry,
    ) -> None:
        self._registry = registry()
        self._limits = limits
        # A helper belongs to the thread that spawned it, and dies with that: threads are never given up before close.
        self._threads = ThreadPoolExecutor(max(1, num_processes), thread_name_prefix="probe")
        self._helpers = [_Helper(limits, registry) for _ in range(num_processes)]
        self._idle = InTurn(self._helpers)

    async def start(self) -> None:
        """Starts every helper, so that the first request doesn't wait for it. Raises NoCapacity if one can't be
        started."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._threads, helper.start) for helper in self._helpers))

    async def probe(self, modality: str, data: bytes, param: str) -> MediaHeader:
        """What the plugin of `modality` finds; in a helper if the plugin needs one, else at once.

        Waits for a helper that is idle, in the order of the calls. Raises UnsupportedModality, InvalidMedia (naming
        `param`) for a file that is broken, kills its helper, or takes it too much processor time or memory; Overloaded
        if no helper becomes idle within the limit, MachineBusy if the helper was not given its processor time within
        the limit; NoCapacity if none can be started."""
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
        """Ends helpers and threads at once, and returns when they are gone; what is being probed fails."""
        for helper in self._helpers:
            helper.close()
        await asyncio.to_thread(self._threads.shutdown, True, cancel_futures=True)
        for helper in self._helpers:
            await asyncio.to_thread(helper.release)

    async def _idle_helper(self) -> _Helper:
        """Raises Overloaded."""
        try:
            return await self._idle.take(self._limits.wait_s)
        except TimeoutError as error:
            message = f"no helper was free to read a file within {self._limits.wait_s:g} s"
            raise Overloaded(message, retry_after_s=self._limits.timeout_s) from error

    @property
    def num_busy(self) -> int:
        """Helpers that read a file."""
        return sum(helper.is_busy for helper in self._helpers)

    @property
    def num_replaced(self) -> int:
        """Helpers that died or had to be ended, since the start."""
        return sum(helper.num_ended for helper in self._helpers)


class _Helper:
    """One process and the pipe to it, used by one thread at a time."""

    def __init__(self, limits: ProbeLimits, registry: Callable[[], Registry]) -> None:
        self._limits = limits
        self._registry = registry
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._lock = threading.Lock()
        """Holds `_item` while somebody ends the process over it, so that the next item is never hit."""
        self._item: threading.Event | None = None
        """The `gone` of the call that is served."""
        self._is_closed = False
        self.num_ended = 0

    @property
    def is_busy(self) -> bool:
        return self._item is not None

    def start(self) -> None:
        """Blocks until a process is ready. Raises NoCapacity."""
        if self._process is not None:
            assert self._pipe is not None
            if self._process.is_alive() and not self._pipe.poll(0):  # readable out of turn: its end, at the other end
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
        """Blocks, at most for the limit (and a start). `gone`: nobody waits for it any more. Raises InvalidMedia,
        MachineBusy, NoCapacity."""
        pipe = self._announce(modality, param)
        overdue = threading.Event()
        self._item = gone
        watch = threading.Timer(self._limits.timeout_s, self._end_overdue, (gone, overdue))
        watch.daemon = True
        watch.start()
        try:
            if gone.is_set():
                raise EOFError  # as if `end` had come in time
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
        """Why a file's process ended."""
        if is_out_of_cpu(exit_code):
            why = f"reading it takes more than {self._limits.cpu_s(modality):g} s of processor time"
            return InvalidMedia(f"{param}: {why}", param=param)
        if is_overdue or is_killed_by_system(exit_code):
            why = f"within {self._limits.timeout_s:g} s" if is_overdue else "in the memory that is left"
            return MachineBusy(f"{param}: this machine is too busy to read the file {why}", param=param)
        return InvalidMedia(f"{param}: the file could not be read without breaking its reader", param=param)

    def _announce(self, modality: str, param: str) -> Connection:
        """A file is coming. A process that died, or was stopped, while it was idle is found out here, and no file is
        blamed."""
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
        """Ends the process if it is at work for the call with this event, and for no other by now; from any thread.
        The next probe starts another."""
        with self._lock:
            if self._item is gone and self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """Ends the process for good."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()

    def release(self) -> None:
        """Blocks until the process of a closed helper is gone. Only when no thread uses it any more."""
        if self._process is not None:
            self._clear()

    def _end_overdue(self, gone: threading.Event, overdue: threading.Event) -> None:
        with self._lock:
            if self._item is gone and self._process is not None:
                overdue.set()
                self._process.kill()

    def _clear(self) -> int | None:
        """Ends the process, and returns how it ended."""
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
    """The loop of a helper process; ends when the parent closes the pipe."""
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
    except Exception as error:  # the loop of a helper process: a bug on one file must not end the others
        logger.exception("probing a file of %d bytes (%s) failed", len(data), plugin.modality)
        raise InvalidMedia(f"{param}: the file could not be read", param=param) from error

"""Probes media outside of the serving process, because reading a hostile file may crash the process, hang it or exhaust
its memory.

Each helper process probes one file at a time. So a file that kills its helper, or takes too much processor time or
memory, fails alone, and the helper is replaced. A file that is only late because the machine is too busy is not refused
as broken. The helpers are sandboxes (`fabric/sandbox/`). This module knows nothing of requests or models.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, NamedTuple, TypeVar, cast

from fabric.contracts import InvalidMedia, MachineBusy, NoCapacity, Overloaded, WeftError
from fabric.sandbox import Death, JobLimits, NotStarted, RunJob, SandboxDied, SandboxProcess
from modalities.family import MediaHeader
from modalities.media import ModalityPlugin
from modalities.registry import REGISTRY, Registry

logger = logging.getLogger(__name__)
T = TypeVar("T")

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
        except (TimeoutError, asyncio.CancelledError):
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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="probe")
        """Has the thread that probes if there are no helpers."""
        self._helpers = [_Helper(limits, registry) for _ in range(num_processes)]
        self._idle = InTurn(self._helpers)

    async def start(self) -> None:
        """Starts every helper, so that the first request does not wait for it. Raises NoCapacity if a helper can't be
        started."""
        await asyncio.gather(*(helper.start() for helper in self._helpers))

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
        if not self._helpers:
            return await asyncio.get_running_loop().run_in_executor(self._thread, _probe, plugin, data, param)
        helper = await self._idle_helper()
        try:
            return await helper.probe(modality, data, param)
        finally:
            self._idle.give_back(helper)

    async def close(self) -> None:
        """Ends helpers and threads at once, and returns when they have ended. Probes in progress fail."""
        await asyncio.gather(*(helper.process.close() for helper in self._helpers))
        await asyncio.to_thread(self._thread.shutdown, True, cancel_futures=True)

    async def _idle_helper(self) -> _Helper:
        """Returns an idle helper. Raises Overloaded if none becomes idle within the limit."""
        try:
            return await self._idle.take(self._limits.wait_s)
        except TimeoutError as error:
            message = f"every process that reads the headers of media was busy for {self._limits.wait_s:g} s"
            raise Overloaded(message, retry_after_s=self._limits.timeout_s) from error

    @property
    def num_busy(self) -> int:
        """Counts the helpers that read a file now."""
        return sum(helper.process.is_busy for helper in self._helpers)

    @property
    def num_replaced(self) -> int:
        """Counts the helpers that died or had to be ended since the start."""
        return sum(helper.num_ended for helper in self._helpers)


class _Helper:
    """A `_Helper` probes in one process, and says what its death means for a file. One task uses it at a time."""

    def __init__(self, limits: ProbeLimits, registry: Callable[[], Registry]) -> None:
        self._limits = limits
        self.process = SandboxProcess(partial(_enter, registry), limits.memory_bytes, "probe")
        self.num_ended = 0

    async def start(self) -> None:
        """Starts the process if none is alive. Raises NoCapacity if it can't be started."""
        try:
            await self.process.start()
        except NotStarted as error:
            raise NoCapacity("a process that reads the headers of media could not be started") from error

    async def probe(self, modality: str, data: bytes, param: str) -> MediaHeader:
        """Probes a file in the process. A process that died or was stopped while it was idle is replaced, once. Raises
        InvalidMedia if the file is broken or ends the process, MachineBusy if the machine is too busy, and NoCapacity
        if no process can be started or the pool is closed. Cancelling the call ends the process."""
        limits = JobLimits(self._limits.cpu_s(modality), self._limits.memory_bytes, self._limits.timeout_s)
        for _ in range(2):
            await self.start()
            answers: list[object] = []
            try:
                await self.process.run((modality, param), data, limits, answers.append)
            except SandboxDied as error:
                if error.had_job:
                    self.num_ended += 1
                    raise self._verdict(modality, data, param, error) from error
                logger.warning("a process that reads the headers of media died or was stopped while it was idle")
            except asyncio.CancelledError:
                self.num_ended += not self.process.is_ready
                raise
            else:
                return _header(answers)
        raise NoCapacity("processes that read the headers of media die before they get their first file")

    def _verdict(self, modality: str, data: bytes, param: str, error: SandboxDied) -> WeftError:
        """Returns the error that says why a file's process ended."""
        if error.death is Death.ENDED:
            return NoCapacity(f"{param}: the process that read the file was stopped")
        logger.warning(
            "the process that read the header of a file ended: modality %s, %d bytes, exit code %s",
            modality,
            len(data),
            error.exit_code,
        )
        if error.death is Death.OUT_OF_CPU:
            why = f"reading the file takes more than {self._limits.cpu_s(modality):g} s of processor time"
            return InvalidMedia(f"{param}: {why}", param=param)
        if error.death is Death.OVERDUE:
            why = f"this machine is too busy to read the file within {self._limits.timeout_s:g} s"
            return MachineBusy(f"{param}: {why}", param=param)
        if error.death is Death.KILLED:
            return MachineBusy(f"{param}: this machine is too busy to read the file: its memory is full", param=param)
        return InvalidMedia(f"{param}: the file is broken: the process that read it crashed", param=param)


def _header(answers: list[object]) -> MediaHeader:
    """Returns the header that a process has answered, or raises the error that it has answered."""
    (found,) = answers
    if isinstance(found, WeftError):
        raise found
    return cast(MediaHeader, found)


def _enter(registry: Callable[[], Registry]) -> RunJob[tuple[str, str]]:
    """Returns the function that probes in a helper process, for jobs of a modality and the file's place."""
    plugins = registry()

    def probe(job: tuple[str, str], data: bytes, answer: Callable[[object], None]) -> None:
        modality, param = job
        try:
            answer(_probe(plugins.modality(modality), data, param))
        except WeftError as error:
            answer(error)

    return probe


def _probe(plugin: ModalityPlugin, data: bytes, param: str) -> MediaHeader:
    try:
        return plugin.probe(data, param)
    except WeftError:
        raise
    except MemoryError as error:
        raise InvalidMedia(f"{param}: reading the file needs more memory than the limit", param=param) from error
    except Exception as error:
        # This is one job of the loop of a helper process, which knows no requests: a bug on one file must not end the
        # loop. The error ends the request that asks for the header.
        logger.exception("the header of a file could not be read: modality %s, %d bytes", plugin.modality, len(data))
        raise InvalidMedia(f"{param}: the file could not be read", param=param) from error

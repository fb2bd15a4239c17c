"""Runs one spawned process that works on one job at a time, and replaces it after its death.

The process is spawned and never forked, because threads of NIXL and gRPC exist. It ends with its parent. A job travels
in two steps: the process first acknowledges the job's description, and then receives the client's bytes. So a process
that died or was stopped while it was idle is noticed before a job can be blamed for it. The parent ends a process that
exceeds its deadline by SIGKILL, which a stopped process obeys too. The process trusts its parent, whose jobs are
pickles. The parent does not trust the process, because a client's file may have taken it over: answers are plain values
of limited size (`array_pipe`). The module does not know what the jobs are, and it makes no decision about trying a job
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, NamedTuple, ParamSpec, TypeVar, cast

from fabric.sandbox.array_pipe import receive, send
from fabric.sandbox.limits import bind_to_parent, limit_memory, limited
from fabric.sandbox.message_values import NotAMessage

logger = logging.getLogger(__name__)
J = TypeVar("J")
T = TypeVar("T")
P = ParamSpec("P")

RunJob = Callable[[J, bytes, Callable[[object], None]], None]
"""Works on one job inside the process: it takes the job's description, the client's bytes, and a function that sends an
answer to the parent: plain values, as `message_values` has them. What it raises ends the process."""

START_TIMEOUT_S = 60.0
"""Limits the start of a process's interpreter and its imports on a machine under load."""
_READY = "ready"
"""Marks the first message of a process."""
END_TIMEOUT_S = 1.0
"""A process that has closed its pipe gets this much time to end by itself, so that its own exit code is known."""


class JobLimits(NamedTuple):
    """Holds the limits of one job."""

    cpu_s: float
    """Limits the processor time of the process, over all its threads; the kernel ends a process that takes more."""
    memory_bytes: int
    """Limits the data that the process may take beyond what it has when the job begins; allocations fail beyond it."""
    timeout_s: float
    """Limits the time by the clock, from the hand-over of the job on; the parent ends a process that takes more."""


class Death(Enum):
    """Says why a process ended."""

    OUT_OF_CPU = auto()
    """The job has spent its processor time."""
    OVERDUE = auto()
    """The job has exceeded its deadline with processor time left: the machine is too busy, or it was stopped."""
    KILLED = auto()
    """The process was killed from outside of Weft; usually the system does this when the machine is out of memory."""
    ENDED = auto()
    """The process was ended by its owner, with `kill` or `close`."""
    CRASHED = auto()
    """The process ended in any other way, or it wrote something that is no answer to its job."""


class SandboxDied(Exception):
    """Means that the process ended before it had answered its job in full."""

    def __init__(self, death: Death, had_job: bool, exit_code: int | None) -> None:
        moment = "during its job" if had_job else "before its job began"
        super().__init__(f"the process ended {moment} (cause {death.name.lower()}, exit code {exit_code})")
        self.death = death
        self.had_job = had_job
        """This is False if the process had not acknowledged the job yet, so that the job can't be the cause."""
        self.exit_code = exit_code


class NotStarted(Exception):
    """Means that a process could not be started."""


class SandboxProcess(Generic[J]):
    """A `SandboxProcess` is the parent's side of one process, and of those that replace it. It belongs to one event
    loop and has one user at a time."""

    def __init__(self, enter: Callable[[], RunJob[J]], memory_bytes: int, name: str) -> None:
        """Starts nothing yet. `enter` runs once in each new process and returns the function that works on jobs; it
        must be importable there. `memory_bytes` limits the data of the process as Linux counts it, the interpreter's
        own included."""
        self._enter = enter
        self._memory_bytes = memory_bytes
        self._name = name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        """Has the one thread that spawns the process and waits for its answers. The process would die with the thread
        that spawned it (`bind_to_parent`), so this thread lives until `close`."""
        self._lock = threading.Lock()
        """Protects the four fields below, which the thread and the event loop change."""
        self._is_working = False
        """This is True while the thread works on a call. A deadline or a cancelled call that comes after the last
        answer ends no process."""
        self._process: BaseProcess | None = None
        self._pid: int | None = None
        self._cause: Death | None = None
        """Holds the reason for which this side ended the process, if it did."""
        self._pipe: Connection | None = None
        self._is_closed = False
        self._num_jobs = 0
        """This is the number of the newest job; the answers to a job carry its number."""
        self.is_busy = False
        """This is True while the process has a job."""

    @property
    def pid(self) -> int | None:
        """Returns the id of the process, or None if there is none."""
        return self._pid

    @property
    def is_ready(self) -> bool:
        """Returns whether the process is alive and owes no answer. It must not be asked during a call."""
        if self._process is None or self._pipe is None or self._cause is not None:
            return False
        # A pipe that is readable out of turn is closed at its other end, or the process is out of step.
        return self._process.is_alive() and not self._pipe.poll(0)

    async def start(self) -> None:
        """Starts the process unless it is ready, and returns when it is. Raises NotStarted."""
        if self._is_closed:
            raise NotStarted("is closed")
        if not self.is_ready:
            await self._in_thread(self._spawn)

    async def run(self, job: J, data: bytes, limits: JobLimits, on_answer: Callable[[object], None]) -> None:
        """Has the process work on one job, and returns when the job is done. Calls `on_answer` in the event loop with
        each answer, in order. Raises SandboxDied; the process has then ended, and `start` replaces it. Cancelling the
        call ends the process, and the call returns after that."""
        if self._is_closed:
            raise SandboxDied(Death.ENDED, False, None)
        loop = asyncio.get_running_loop()

        def deliver(answer: object) -> None:
            loop.call_soon_threadsafe(on_answer, answer)

        watch = loop.call_later(limits.timeout_s, self._interrupt, Death.OVERDUE)
        try:
            await self._in_thread(self._exchange, job, data, limits, deliver)
        finally:
            watch.cancel()

    def kill(self) -> None:
        """Ends the process at once; a call in progress raises SandboxDied or NotStarted. Idempotent."""
        with self._lock:
            self._end(Death.ENDED)

    async def close(self) -> None:
        """Ends the process for good, and returns when it has ended. Calls in progress and later ones fail.
        Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.kill()
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._reap, 0.0)
            finally:
                self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Runs `work` in the thread and waits for its end, even if the call is cancelled."""

        def working() -> T:
            try:
                return work(*arguments, **options)
            finally:
                with self._lock:
                    self._is_working = False

        with self._lock:
            self._is_working, self._cause = True, None
        running = asyncio.get_running_loop().run_in_executor(self._thread, working)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._interrupt(Death.ENDED)
            while not running.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            raise

    def _interrupt(self, cause: Death) -> None:
        with self._lock:
            if self._is_working:
                self._end(cause)

    def _end(self, cause: Death) -> None:
        """Ends the process; the caller has the lock."""
        self._cause = self._cause or cause
        if self._process is not None:
            self._process.kill()

    # ------------------------------------------------------------ the thread

    def _spawn(self) -> None:
        """Starts a process in place of the last one, and blocks until it is ready. Raises NotStarted."""
        self._reap(0.0)
        context = multiprocessing.get_context("spawn")
        try:
            self._pipe, theirs = context.Pipe()
            with theirs:
                process = context.Process(
                    target=serve_jobs,
                    args=(theirs, os.getpid(), self._enter, self._memory_bytes),
                    name=self._name,
                    daemon=True,
                )
                process.start()
        except OSError as error:
            self._reap(0.0)
            raise NotStarted("could not be started") from error
        with self._lock:
            self._process, self._pid = process, process.pid
            if self._cause is not None:  # The call was cancelled meanwhile, or the owner has closed this object.
                process.kill()
        is_ready = False
        try:
            is_ready = self._pipe.poll(START_TIMEOUT_S) and receive(self._pipe, self._memory_bytes) == _READY
        except (EOFError, OSError, NotAMessage):
            pass
        finally:
            if not is_ready:
                self._reap(0.0)
        if not is_ready:
            raise NotStarted("died at its start")

    def _exchange(self, job: J, data: bytes, limits: JobLimits, deliver: Callable[[object], None]) -> None:
        """Hands a job over and delivers its answers. Raises SandboxDied."""
        self._num_jobs += 1
        is_done = False
        try:
            pipe = self._pipe
            if pipe is None:
                raise EOFError
            pipe.send((self._num_jobs, job, limits.cpu_s, limits.memory_bytes))
            if self._receive(pipe):
                raise NotAMessage("an answer came before the acknowledgement of the job")
            self.is_busy = True
            pipe.send_bytes(data)
            while answers := self._receive(pipe):
                deliver(answers[0])
            is_done = True
        except (EOFError, OSError) as error:
            raise self._reap(END_TIMEOUT_S) from error
        except NotAMessage as error:
            logger.error("the process %s does not follow the protocol and is ended: %s", self._name, error)
            raise self._reap(0.0) from error
        finally:
            self.is_busy = False
            if not is_done:  # An answer that could not be read, for lack of memory, must not become the next job's.
                self._reap(0.0)

    def _receive(self, pipe: Connection) -> tuple[object, ...]:
        """Returns the next answer to the current job, or () at its acknowledgement and at its end."""
        message = receive(pipe, self._memory_bytes)
        number, *answers = message if isinstance(message, tuple) and message else (message,)
        if not isinstance(number, int) or number != self._num_jobs:
            raise NotAMessage(f"the process answers job {number!r:.80}, not job {self._num_jobs}")
        return tuple(answers)

    def _reap(self, patience_s: float) -> SandboxDied:
        """Ends the process, if there is one, and returns how it ended. A process that has closed its pipe gets
        `patience_s` to end by itself."""
        with self._lock:
            process, pipe, self._process, self._pipe, self._pid = self._process, self._pipe, None, None, None
        exit_code, is_ended_here = None, False
        if process is not None:
            is_ended_here = not wait([process.sentinel], patience_s)
            process.kill()
            exit_code = exit_code_of(process)
            if exit_code is not None:
                process.close()
        if pipe is not None:
            pipe.close()
        return SandboxDied(self._death(exit_code, is_ended_here), self.is_busy, exit_code)

    def _death(self, exit_code: int | None, is_ended_here: bool) -> Death:
        if exit_code == -signal.SIGPROF:  # `limited` has set the timer that sends this signal.
            return Death.OUT_OF_CPU
        if self._cause is not None:
            return self._cause
        if exit_code == -signal.SIGKILL and not is_ended_here:
            return Death.KILLED
        return Death.CRASHED


def exit_code_of(process: BaseProcess, timeout_s: float = 5.0) -> int | None:
    """Blocks until a child process has ended, and returns its exit code, as in `Process.exitcode`. It returns None if
    the code is still unknown after `timeout_s`.

    Each start of a process makes `multiprocessing` ask the kernel about all children. If a thread that starts a process
    learns first that this child has ended, the thread that waits gets no exit code, and the code is recorded a moment
    later.
    """
    process.join()
    deadline_s = time.monotonic() + timeout_s
    while process.exitcode is None and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return process.exitcode


def serve_jobs(pipe: Connection, parent_pid: int, enter: Callable[[], RunJob[J]], memory_bytes: int) -> None:
    """Runs the process: it works on jobs until the parent closes its end of the pipe."""
    bind_to_parent(parent_pid)
    run_job = enter()
    limit_memory(memory_bytes)
    send(pipe, _READY)
    while True:
        try:
            number, job, cpu_s, more_bytes = cast(tuple[int, J, float, int], pipe.recv())
            send(pipe, (number,))
            data = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        with limited(cpu_s, more_bytes):
            run_job(job, data, partial(_answer, pipe, number))
        del job, data  # otherwise their memory would count against the next job
        send(pipe, (number,))


def _answer(pipe: Connection, number: int, answer: object) -> None:
    if isinstance(answer, BaseException):  # Its frames would keep the job's data alive.
        answer.__cause__ = answer.__context__ = None
        answer = answer.with_traceback(None)
    send(pipe, (number, answer))

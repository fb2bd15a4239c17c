"""Checks sandboxes under both of their users, the prober and the decoder: each process may be killed by its limits, by
its deadline, by the system or by its file, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from sandbox_users import USERS, SandboxUser

from encoder_pool.decoder import DecodeBroke
from fabric.contracts import EncodeFailed, InvalidMedia, MachineBusy
from fabric.sandbox import Death, JobLimits, NotStarted, RunJob, SandboxDied, SandboxProcess

AMPLE = JobLimits(cpu_s=60.0, memory_bytes=2**30, timeout_s=60.0)


@asynccontextmanager
async def running(name: str, cpu_s: float = 60.0, timeout_s: float = 60.0) -> AsyncIterator[SandboxUser]:
    user = USERS[name](cpu_s, timeout_s)
    await user.start()
    try:
        yield user
    finally:
        await user.close()


@pytest.fixture(params=list(USERS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# (command, limits, the prober's error, the decoder's error, words of both messages, whether the process is replaced)
End = tuple[bytes, dict[str, float], type[Exception], type[Exception], str, bool]
ENDS: list[End] = [
    (b"burn", {"cpu_s": 0.3}, InvalidMedia, InvalidMedia, "more than 0.3 s of processor time", True),
    (b"grow", {}, InvalidMedia, InvalidMedia, "memory", False),
    (b"hang", {"timeout_s": 1.5}, MachineBusy, MachineBusy, "too busy", True),
    (b"stop", {"timeout_s": 1.5}, MachineBusy, MachineBusy, "too busy", True),
    (b"deaf", {"timeout_s": 1.5}, MachineBusy, MachineBusy, "too busy", True),
    (b"oom", {}, MachineBusy, DecodeBroke, "", True),
    (b"die", {}, InvalidMedia, DecodeBroke, "", True),
    (b"exit", {}, InvalidMedia, DecodeBroke, "", True),
    (b"garbage", {}, InvalidMedia, DecodeBroke, "", True),
    (b"mute", {}, InvalidMedia, DecodeBroke, "", True),
    (b"bug", {}, InvalidMedia, EncodeFailed, "", False),
    (b"broken", {}, InvalidMedia, InvalidMedia, "broken", False),
]


@pytest.mark.parametrize("row", ENDS, ids=lambda row: row[0].decode())
async def test_what_a_file_does_to_its_process_is_told_apart_and_ends_with_it(name: str, row: End) -> None:
    data, limits, probe_error, decode_error, words, is_replaced = row
    async with running(name, **limits) as user:
        pid, _ = await user.read(b"hello")
        with pytest.raises(probe_error if name == "probe" else decode_error) as caught:
            await user.read(data)
        assert words in str(caught.value)
        assert is_alive(pid) != is_replaced
        found, size = await user.read(b"hello, again")
        assert size == len(b"hello, again")
        assert (found != pid) == is_replaced


async def test_a_process_that_something_kills_is_replaced(name: str) -> None:
    """It is killed while it is idle, or while it reads; only in the second case is a file affected."""
    async with running(name) as user:
        pid, _ = await user.read(b"hello")
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not is_alive(pid))
        second, size = await user.read(b"hello")
        assert (second != pid, size) == (True, 5)
        reading = asyncio.create_task(user.read(b"hang"))
        await until(lambda: user.processes[0].is_busy)
        os.kill(second, signal.SIGKILL)
        with pytest.raises((MachineBusy, DecodeBroke)):
            await reading
        assert (await user.read(b"hello"))[0] not in (pid, second)


async def test_a_read_that_is_cancelled_ends_its_process_alone(name: str) -> None:
    async with running(name) as user:
        pid, _ = await user.read(b"hello")
        reading, others = asyncio.create_task(user.read(b"hang")), asyncio.create_task(user.read(b"hello"))
        await until(lambda: user.processes[0].is_busy)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert (await others)[0] != pid
        assert not is_alive(pid)


async def test_thousands_of_files_leave_nothing_behind(name: str) -> None:
    """Some of the files kill their process. The process's resource tracker counts as a child before and after."""
    async with running(name) as user:
        await user.read(b"hello")
        files, children = num_open_files(), num_children()
        num_deaths = 0
        for number in range(2_000):
            if number % 500 == 400:
                with pytest.raises((InvalidMedia, DecodeBroke)):
                    await user.read(b"die")
                num_deaths += 1
            else:
                assert (await user.read(b"x" * (number + 10)))[1] == number + 10
        assert num_deaths == 4
        assert (num_open_files(), num_children()) == (files, children)
        assert threading.active_count() < 20
    await until(lambda: num_children() == children - 1)


ORPHAN_MAKER = """
import asyncio, sys, time
from sandbox_users import USERS

async def main():
    user = USERS[sys.argv[1]](60.0, 60.0)
    await user.start()
    print(user.processes[0].pid, flush=True)
    time.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_processes_die_with_their_parent(name: str, tmp_path: Path) -> None:
    script = tmp_path / "orphan_maker.py"
    script.write_text(ORPHAN_MAKER)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(script), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline_s = time.monotonic() + 30
    while is_alive(child):
        assert time.monotonic() < deadline_s, "the process has outlived its parent"
        os.sched_yield()


# ------------------------------------------------------------ the process alone


def enter_counting() -> RunJob[str]:
    """Returns work that answers a job with numbers, takes memory, or ends the process."""

    def work(job: str, data: bytes, answer: Callable[[object], None]) -> None:
        if job == "count":
            for number in range(len(data)):
                answer(number)
        elif job == "take":
            try:
                answer(len(bytearray(int(data))))
            except MemoryError as error:
                answer(error)
        elif job == "raise":
            raise RuntimeError("a bug of the user's own")
        elif job == "write":
            os.write(pipe_of(answer).fileno(), data)

    return work


def pipe_of(answer: Callable[[object], None]) -> Connection:
    """Returns the pipe to the parent, as code that has taken the process over finds it."""
    assert isinstance(answer, partial)
    pipe = answer.args[0]
    assert isinstance(pipe, Connection)
    return pipe


def enter_nothing() -> RunJob[str]:
    raise RuntimeError("there is no model")


@pytest.fixture
async def process() -> AsyncIterator[SandboxProcess[str]]:
    made = SandboxProcess(enter_counting, 2**31, "counting")
    await made.start()
    yield made
    await made.close()


async def answers(process: SandboxProcess[str], job: str, data: bytes, limits: JobLimits = AMPLE) -> list[object]:
    found: list[object] = []
    await process.run(job, data, limits, found.append)
    return found


async def test_answers_come_in_order_and_none_is_one_of_them(process: SandboxProcess[str]) -> None:
    assert await answers(process, "count", bytes(1_000)) == list(range(1_000))
    assert await answers(process, "count", b"") == []


async def test_memory_is_limited_by_the_job(process: SandboxProcess[str]) -> None:
    size = b"%d" % 2**28
    (error,) = await answers(process, "take", size, AMPLE._replace(memory_bytes=2**27))
    assert isinstance(error, MemoryError)
    assert await answers(process, "take", size) == [2**28]


class MakesFolder:
    """Is a pickle that makes a folder where it is read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._folder),)


async def test_a_process_that_was_taken_over_runs_nothing_in_its_parent(
    process: SandboxProcess[str], tmp_path: Path
) -> None:
    body = pickle.dumps((1, MakesFolder(tmp_path / "made")))
    with contextlib.suppress(SandboxDied):
        await answers(process, "write", struct.pack("<4sIQ", b"weft", 0, len(body)) + body)
    assert not (tmp_path / "made").exists(), "the parent has run what the process wrote"
    assert process.pid is None, "the process is ended"


async def test_an_answer_larger_than_the_memory_of_its_process_is_not_read(process: SandboxProcess[str]) -> None:
    """It is refused by its head, so the parent takes no memory for it."""
    for head in (struct.pack("<4sIQ", b"weft", 0, 2**31 + 1), struct.pack("<4sIQQ", b"weft", 1, 0, 2**31)):
        with pytest.raises(SandboxDied) as caught:
            await answers(process, "write", head)
        assert (caught.value.death, caught.value.had_job) == (Death.CRASHED, True)
        await process.start()


async def test_what_the_work_raises_ends_the_process_with_its_own_exit_code(process: SandboxProcess[str]) -> None:
    with pytest.raises(SandboxDied) as caught:
        await answers(process, "raise", b"")
    assert (caught.value.death, caught.value.had_job, caught.value.exit_code) == (Death.CRASHED, True, 1)
    assert process.pid is None
    await process.start()
    assert await answers(process, "count", b"ab") == [0, 1]


async def test_a_process_that_was_killed_is_not_ready_and_no_job_is_blamed(process: SandboxProcess[str]) -> None:
    was_ready = process.is_ready
    process.kill()
    assert (was_ready, process.is_ready) == (True, False)
    with pytest.raises(SandboxDied) as caught:
        await answers(process, "count", b"ab")
    assert not caught.value.had_job
    await process.start()
    assert process.is_ready


async def test_a_process_that_cannot_enter_is_not_started() -> None:
    process = SandboxProcess(enter_nothing, 2**31, "nothing")
    for _ in range(2):
        with pytest.raises(NotStarted, match="died at its start"):
            await process.start()
        assert process.pid is None
    await process.close()


async def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    process = SandboxProcess(enter_counting, 2**31, "counting")
    children = num_children()
    starting = asyncio.create_task(process.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert process.pid is None
    await process.start()
    await process.close()
    assert num_children() <= children + 1  # the resource tracker of multiprocessing


async def test_nothing_runs_in_a_process_that_is_closed() -> None:
    process = SandboxProcess(enter_counting, 2**31, "counting")
    await process.start()
    pid = process.pid
    assert pid is not None
    await process.close()
    await process.close()
    assert not is_alive(pid)
    with pytest.raises(NotStarted):
        await process.start()
    with pytest.raises(SandboxDied) as caught:
        await answers(process, "count", b"ab")
    assert (caught.value.death, caught.value.had_job) == (Death.ENDED, False)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110 - nothing tells when a process has ended
            await asyncio.sleep(0.001)


def is_alive(pid: int) -> bool:
    """Returns whether the process is alive and is not a zombie that its parent has not reaped yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_children() -> int:
    """Counts the children of this process, zombies among them."""
    return sum(len(children.read_text().split()) for children in Path("/proc/self/task").glob("*/children"))

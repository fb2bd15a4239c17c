"""Removes names of shared memory that this process maps, as C++ makes it, and of semaphores, and no other names."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import uuid
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from llm_workers.vllm_engine.shared_names import FOLDER, names_in, remove_mapped_names, remove_semaphore_names

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="there is no /proc")
TIMEOUT_S = 60.0


@pytest.fixture
def mark() -> Iterator[str]:
    made = f"weft-test-{uuid.uuid4().hex}"
    yield made
    for path in Path(FOLDER).glob(f"{made}*"):
        path.unlink()


def make(name: str) -> mmap.mmap:
    """Makes shared memory with a name and maps it."""
    file = os.open(FOLDER + name, os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(file, mmap.PAGESIZE)
    mapped = mmap.mmap(file, mmap.PAGESIZE)
    os.close(file)
    return mapped


def names_of(mark: str) -> set[str]:
    return {path.name for path in Path(FOLDER).glob(f"{mark}*")}


def test_mapped_memory_loses_its_name_and_keeps_its_content(mark: str) -> None:
    first, other = make(f"{mark}-[0-1]-buffer"), make(f"{mark}-else")
    make(f"{mark}-buffer-of-another-process").close()
    first[:4] = b"weft"
    assert remove_mapped_names("-buffer") == [f"{mark}-[0-1]-buffer"]
    assert names_of(mark) == {f"{mark}-else", f"{mark}-buffer-of-another-process"}
    assert first[:4] == b"weft"
    assert remove_mapped_names("-buffer") == [], "its name is gone"
    first.close()
    other.close()


def lose_names(connection: Connection) -> None:
    """Runs in a process of its own, because the names of all locks of a process are removed."""
    lock = multiprocessing.get_context("spawn").Lock()
    name = f"sem.{lock._semlock.name.removeprefix('/')}"
    was_there = Path(FOLDER, name).exists()
    removed = remove_semaphore_names()
    is_there = Path(FOLDER, name).exists()
    lock.acquire()
    is_held = not lock.acquire(block=False)
    connection.send((was_there, [f"sem.{each}" for each in removed] == [name], is_there, is_held))


def test_semaphores_lose_their_names_and_go_on_working() -> None:
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=lose_names, args=(writer,))
    process.start()
    assert reader.poll(TIMEOUT_S)
    assert reader.recv() == (True, True, False, True)
    process.join(TIMEOUT_S)
    assert process.exitcode == 0


def test_names_are_read_from_the_lines_of_a_process() -> None:
    lines = [
        "7f00-7f10 rw-s 00000000 00:1a 12                         /dev/shm/psm_1 (deleted)",
        "7f10-7f20 rw-s 00010000 00:1a 13                         /dev/shm/a-tp:0-[0-1]-cpushm_0",
        "7f20-7f30 r--s 00020000 00:1a 13                         /dev/shm/a-tp:0-[0-1]-cpushm_0",
        "7f30-7f40 r-xp 00000000 08:01 14                         /usr/lib/libc.so.6",
        "7f40-7f50 rw-p 00000000 00:00 0",
    ]
    assert names_in(lines) == ["psm_1 (deleted)", "a-tp:0-[0-1]-cpushm_0"]

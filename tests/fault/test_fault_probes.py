"""Probing in helper processes: what a file does to its reader hurts that file alone."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hostile_modality import hostile_registry
from media_corpus import video_file
from modalities_files import encode, picture

from fabric.errors import InvalidMedia, NoCapacity, Overloaded, UnsupportedModality
from modalities.family import ImageHeader, MediaHeader, VideoHeader
from modalities.probing import ProbeLimits, ProbePool

PARAM = "messages.0.content.1"
NO_HURRY = ProbeLimits(timeout_s=60.0, memory_bytes=2**31, wait_s=60.0)


@pytest.fixture
async def pool() -> AsyncIterator[ProbePool]:
    made = ProbePool(1, NO_HURRY, hostile_registry)
    await made.start()
    yield made
    await made.close()


async def reader_pid(pool: ProbePool) -> int:
    """Of the helper that takes the next file."""
    header = await pool.probe("hostile", b"hello", PARAM)
    assert isinstance(header, ImageHeader)
    assert header.height == 5
    return header.width


async def test_containers_are_read_elsewhere_and_pictures_here(pool: ProbePool) -> None:
    header = await pool.probe("video", video_file("mp4-h264"), PARAM)
    assert isinstance(header, VideoHeader)
    assert (header.width, header.height, header.num_frames) == (48, 32, 12)
    still = await pool.probe("image", encode(picture(5, 4)), PARAM)
    assert (still.width, still.height) == (5, 4)  # type: ignore[union-attr]
    assert await reader_pid(pool) != os.getpid()
    with pytest.raises(UnsupportedModality):
        await pool.probe("smell", b"", PARAM)
    assert pool.num_replaced == 0


@pytest.mark.parametrize(
    ("data", "message", "is_replaced"),
    [
        (b"die", "without breaking", True),
        (b"grow", "memory", False),
        (b"bug", "could not be read", False),
        (b"broken", "broken", False),
    ],
)
async def test_what_a_file_does_is_its_own_fault(pool: ProbePool, data: bytes, message: str, is_replaced: bool) -> None:
    first = await reader_pid(pool)
    with pytest.raises(InvalidMedia, match=message) as caught:
        await pool.probe("hostile", data, PARAM)
    assert caught.value.param == PARAM
    assert pool.num_replaced == is_replaced
    assert (await reader_pid(pool) != first) == is_replaced


async def test_a_file_that_hangs_its_reader_runs_out_of_time() -> None:
    pool = ProbePool(1, ProbeLimits(timeout_s=0.2), hostile_registry)
    await pool.start()
    with pytest.raises(InvalidMedia, match=r"within 0\.2 s"):
        await pool.probe("hostile", b"hang", PARAM)
    assert await reader_pid(pool) != os.getpid()
    assert pool.num_replaced == 1
    await pool.close()


async def test_those_beside_a_deadly_file_do_not_notice() -> None:
    pool = ProbePool(2, NO_HURRY, hostile_registry)
    files = [b"die" if at % 5 == 3 else b"x" * (at + 1) for at in range(20)]
    outcomes = await asyncio.gather(*(pool.probe("hostile", data, PARAM) for data in files), return_exceptions=True)
    for data, outcome in zip(files, outcomes, strict=True):
        if data == b"die":
            assert isinstance(outcome, InvalidMedia)
        else:
            assert isinstance(outcome, ImageHeader)
            assert outcome.height == len(data)
    assert pool.num_replaced == 4
    await pool.close()


async def test_a_helper_that_dies_idle_costs_nobody_anything(pool: ProbePool) -> None:
    for _ in range(3):
        os.kill(await reader_pid(pool), signal.SIGKILL)
    assert await reader_pid(pool) > 0


async def hanging_probe(pool: ProbePool, folder: Path) -> asyncio.Task[MediaHeader]:
    """One that hangs already."""
    begun = folder / "begun"
    os.mkfifo(begun)
    task = asyncio.create_task(pool.probe("hostile", b"hang" + os.fsencode(begun), PARAM))
    await asyncio.to_thread(begun.read_bytes)
    assert pool.num_busy == 1
    return task


async def test_who_leaves_frees_the_helper(pool: ProbePool, tmp_path: Path) -> None:
    hanging = await hanging_probe(pool, tmp_path)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert await reader_pid(pool) > 0
    assert pool.num_busy == 0


async def test_who_leaves_at_once_does_too(pool: ProbePool) -> None:
    hanging = asyncio.create_task(pool.probe("hostile", b"hang", PARAM))
    await asyncio.sleep(0)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert await reader_pid(pool) > 0


async def test_who_leaves_late_ends_nobody_elses(pool: ProbePool, tmp_path: Path) -> None:
    """Its own file was read already, and the helper is at another's."""
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    for pipe in (begun, ended):
        os.mkfifo(pipe)
    pid = await reader_pid(pool)
    data = b"wait" + b"\0".join(os.fsencode(pipe) for pipe in (begun, ended))
    others = asyncio.create_task(pool.probe("hostile", data, PARAM))
    await asyncio.to_thread(begun.read_bytes)
    (helper,) = pool._helpers
    helper.end(threading.Event())
    writer = os.open(ended, os.O_RDWR)  # waits for no reader
    os.write(writer, b".")
    header = await others
    os.close(writer)
    assert isinstance(header, ImageHeader)
    assert header.width == pid
    assert pool.num_replaced == 0


async def test_nobody_waits_for_a_helper_without_end(tmp_path: Path) -> None:
    pool = ProbePool(1, NO_HURRY._replace(wait_s=0.05), hostile_registry)
    await pool.start()
    hanging = await hanging_probe(pool, tmp_path)
    with pytest.raises(Overloaded) as caught:
        await pool.probe("hostile", b"hello", PARAM)
    assert caught.value.retry_after_s == NO_HURRY.timeout_s
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    await pool.close()


async def test_closing_leaves_no_process_behind() -> None:
    pool = ProbePool(2, NO_HURRY, hostile_registry)
    await pool.start()
    pid = await reader_pid(pool)
    await pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_closing_ends_what_is_under_way(tmp_path: Path) -> None:
    pool = ProbePool(1, NO_HURRY, hostile_registry)
    await pool.start()
    hanging = await hanging_probe(pool, tmp_path)
    await pool.close()
    with pytest.raises(NoCapacity):
        await hanging


async def test_without_processes_a_thread_probes() -> None:
    pool = ProbePool(0, registry=hostile_registry)
    await pool.start()
    assert await reader_pid(pool) == os.getpid()
    with pytest.raises(InvalidMedia, match="could not be read"):
        await pool.probe("hostile", b"bug", PARAM)
    await pool.close()

"""Checks probing in helper processes: what a file does to the process that reads it affects that file alone."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from hostile_modality import hostile_registry
from media_corpus import video_file
from modalities_files import encode, picture

from fabric.contracts import InvalidMedia, MachineBusy, NoCapacity, Overloaded, UnsupportedModality
from modalities.family import ImageHeader, MediaHeader, VideoHeader
from modalities.media import ImagePlugin, MediaLimits
from modalities.probing import ProbeLimits, ProbePool
from modalities.registry import REGISTRY
from router.api import MediaPart, status_of
from router.prompt.prompt_builder import RequestThreads, Work
from router.prompt.request_media import MediaReader, ProbedMedium

PARAM = "messages.0.content.1"
NO_HURRY = ProbeLimits(timeout_s=60.0, memory_bytes=2**31, wait_s=60.0)


@pytest.fixture
async def pool() -> AsyncIterator[ProbePool]:
    made = ProbePool(1, NO_HURRY, hostile_registry)
    await made.start()
    yield made
    await made.close()


async def reader_pid(pool: ProbePool) -> int:
    """Returns the process id of the helper that takes the next file."""
    header = await pool.probe("hostile", b"hello", PARAM)
    assert isinstance(header, ImageHeader)
    assert header.height == 5
    return header.width


async def test_containers_and_pictures_are_read_elsewhere(pool: ProbePool) -> None:
    header = await pool.probe("video", video_file("mp4-h264"), PARAM)
    assert isinstance(header, VideoHeader)
    assert (header.width, header.height, header.num_frames) == (48, 32, 12)
    still = await pool.probe("image", encode(picture(5, 4)), PARAM)
    assert (still.width, still.height) == (5, 4)
    assert await reader_pid(pool) != os.getpid()
    with pytest.raises(UnsupportedModality):
        await pool.probe("smell", b"", PARAM)
    assert pool.num_replaced == 0


@pytest.mark.parametrize(
    ("data", "message", "is_replaced"),
    [
        (b"die", "the process that read it crashed", True),
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


async def test_a_file_that_burns_processor_time_is_refused() -> None:
    limits = NO_HURRY._replace(modality_to_cpu_s={"hostile": 0.2})
    pool = ProbePool(1, limits, hostile_registry)
    await pool.start()
    with pytest.raises(InvalidMedia, match=r"more than 0\.2 s of processor time") as caught:
        await pool.probe("hostile", b"burn", PARAM)
    assert caught.value.param == PARAM
    assert await reader_pid(pool) != os.getpid()
    assert pool.num_replaced == 1
    await pool.close()


@pytest.mark.parametrize("data", [b"hang", b"stop", b"oom"])
async def test_a_reader_that_is_not_given_what_it_needs_blames_no_file(data: bytes) -> None:
    """The helper sleeps, is stopped, or is killed for its memory: no file is known to be at fault."""
    pool = ProbePool(1, ProbeLimits(timeout_s=0.3), hostile_registry)
    await pool.start()
    with pytest.raises(MachineBusy, match="too busy") as caught:
        await pool.probe("hostile", data, PARAM)
    assert caught.value.retryable
    assert status_of(caught.value) == 503
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


async def test_a_helper_that_is_stopped_idle_is_replaced_and_its_file_read() -> None:
    pool = ProbePool(1, ProbeLimits(timeout_s=0.3), hostile_registry)
    await pool.start()
    stopped = await reader_pid(pool)
    os.kill(stopped, signal.SIGSTOP)
    assert await reader_pid(pool) != stopped
    await pool.close()


async def hanging_probe(pool: ProbePool, folder: Path) -> asyncio.Task[MediaHeader]:
    """Returns a probe that already hangs."""
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
    """Its own file was already read, but its task has not resumed, and another request's file is next."""
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    for pipe in (begun, ended):
        os.mkfifo(pipe)
    pid = await reader_pid(pool)
    data = b"wait" + b"\0".join(os.fsencode(pipe) for pipe in (begun, ended))
    leaving = asyncio.create_task(pool.probe("hostile", b"hello", PARAM))
    others = asyncio.create_task(pool.probe("hostile", data, PARAM))
    await asyncio.sleep(0)
    (helper,) = pool._helpers
    while helper.process._is_working:
        os.sched_yield()  # The event loop stands still, so nothing hears of the answer.
    assert not leaving.done()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await asyncio.to_thread(begun.read_bytes)
    assert pool.num_busy == 1
    writer = os.open(ended, os.O_RDWR)  # this mode does not wait for a reader
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


def comment_markers(num_bytes: int) -> bytes:
    """Returns a JPEG of empty comments; a picture may follow them."""
    return b"\xff\xd8" + b"\xff\xfe\x00\x02" * (num_bytes // 4)


def image_part(data: bytes, name: str) -> MediaPart:
    url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    return MediaPart("image_url", {"image_url": {"url": url}}, name)


async def test_pictures_that_take_long_to_read_hold_up_no_others() -> None:
    """Eight JPEGs consist of 24 MB of comment markers each, and ordinary pictures of another request come after
    them."""
    began_s = time.thread_time()
    with pytest.raises(InvalidMedia):
        ImagePlugin().probe(comment_markers(2**18), PARAM)
    whole_s = (time.thread_time() - began_s) * 96 * 8
    threads, pool = RequestThreads(), ProbePool(2, NO_HURRY._replace(modality_to_cpu_s={"image": 0.25}))
    await pool.start()
    reader = MediaReader("m", {"image": 8}, MediaLimits(), REGISTRY, pool, partial(threads.run, Work.MEDIA))
    hostile = image_part(comment_markers(24 * 2**20), "hostile")
    began_s = own_cpu_s()
    reads = [asyncio.create_task(reader.read([hostile])) for _ in range(8)]
    await asyncio.sleep(0)
    found: list[ProbedMedium] = []
    for index in range(20):
        found += await reader.read([image_part(encode(picture(index + 1, 7), "JPEG"), "ordinary")])
    assert [medium.header.width for medium in found] == list(range(1, 21))
    assert not all(read.done() for read in reads), "they did not wait for those that came first"
    for outcome in await asyncio.gather(*reads, return_exceptions=True):
        assert isinstance(outcome, InvalidMedia)
        assert "processor time" in outcome.message
    assert pool.num_replaced == 8
    assert own_cpu_s() - began_s < whole_s / 10, "the router's process has read them itself"
    await pool.close()
    threads.close()


def own_cpu_s() -> float:
    """Returns the processor time of this process, all threads together."""
    return time.process_time()


class Listed:
    """Wraps a pool and lists, in order, the parts whose headers were read."""

    def __init__(self, pool: ProbePool) -> None:
        self.read: list[str] = []
        self._pool = pool

    async def start(self) -> None:
        await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()

    async def probe(self, modality: str, data: bytes, param: str) -> MediaHeader:
        header = await self._pool.probe(modality, data, param)
        self.read.append(param)
        return header


async def test_a_request_of_many_costly_files_takes_turns_with_others() -> None:
    """One request has 64 pictures, each with about as many comments before it as the helper's time allows, and there is
    only one helper."""
    costly = b"\xff\xd8" + comment_markers(2**18)[2:] + encode(picture(9, 7), "JPEG")[2:]
    threads, pool = RequestThreads(), Listed(ProbePool(1, NO_HURRY))
    await pool.start()
    reader = MediaReader("m", {"image": 64}, MediaLimits(), REGISTRY, pool, partial(threads.run, Work.MEDIA))
    large = asyncio.create_task(reader.read([image_part(costly, f"large.{number}") for number in range(64)]))
    async with asyncio.timeout(60):
        while not pool.read:  # noqa: ASYNC110 - nothing tells when a helper has read a file
            await asyncio.sleep(0.001)
    for number in range(8):
        (found,) = await reader.read([image_part(encode(picture(number + 1, 7), "TIFF"), f"small.{number}")])
        assert (found.header.width, found.header.height) == (number + 1, 7)
    before_last = pool.read[: pool.read.index("small.7")]
    num_large = sum(name.startswith("large") for name in before_last)
    assert num_large <= 1 + 2 * 8, "two of its files, at most, for each of theirs"
    assert not large.done()
    large.cancel()
    with pytest.raises(asyncio.CancelledError):
        await large
    await pool.close()
    threads.close()

"""Tests that requests take turns at having the headers of their files read: a request with many costly files delays no
other."""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import AsyncIterator
from functools import partial

import pytest
from modalities_files import encode, picture

from fabric.contracts import InvalidMedia
from modalities.family import ImageHeader, MediaHeader
from modalities.media import ImagePlugin, MediaLimits
from modalities.registry import REGISTRY
from router.api import MediaPart
from router.prompt.prompt_builder import RequestThreads, Work
from router.prompt.request_media import MediaReader, ProbedMedium

NUM_FILES = 64


class HandProber:
    """Reads one file at a time, in the order of arrival, and ends each read when the test says so."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        """Holds the names of the parts, in order."""
        self.num_cancelled = 0
        self._turn = asyncio.Lock()
        self._open: deque[asyncio.Future[None]] = deque()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def probe(self, modality: str, data: bytes, param: str) -> MediaHeader:
        try:
            async with self._turn:
                self.begun.append(param)
                done = asyncio.get_running_loop().create_future()
                self._open.append(done)
                await done
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if param.endswith("broken"):
            raise InvalidMedia(f"{param}: broken", param=param)
        return ImageHeader("TIFF", len(data), 1, "RGB")

    async def end_one(self) -> None:
        """Ends the read of the current file; if another file waits, its read has begun when this returns."""
        while not self._open:  # noqa: ASYNC110 - no event says when a reader's thread has parsed
            await asyncio.sleep(0)
        self._open.popleft().set_result(None)
        for _ in range(8):
            await asyncio.sleep(0)


@pytest.fixture
async def threads() -> AsyncIterator[RequestThreads]:
    made = RequestThreads()
    yield made
    made.close()


def parts(names: list[str]) -> list[MediaPart]:
    """Returns parts whose files can't be sized by their first bytes alone."""
    data = encode(picture(5, 4), "TIFF")
    assert ImagePlugin().first_header(data) is None
    url = "data:image/tiff;base64," + base64.b64encode(data).decode()
    return [MediaPart("image_url", {"image_url": {"url": url}}, name) for name in names]


def reader_of(prober: HandProber, threads: RequestThreads) -> MediaReader:
    return MediaReader("m", {"image": NUM_FILES}, MediaLimits(), REGISTRY, prober, partial(threads.run, Work.MEDIA))


async def begun(prober: HandProber, num: int) -> None:
    async with asyncio.timeout(30):
        while len(prober.begun) < num:  # noqa: ASYNC110 - no event says when a reader's thread has parsed
            await asyncio.sleep(0)


async def test_small_requests_are_read_after_few_probes_whatever_a_large_one_has_left(
    threads: RequestThreads,
) -> None:
    prober = HandProber()
    reader = reader_of(prober, threads)
    large = asyncio.create_task(reader.read(parts([f"large.{number}" for number in range(NUM_FILES)])))
    await begun(prober, 1)
    small: list[asyncio.Task[list[ProbedMedium]]] = []
    for number in range(4):
        small.append(asyncio.create_task(reader.read(parts([f"small.{number}"]))))
        waiting = len(small) + 1  # These are the small requests and the one that is being read.
        async with asyncio.timeout(30):
            while len(prober._turn._waiters or ()) < waiting - 1:  # noqa: ASYNC110 - the reason above holds
                await asyncio.sleep(0)
    num_ended = 0
    while not all(task.done() for task in small):
        await prober.end_one()
        num_ended += 1
    assert num_ended == 1 + len(small), "the file that was being read, and one of each"
    assert prober.begun[:6] == ["large.0", "small.0", "small.1", "small.2", "small.3", "large.1"]
    for _ in range(NUM_FILES - 1):
        await prober.end_one()
    assert [medium.part for medium in await large] == [f"large.{number}" for number in range(NUM_FILES)]


async def test_nothing_is_read_behind_the_first_file_that_is_refused(threads: RequestThreads) -> None:
    prober = HandProber()
    names = ["first", "second.broken", *(f"more.{number}" for number in range(NUM_FILES - 2))]
    reading = asyncio.create_task(reader_of(prober, threads).read(parts(names)))
    await begun(prober, 1)
    await prober.end_one()
    await prober.end_one()
    with pytest.raises(InvalidMedia) as caught:
        await reading
    assert caught.value.param == "second.broken"
    assert prober.begun == ["first", "second.broken"]


async def test_a_request_that_leaves_stops_reading(threads: RequestThreads) -> None:
    prober = HandProber()
    reading = asyncio.create_task(reader_of(prober, threads).read(parts(["one", "two"])))
    await begun(prober, 1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert (prober.begun, prober.num_cancelled) == (["one"], 1)

"""Measures by how much a video of 120 frames delays one picture, in a real encoder service with decode processes and
the demo model. The delay is the time from the picture's call to its answer, minus the same time in an idle service.

Pictures arrive at several moments of a unit in the middle of the video. At the worst moment they are decoded when the
next unit has just begun, so that nearly the whole of that unit is still to come. While the video is being decoded, a
unit starts when it is ready, and decoders compete with the forward pass for processors; once the video is decoded, the
units follow each other directly.

The result of a moment is the median of several arrivals, and the bar is the worst moment of both cases. So the bar
shows what a picture at the worst moment must expect, and not the worst single arrival. An arrival's delay is divided by
the seconds of the unit that delayed it, because decoding the picture slows that unit down as well. The notes of the
bench also give the delay in median units, over all units of the video; most of these have the processors to themselves.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from encoder_pool.encoder_config import EncoderConfig
from encoder_pool.encoder_service import EncoderService
from fabric.contracts import (
    Destination,
    EncodeRequest,
    Member,
    MemberId,
    PlaneMessage,
    RequestId,
    SystemClock,
    UnitReady,
    UnitRelease,
)
from fabric.transport import LocalChannelHub, LocalFeatureSource, LocalHub, LocalPlane
from loadtest.benches.synthetic import NUM_FRAMES, another, film, model_of_long_films, picture
from modalities.family import EncoderInput, EncoderModel, Family, MediaOptions
from modalities.media import plan_media
from modalities.registry import REGISTRY

NUM_ARRIVALS = 5
"""This many pictures arrive at each moment, one per video."""
PARTS = (0.0, 0.25, 0.5, 0.75)
"""Holds the moments when pictures arrive, as shares of the time from a unit's start to the next unit's start."""
JUST_AFTER = 1 / 16
"""A picture of the worst moment is decoded when this share of a unit has run."""
MOST_BEFORE = 2
"""This many of the video's forward passes precede the one in which pictures arrive, if the video has that many."""
OPTIONS = MediaOptions(fps=30.0, max_frames=NUM_FRAMES)
WORKER = Member(MemberId("worker-1"), "worker", "local://worker-1", "here", 1, (), "worker-1")


class Delay(NamedTuple):
    """Holds the delay of one picture."""

    delay_s: float
    unit_s: float
    """Holds the duration of the video's unit that delayed the picture, or the median of the video's whole units if none
    did."""

    @property
    def units(self) -> float:
        return self.delay_s / self.unit_s


class Waits(NamedTuple):
    """Holds the delays by videos that were still being decoded when pictures arrived, or that were decoded already."""

    is_decoded: bool
    alone_s: float
    """Holds the median time of a picture in an idle service."""
    unit_s: float
    """Holds the median time of the video's whole units."""
    moments: tuple[tuple[Delay, ...], ...]
    """Holds, for each moment of a unit, the delays of the pictures that arrived then; the worst moment is last."""

    @property
    def medians(self) -> list[float]:
        """Returns the median of each moment, in units of the video's unit that delayed the picture."""
        return [statistics.median(delay.units for delay in delays) for delays in self.moments]

    @property
    def worst_of_median_units(self) -> float:
        """Returns the median of the worst moment, in median units."""
        return max(statistics.median(delay.delay_s for delay in delays) for delays in self.moments) / self.unit_s


class TimedForward(NamedTuple):
    modality: str
    num_patches: int
    started_s: float
    ended_s: float


class Watched:
    """Wraps the model and records when each forward pass began and ended. While the gate is closed, no pass begins."""

    def __init__(self, model: EncoderModel, loop: asyncio.AbstractEventLoop) -> None:
        self._model = model
        self._loop = loop
        self.gate = threading.Event()
        self.gate.set()
        self.forwards: list[TimedForward] = []
        self.starts: asyncio.Queue[float] = asyncio.Queue()

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        self.gate.wait()
        started_s = time.monotonic()
        self._loop.call_soon_threadsafe(self.starts.put_nowait, started_s)
        features = self._model.encode(inputs)
        if features[0].is_cuda:
            torch.cuda.synchronize()  # A GPU still computes when the call returns.
        num_patches = sum(unit.num_patches for unit in inputs)
        self.forwards.append(TimedForward(inputs[0].modality, num_patches, started_s, time.monotonic()))
        return features

    def forget(self) -> None:
        """Discards all records."""
        self.forwards.clear()
        self.starts = asyncio.Queue()

    def of_film(self) -> list[TimedForward]:
        return [one for one in self.forwards if one.modality == "video"]


class Shown(NamedTuple):
    request: EncodeRequest
    data: bytes


class BenchService:
    """A `BenchService` is a running service with the media that are sent to it."""

    def __init__(self, service: EncoderService, family: Family, model: Watched) -> None:
        self.model = model
        self._service = service
        self._family = family
        self._film = film()
        self._numbers = itertools.count()

    def picture(self) -> Shown:
        """Makes a new picture."""
        number = next(self._numbers)
        return self._shown(number, picture(number), "image")

    async def encode_s(self, shown: Shown) -> float:
        """Encodes a medium and returns the seconds from the call to the answer."""
        called_s = time.monotonic()
        await self._service.encode(shown.request, [shown.data])
        return time.monotonic() - called_s

    async def submit_s(self, shown: Shown) -> float:
        """Encodes a medium and returns the processor seconds until the call waits for the first time: the medium is
        then accepted and on its way."""
        call = _TimedStart(self._service.encode(shown.request, [shown.data]))
        await call
        return call.seconds

    @property
    def encoded_bytes(self) -> int:
        """Counts the bytes of all features that the service has encoded."""
        return self._service.report().arena.encoded_bytes

    async def start_film(self, num_before: int, *, is_decoded: bool) -> tuple[asyncio.Task[float], float]:
        """Starts the call of a new video, waits until the forward pass after the first `num_before` ones begins, and
        returns the call and the start time of that pass. With `is_decoded`, nothing is encoded before the whole video
        is decoded."""
        number = next(self._numbers)
        shown = self._shown(number, another(self._film, number), "video")
        self.model.forget()
        if is_decoded:
            self.model.gate.clear()
        call = asyncio.create_task(self.encode_s(shown))
        while not self.model.gate.is_set():
            await asyncio.sleep(0.002)
            if self._service.report().num_encoding and not self._service.report().num_decoding:
                self.model.gate.set()
        for _ in range(num_before):
            await self.model.starts.get()
        return call, await self.model.starts.get()

    def _shown(self, number: int, data: bytes, modality: str) -> Shown:
        header = REGISTRY.modality(modality).probe(data, "bench")
        item = plan_media(self._family, data, header, 0, "bench", options=OPTIONS).item
        destination, name = Destination(WORKER.member_id, WORKER.address), f"bench-{number}"
        age = (time.time(), name)
        return Shown(EncodeRequest(RequestId(name), 0, MemberId("router-1"), (item,), destination, age), data)


class _TimedStart:
    """Measures the processor seconds of a coroutine from its beginning until it waits for the first time."""

    def __init__(self, coroutine: Coroutine[Any, Any, object]) -> None:
        self._coroutine = coroutine
        self.seconds = 0.0

    def __await__(self) -> Generator[Any, Any, object]:
        steps = self._coroutine.__await__()
        begun_s = time.thread_time()
        try:
            waited_for = next(steps)
            self.seconds = time.thread_time() - begun_s
            while True:
                waited_for = steps.send((yield waited_for))
        except StopIteration as end:
            return end.value


class Pace(NamedTuple):
    """Holds medians of how fast the service worked just before the measurement."""

    decoded_s: float
    """Measures from a picture's call to the start of its forward pass in an idle service."""
    unit_s: float
    period_s: float
    """Measures from the start of one forward pass of a video to the start of the next."""
    num_before: int
    """Counts the forward passes of a video before the one during which pictures arrive."""

    def moments_s(self) -> list[float]:
        """Returns when pictures arrive, in seconds after that forward pass has begun; the worst moment is last."""
        worst_s = self.period_s + JUST_AFTER * self.unit_s - self.decoded_s
        return [*(part * self.period_s for part in PARTS), worst_s]


async def measure_waits(device: str) -> list[Waits]:
    """Measures the delays in a service that it starts and stops itself."""
    with tempfile.TemporaryDirectory() as directory:
        async with running_service(model_of_long_films(Path(directory)), device) as stage:
            return [await _behind_films(stage, is_decoded=is_decoded) for is_decoded in (False, True)]


async def _behind_films(stage: BenchService, *, is_decoded: bool) -> Waits:
    pace = await _pace(stage, is_decoded=is_decoded)
    alone_s, films, moments = list[float](), list[TimedForward](), list[list[tuple[float, float]]]()
    for moment_s in pace.moments_s():
        moments.append([])
        for _ in range(NUM_ARRIVALS):
            alone_s.append(await stage.encode_s(stage.picture()))
            coming = stage.picture()
            call, began_s = await stage.start_film(pace.num_before, is_decoded=is_decoded)
            await asyncio.sleep(began_s + moment_s - time.monotonic())
            came_s = time.monotonic()
            found_s = await stage.encode_s(coming)
            await call
            moments[-1].append((found_s, _in_the_way_s(stage.model.forwards, came_s)))
            films += stage.model.of_film()
    alone = statistics.median(alone_s)
    delays = (tuple(Delay(found_s - alone, unit_s) for found_s, unit_s in some) for some in moments)
    return Waits(is_decoded, alone, _unit_s(films), tuple(delays))


def _in_the_way_s(forwards: Sequence[TimedForward], came_s: float) -> float:
    """Returns the duration of the last forward pass of a video that ran between a picture's arrival and its own
    pass."""
    (picture,) = [forward for forward in forwards if forward.modality == "image"]
    film = [forward for forward in forwards if forward.modality == "video"]
    met = [one for one in film if one.ended_s > came_s and one.started_s < picture.started_s]
    return met[-1].ended_s - met[-1].started_s if met else _unit_s(film)


async def _pace(stage: BenchService, *, is_decoded: bool) -> Pace:
    decoded_s, periods_s, films = list[float](), list[float](), list[TimedForward]()
    num_forwards = 0
    for _ in range(3):
        stage.model.forget()
        shown = stage.picture()
        called_s = time.monotonic()
        await stage.encode_s(shown)
        decoded_s.append(await stage.model.starts.get() - called_s)
        call, _ = await stage.start_film(0, is_decoded=is_decoded)
        await call
        forwards = stage.model.of_film()
        films += forwards
        periods_s += [after.started_s - before.started_s for before, after in itertools.pairwise(forwards)]
        num_forwards = len(forwards)
    unit_s = _unit_s(films)
    period_s = statistics.median(periods_s or [unit_s])
    return Pace(statistics.median(decoded_s), unit_s, period_s, min(num_forwards // 2, MOST_BEFORE))


def _unit_s(films: Sequence[TimedForward]) -> float:
    """Returns the median duration of a forward pass over one unit of a video; passes over several fused units do not
    count."""
    least = min(forward.num_patches for forward in films)
    return statistics.median(one.ended_s - one.started_s for one in films if one.num_patches == least)


@asynccontextmanager
async def running_service(model_dir: Path, device: str) -> AsyncIterator[BenchService]:
    """Yields an encoder service of the model with decode processes, and a worker that releases every unit at once."""
    family = REGISTRY.load_family(model_dir)
    modalities = ("image", "video")
    model = Watched(family.load_encoder(model_dir, device, "float32", modalities), asyncio.get_running_loop())
    config = EncoderConfig(modalities=modalities, num_decode_processes=2, model_dir=str(model_dir))
    hub = LocalHub()
    plane, worker_plane = LocalPlane(hub, "local://encoder-1"), LocalPlane(hub, WORKER.address)
    source = LocalFeatureSource(LocalChannelHub(), "encoder-1", 256 * 2**20)
    service = EncoderService(MemberId("encoder-1"), config, family, model, plane, source, SystemClock())

    def release(message: PlaneMessage) -> None:
        assert isinstance(message, UnitReady)
        generation = message.ticket.generation
        done = UnitRelease(WORKER.member_id, message.request_id, message.attempt, message.unit, generation)
        worker_plane.send(message.encoder_address, done)

    worker_plane.start(release)
    await service.start()
    service.update_members([WORKER])
    try:
        yield BenchService(service, family, model)
    finally:
        model.gate.set()
        await service.stop()
        for endpoint in (worker_plane, plane):
            endpoint.close()
        source.close()

"""How much later one picture is encoded because of a video of 120 frames, in a real encoder service with decode
processes and the demo model: from its call to its answer, less what the same takes in an idle service.

Pictures come at several moments of a unit in the video's midst, and once such that they are decoded when the next has
just begun, which is the worst that can happen: nearly the whole of it is still to come. While the video is being
decoded, a unit starts when it is ready, and decoders compete with the forward; once it lies decoded, unit follows unit.
A moment counts by the median of several arrivals, and the bar by the worst moment of both: not the luckless single
arrival, but what one that comes at the worst time has to expect. An arrival's delay is divided by the seconds of the
unit that was in its way: decoding the picture slows that one down as well. (By the median of all units, which mostly
have the processors to themselves, it is told beside.)
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from encoder_pool.config import EncoderConfig
from encoder_pool.service import EncoderService
from fabric.channel_local import LocalChannelHub, LocalFeatureSource
from fabric.clock import SystemClock
from fabric.ids import MemberId, RequestId
from fabric.messages import Destination, EncodeRequest, Member, PlaneMessage, UnitReady, UnitRelease
from fabric.plane_local import LocalHub, LocalPlane
from loadtest.benches.encoder_files import NUM_FRAMES, another, film, model_of_long_films, picture
from modalities.family import EncoderInput, EncoderModel, Family, MediaOptions
from modalities.identify import plan_media
from modalities.registry import REGISTRY

NUM_ARRIVALS = 5
"""At each moment."""
PARTS = (0.0, 0.25, 0.5, 0.75)
"""Of the time from a unit's start to the next one's: when pictures come."""
JUST_AFTER = 1 / 16
"""Of a unit: how long it has been running when a picture that comes at the worst moment is decoded."""
MOST_BEFORE = 2
"""Of the video's forwards come before the one in which pictures come, if it has that many."""
OPTIONS = MediaOptions(fps=30.0, max_frames=NUM_FRAMES)
WORKER = Member(MemberId("worker-1"), "worker", "local://worker-1", "here", 1, (), "worker-1")


class Delay(NamedTuple):
    """Of one picture."""

    delay_s: float
    unit_s: float
    """Of the film's unit in its way; of the film's whole units, median, if there was none."""

    @property
    def units(self) -> float:
        return self.delay_s / self.unit_s


class Waits(NamedTuple):
    """Behind videos that were still being decoded when pictures came, or were not any more."""

    is_decoded: bool
    alone_s: float
    """Of a picture in an idle service, median."""
    unit_s: float
    """Of the video's whole units, median."""
    moments: tuple[tuple[Delay, ...], ...]
    """For each moment of a unit, the worst one last: how much later each picture was that came then."""

    @property
    def medians(self) -> list[float]:
        """Of each moment, in units that were in the way."""
        return [statistics.median(delay.units for delay in delays) for delays in self.moments]

    @property
    def worst_of_median_units(self) -> float:
        """The worst moment's median, in median units."""
        return max(statistics.median(delay.delay_s for delay in delays) for delays in self.moments) / self.unit_s


class Forward(NamedTuple):
    modality: str
    num_patches: int
    started_s: float
    ended_s: float


class Watched:
    """The model, with when each forward began and ended. While the gate is closed, none begins."""

    def __init__(self, model: EncoderModel, loop: asyncio.AbstractEventLoop) -> None:
        self._model = model
        self._loop = loop
        self.gate = threading.Event()
        self.gate.set()
        self.forwards: list[Forward] = []
        self.starts: asyncio.Queue[float] = asyncio.Queue()

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        self.gate.wait()
        started_s = time.monotonic()
        self._loop.call_soon_threadsafe(self.starts.put_nowait, started_s)
        features = self._model.encode(inputs)
        num_patches = sum(unit.num_patches for unit in inputs)
        self.forwards.append(Forward(inputs[0].modality, num_patches, started_s, time.monotonic()))
        return features

    def forget(self) -> None:
        """What was before."""
        self.forwards.clear()
        self.starts = asyncio.Queue()

    def of_film(self) -> list[Forward]:
        return [one for one in self.forwards if one.modality == "video"]


class Shown(NamedTuple):
    request: EncodeRequest
    data: bytes


class Stage:
    """A running service, and what it is shown."""

    def __init__(self, service: EncoderService, family: Family, model: Watched) -> None:
        self.model = model
        self._service = service
        self._family = family
        self._film = film()
        self._numbers = itertools.count()

    def picture(self) -> Shown:
        """A new one."""
        number = next(self._numbers)
        return self._shown(number, picture(number), "image")

    async def encode_s(self, shown: Shown) -> float:
        """From the call to the answer."""
        called_s = time.monotonic()
        await self._service.encode(shown.request, [shown.data])
        return time.monotonic() - called_s

    async def start_film(self, num_before: int, *, is_decoded: bool) -> tuple[asyncio.Task[float], float]:
        """The call of a new film, and when its next forward after `num_before` ones began: now. With `is_decoded`
        nothing is encoded before the whole film lies decoded."""
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


class Pace(NamedTuple):
    """How the service was seen to work just before; medians."""

    decoded_s: float
    """From a picture's call to its forward, with nothing else to do."""
    unit_s: float
    period_s: float
    """From the start of a film's forward to that of the next."""
    num_before: int
    """Forwards of a film before the one that pictures come in."""

    def moments_s(self) -> list[float]:
        """When pictures are to come after that forward has begun; the worst moment last."""
        worst_s = self.period_s + JUST_AFTER * self.unit_s - self.decoded_s
        return [*(part * self.period_s for part in PARTS), worst_s]


async def measure_waits(device: str) -> list[Waits]:
    """Starts and stops a service of its own."""
    with tempfile.TemporaryDirectory() as directory:
        async with _running(model_of_long_films(Path(directory)), device) as stage:
            return [await _behind_films(stage, is_decoded=is_decoded) for is_decoded in (False, True)]


async def _behind_films(stage: Stage, *, is_decoded: bool) -> Waits:
    pace = await _pace(stage, is_decoded=is_decoded)
    alone_s, films, moments = list[float](), list[Forward](), list[list[tuple[float, float]]]()
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


def _in_the_way_s(forwards: Sequence[Forward], came_s: float) -> float:
    """What the last of a film's forwards took that ran between a picture's coming and its own forward."""
    (picture,) = [forward for forward in forwards if forward.modality == "image"]
    film = [forward for forward in forwards if forward.modality == "video"]
    met = [one for one in film if one.ended_s > came_s and one.started_s < picture.started_s]
    return met[-1].ended_s - met[-1].started_s if met else _unit_s(film)


async def _pace(stage: Stage, *, is_decoded: bool) -> Pace:
    decoded_s, periods_s, films = list[float](), list[float](), list[Forward]()
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


def _unit_s(films: Sequence[Forward]) -> float:
    """What a forward over one of a film's units takes, median; units are fused where that is worth it."""
    least = min(forward.num_patches for forward in films)
    return statistics.median(one.ended_s - one.started_s for one in films if one.num_patches == least)


@asynccontextmanager
async def _running(model_dir: Path, device: str) -> AsyncIterator[Stage]:
    family = REGISTRY.load_family(model_dir)
    modalities = ("image", "video")
    model = Watched(family.load_encoder(model_dir, device, "float32", modalities), asyncio.get_running_loop())
    config = EncoderConfig(modalities=modalities, num_decode_processes=2, model_dir=str(model_dir))
    hub = LocalHub()
    plane, ears = LocalPlane(hub, "local://encoder-1"), LocalPlane(hub, WORKER.address)
    source = LocalFeatureSource(LocalChannelHub(), "encoder-1", 256 * 2**20)
    service = EncoderService(MemberId("encoder-1"), config, family, model, plane, source, SystemClock())

    def release(message: PlaneMessage) -> None:
        assert isinstance(message, UnitReady)
        generation = message.ticket.generation
        done = UnitRelease(WORKER.member_id, message.request_id, message.attempt, message.unit, generation)
        ears.send(message.encoder_address, done)

    ears.start(release)
    await service.start()
    service.update_members([WORKER])
    try:
        yield Stage(service, family, model)
    finally:
        model.gate.set()
        await service.stop()
        for endpoint in (ears, plane):
            endpoint.close()
        source.close()

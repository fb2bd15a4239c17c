"""How long one picture waits behind a video of 120 frames, in a real encoder service with decode processes and the demo
model: from the moment that the picture is decoded until its forward begins."""

from __future__ import annotations

import asyncio
import io
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from deploy.demo.build import demo_checkpoint
from encoder_pool.config import EncoderConfig
from encoder_pool.service import EncoderService
from fabric.channel_local import LocalChannelHub, LocalFeatureSource
from fabric.clock import SystemClock
from fabric.ids import MemberId, RequestId
from fabric.messages import Destination, EncodeRequest, MediaItem, Member
from fabric.plane_local import LocalHub, LocalPlane
from modalities.family import EncoderInput, EncoderModel, Family, MediaOptions
from modalities.identify import plan_media
from modalities.registry import REGISTRY

NUM_ROUNDS = 7
OPTIONS = MediaOptions(fps=30.0, max_frames=120)
WORKER = Member(MemberId("worker-1"), "worker", "local://worker-1", "here", 1, (), "worker-1")


class Waits(NamedTuple):
    """Medians over the rounds."""

    wait_s: float
    unit_s: float
    """Of the video's longest unit in each round."""
    num_units: int
    num_rounds: int

    @property
    def in_units(self) -> float:
        return self.wait_s / self.unit_s


class Watched:
    """The model, with when each forward began and ended."""

    def __init__(self, model: EncoderModel) -> None:
        self._model = model
        self.forwards: list[tuple[str, float, float]] = []
        """(modality, start, end)."""

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        started_s = time.monotonic()
        features = self._model.encode(inputs)
        self.forwards.append((inputs[0].modality, started_s, time.monotonic()))
        return features


async def measure_waits(device: str) -> Waits:
    """Starts and stops a service of its own."""
    directory = demo_checkpoint()
    family = REGISTRY.load_family(directory)
    modalities = ("image", "video")
    model = Watched(family.load_encoder(directory, device, "float32", modalities))
    config = EncoderConfig(modalities=modalities, num_decode_processes=2, model_dir=str(directory))
    hub = LocalHub()
    plane, ears = LocalPlane(hub, "local://encoder-1"), LocalPlane(hub, WORKER.address)
    source = LocalFeatureSource(LocalChannelHub(), "encoder-1", 256 * 2**20)
    service = EncoderService(MemberId("encoder-1"), config, family, model, plane, source, SystemClock())
    ears.start(lambda _: None)
    await service.start()
    service.update_members([WORKER])
    try:
        rounds = [await _round(service, family, model, number) for number in range(NUM_ROUNDS)]
    finally:
        await service.stop()
        for endpoint in (ears, plane):
            endpoint.close()
        source.close()
    return Waits(
        statistics.median(wait_s for wait_s, _, _ in rounds),
        statistics.median(unit_s for _, unit_s, _ in rounds),
        rounds[0][2],
        NUM_ROUNDS,
    )


async def _round(service: EncoderService, family: Family, model: Watched, number: int) -> tuple[float, float, int]:
    """(wait, the video's longest unit, its number of units). The picture comes with the video's first unit."""
    model.forwards.clear()
    film, still = _film(number), _picture(number)
    film_item, picture_item = _item(family, film, "video"), _item(family, still, "image")
    first = asyncio.create_task(service.encode(_request(f"film-{number}", film_item), [film]))
    while not service.report().num_encoding:  # noqa: ASYNC110 - what it waits for is in another part
        await asyncio.sleep(0.0005)
    received_s = time.monotonic()
    result = await service.encode(_request(f"picture-{number}", picture_item), [still])
    await first
    decoded_s = received_s + result.items[0].times.decode_s
    (began_s,) = (start for modality, start, _ in model.forwards if modality == "image")
    units = [end - start for modality, start, end in model.forwards if modality == "video"]
    return max(0.0, began_s - decoded_s), max(units), len(film_item.unit_tokens)


def _request(name: str, item: MediaItem) -> EncodeRequest:
    destination = Destination(WORKER.member_id, WORKER.address)
    return EncodeRequest(RequestId(name), 0, MemberId("router-1"), (item,), destination, (time.time(), name))


def _item(family: Family, data: bytes, modality: str) -> MediaItem:
    header = REGISTRY.modality(modality).probe(data, "bench")
    return plan_media(family, data, header, 0, "bench", options=OPTIONS).item


def _picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def _film(seed: int) -> bytes:
    """120 frames of 256 x 256, 30 a second."""
    import av

    frames = np.random.default_rng(seed).integers(0, 256, (4, 256, 256, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=30)
        stream.width = stream.height = 256
        stream.pix_fmt = "yuv420p"
        for number in range(120):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frames[number % 4], format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()

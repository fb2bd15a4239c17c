"""Sends bad media through HTTP and the whole cluster: each is answered with a 400 that names the part, other requests
are not affected, and the cluster is as healthy afterwards as before."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import av
import httpx
import numpy as np
import pytest
from chat_media import data_url, image_part, picture, png, text_part, user
from media_corpus import sound_file, video_file
from PIL import Image

from deploy.config import ClusterConfig
from deploy.local import LocalCluster
from deploy.testing import in_process_cluster

pytestmark = pytest.mark.torch

PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
VIDEOS = ("mp4-h264", "webm-vp8-opus", "mkv-h264-flac", "avi-mjpeg", "mov-mjpeg")
SOUNDS = ("wav-16", "flac", "ogg-opus", "m4a-aac")
NOISE = np.random.default_rng(3).integers(0, 256, 4096, np.uint8).tobytes()


def part(modality: str, data: bytes, declared: str = "application/octet-stream") -> dict[str, object]:
    if modality == "input_audio":
        return {"type": modality, modality: {"data": base64.b64encode(data).decode(), "format": declared}}
    return {"type": f"{modality}_url", f"{modality}_url": {"url": data_url(data, declared)}}


def picture_file(name: str) -> bytes:
    buffer = io.BytesIO()
    noise = np.random.default_rng(1).integers(0, 256, (80, 80, 3), np.uint8)
    Image.fromarray(noise).save(buffer, name)
    return buffer.getvalue()


def png_of(width: int, height: int) -> bytes:
    """Returns a PNG whose header promises this size, followed by hardly any data."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(4096))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def silence(seconds: int) -> bytes:
    """Returns silent FLAC at 8 kHz, which takes a few bytes per second."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000 * seconds), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        stream.codec_context.open(strict=False)
        resampler = av.AudioResampler("s16", "mono", 8000, frame_size=stream.codec_context.frame_size or 4096)
        for piece in [*resampler.resample(frame), *resampler.resample(None), None]:
            container.mux(stream.encode(piece))
    return buffer.getvalue()


def empty_wav() -> bytes:
    head = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36, b"WAVE", b"fmt ", 16, 1, 1, 16000, 32000, 2, 16, b"data", 0)
    assert len(head) == 44
    return head


def cut(data: bytes, share: float = 0.5) -> bytes:
    return data[: int(len(data) * share)]


def spoilt(data: bytes) -> bytes:
    """Returns data whose first bytes are right and whose other bytes are noise."""
    return data[:32] + NOISE


CASES: dict[str, Callable[[], dict[str, object]]] = {
    **{f"cut {name}": lambda name=name: part("image", cut(picture_file(name))) for name in PICTURE_FORMATS},
    **{f"spoilt {name}": lambda name=name: part("image", spoilt(picture_file(name))) for name in PICTURE_FORMATS},
    **{f"cut {name}": lambda name=name: part("video", cut(video_file(name), 0.6)) for name in VIDEOS},
    **{f"spoilt {name}": lambda name=name: part("video", spoilt(video_file(name))) for name in VIDEOS},
    **{f"cut {name}": lambda name=name: part("audio", cut(sound_file(name))) for name in SOUNDS},
    **{f"spoilt {name}": lambda name=name: part("audio", spoilt(sound_file(name))) for name in SOUNDS},
    "200 megapixels": lambda: part("image", png_of(20_000, 10_000), "image/png"),
    "bomb of a picture": lambda: part("image", png_of(2**31 - 1, 2**31 - 1), "image/png"),
    "picture of a file with nothing behind its header": lambda: part("image", png_of(64, 64), "image/png"),
    "too long a sound": lambda: part("audio", silence(700), "audio/flac"),
    "no sound at all": lambda: part("audio", empty_wav(), "audio/wav"),
    "no sound at all, as input": lambda: part("input_audio", empty_wav(), "wav"),
    "video without frames": lambda: part("video", sound_file("m4a-aac"), "video/mp4"),
    "frames of one picture": lambda: part("video", NOISE, "video/jpeg"),
    "picture that is a video": lambda: part("image", video_file("mp4-h264"), "image/png"),
    "video that is a picture": lambda: part("video", png(picture(1)), "video/mp4"),
    "sound that is a picture": lambda: part("input_audio", png(picture(1)), "wav"),
    "sound that is a silent video": lambda: part("audio", video_file("mp4-h264"), "audio/mp4"),
    "nothing": lambda: part("image", b""),
    "no base64": lambda: {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,####"}},
}


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    config = ClusterConfig.model_validate(
        {
            "encoders": {"modalities": ["image", "video", "audio"], "decode_processes": 1},
            "workers": {"replicas": 1, "num_blocks": 512},
            "media": {"probe_processes": 1},
        }
    )
    async with in_process_cluster(config) as (cluster, client):
        yield cluster, client


async def post(client: httpx.AsyncClient, *parts: dict[str, object]) -> httpx.Response:
    body: dict[str, Any] = {"model": "weft-demo", "messages": user(*parts), "max_tokens": 1, "temperature": 0}
    return await client.post("/v1/chat/completions", json=body)


async def test_bad_media_are_refused_by_name_and_harm_nobody() -> None:
    good = [
        image_part(1),
        part("video", video_file("mp4-h264-aac")),
        part("audio", sound_file("flac")),
        part("image", png(Image.new("RGB", (1, 1)))),
    ]
    async with serving() as (cluster, client):
        before = await post(client, *good)
        assert before.status_code == 200, before.text
        wrong: list[tuple[str, object]] = []
        for name, make in CASES.items():
            response = await post(client, text_part("What is this?"), good[0], make())
            error = response.json().get("error", {})
            found = (response.status_code, error.get("code"), error.get("param"))
            if found != (400, "invalid_media", "messages.0.content.2"):
                wrong.append((name, (*found, error.get("message"))))
        assert wrong == []
        after = await post(client, *good)
        assert after.status_code == 200
        assert after.json()["choices"] == before.json()["choices"]
        cluster.router.check_health()
        for encoder in cluster.encoders.services.values():
            encoder.check_health()
            assert encoder.report().num_items_pending == 0
        assert cluster.router.admission.num_in_flight == 0

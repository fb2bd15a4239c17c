"""Makes short synthetic media to calibrate an encoder with: one small and one ordinary medium of each modality.

They are ordinary files, so nothing is assumed about how a family processes them. The module knows nothing of any
particular family.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image

from fabric.ids import MmHash
from fabric.messages import MediaItem
from modalities.family import AudioHeader, Family, ImageHeader, MediaHeader, VideoHeader

FPS = 4
NUM_FRAMES = 8
SAMPLE_RATE = 16_000


class CalibrationSample(NamedTuple):
    header: MediaHeader
    data: bytes


def image_sample(edge: int) -> CalibrationSample:
    """Makes a grey PNG of `edge` x `edge` pixels."""
    buffer = io.BytesIO()
    Image.new("RGB", (edge, edge), (127, 127, 127)).save(buffer, "PNG")
    return CalibrationSample(ImageHeader("PNG", edge, edge, "RGB"), buffer.getvalue())


def video_sample(edge: int) -> CalibrationSample:
    """Makes an MP4 of two seconds, `edge` x `edge` pixels, that grows brighter."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=FPS)
        stream.width = stream.height = edge
        stream.pix_fmt = "yuv420p"
        for number in range(NUM_FRAMES):
            pixels = np.full((edge, edge, 3), 255 * number // NUM_FRAMES, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return CalibrationSample(VideoHeader("mp4", edge, edge, NUM_FRAMES, NUM_FRAMES / FPS), buffer.getvalue())


def audio_sample(seconds: int, rate: int = SAMPLE_RATE) -> CalibrationSample:
    """Makes a WAV of one channel: a tone of 440 Hz."""
    num_samples = seconds * rate
    tone = 8000 * np.sin(2 * np.pi * 440 / rate * np.arange(num_samples))
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(tone.astype("<i2").tobytes())
    return CalibrationSample(AudioHeader("wav", rate, 1, num_samples), buffer.getvalue())


def sample_item(family: Family, sample: CalibrationSample, modality: str) -> MediaItem:
    """Plans a sample as a router would."""
    plan = family.plan(sample.header)
    return MediaItem(
        index=0,
        modality=modality,
        mm_hash=MmHash("calibration"),
        grid=plan.grid,
        unit_tokens=plan.unit_tokens,
        cost=plan.cost,
        part="calibration",
        row_seconds=plan.row_seconds,
        num_levels=plan.num_levels,
    )


MODALITY_TO_SAMPLES: dict[str, tuple[Callable[[int], CalibrationSample], tuple[int, ...]]] = {
    "image": (image_sample, (64, 448)),
    "video": (video_sample, (64, 224)),
    "audio": (audio_sample, (2, 10)),
}
"""Maps a modality to the function that makes its samples, and to their edges in pixels or lengths in seconds. The two
sizes are far enough apart to separate slope and overhead."""

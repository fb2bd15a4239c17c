"""Encodes a conversation of the demo as an OpenAI client sends it: PNG pictures and MP4 clips as data URLs, and WAV
sounds in base64. It knows no cluster."""

from __future__ import annotations

import base64
import io
import wave
from fractions import Fraction
from typing import Any

import av
import cv2
import numpy as np

from deploy.demo.media import SAMPLE_RATE, Clip, Part, Picture, Sample, Sound

VIDEO_BIT_RATE = 4_000_000
"""This rate is high enough that a few small frames lose nothing that a question asks for."""


def messages(sample: Sample) -> list[dict[str, Any]]:
    """Returns the `messages` of a chat completion. The content of a turn that has only text is a string."""
    return [
        {"role": turn.role, "content": str(turn.parts[0]) if _is_text(turn.parts) else [_part(p) for p in turn.parts]}
        for turn in sample.turns
    ]


def png(picture: Picture) -> bytes:
    is_written, data = cv2.imencode(".png", picture.pixels[:, :, ::-1])
    assert is_written
    return data.tobytes()


def wav(sound: Sound) -> bytes:
    """Encodes a sound as WAV: mono, 16 bits."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(np.round(sound.samples * (2**15 - 1)).astype("<i2").tobytes())
    return buffer.getvalue()


def mp4(clip: Clip) -> bytes:
    """Encodes a clip as MP4: MPEG-4 pictures, and AAC if there is a sound track."""
    _, height, width, _ = clip.frames.shape
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        pictures = container.add_stream("mpeg4", rate=Fraction(clip.fps))
        # Video encoders need even sides.
        pictures.width, pictures.height, pictures.pix_fmt = width - width % 2, height - height % 2, "yuv420p"
        pictures.bit_rate = VIDEO_BIT_RATE
        track = None if clip.sound is None else container.add_stream("aac", rate=SAMPLE_RATE, layout="mono")
        for pixels in clip.frames:
            even = np.ascontiguousarray(pixels[: pictures.height, : pictures.width])
            container.mux(pictures.encode(av.VideoFrame.from_ndarray(even, format="rgb24")))
        container.mux(pictures.encode())
        if track is not None and clip.sound is not None:
            heard = av.AudioFrame.from_ndarray(clip.sound.samples[None], format="fltp", layout="mono")
            heard.sample_rate = SAMPLE_RATE
            container.mux(track.encode(heard))
            container.mux(track.encode())
    return file.getvalue()


def _is_text(parts: tuple[Part, ...]) -> bool:
    return len(parts) == 1 and isinstance(parts[0], str)


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Picture):
        return {"type": "image_url", "image_url": {"url": _data_url("image/png", png(part))}}
    if isinstance(part, Sound):
        return {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(part)).decode(), "format": "wav"}}
    return {"type": "video_url", "video_url": {"url": _data_url("video/mp4", mp4(part))}}


def _data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"

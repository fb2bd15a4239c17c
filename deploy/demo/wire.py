"""A conversation of the demo as an OpenAI client sends it: PNG pictures, WAV sounds, MP4 clips, all as data URLs."""

from __future__ import annotations

import base64
import io
import tempfile
import wave
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from deploy.demo.media import SAMPLE_RATE, Clip, Part, Picture, Sample, Sound


def messages(sample: Sample) -> list[dict[str, Any]]:
    """The `messages` of a chat completion. Turns of text alone are strings."""
    return [
        {"role": turn.role, "content": str(turn.parts[0]) if _is_text(turn.parts) else [_part(p) for p in turn.parts]}
        for turn in sample.turns
    ]


def png(picture: Picture) -> bytes:
    is_written, data = cv2.imencode(".png", picture.pixels[:, :, ::-1])
    assert is_written
    return data.tobytes()


def wav(sound: Sound) -> bytes:
    """Mono, 16 bits."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(np.round(sound.samples * (2**15 - 1)).astype("<i2").tobytes())
    return buffer.getvalue()


def mp4(clip: Clip) -> bytes:
    """MPEG-4 pictures without a sound track."""
    _, height, width, _ = clip.frames.shape
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        # Encoders want even sides.
        size = (width - width % 2, height - height % 2)
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), clip.fps, size)
        for frame in clip.frames:
            writer.write(np.ascontiguousarray(frame[: size[1], : size[0], ::-1]))
        writer.release()
        return path.read_bytes()


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

"""Asks a running cluster about a video, and about a sound.

Start the demo cluster with `make serve`, then run:

    .venv/bin/python examples/video_question.py
    .venv/bin/python examples/video_question.py http://127.0.0.1:9000   # another address

The program makes both files itself: an MP4 file of three seconds in which a circle moves to the right, and a WAV file
with two beeps. A request contains them as `video_url` and `input_audio`. docs/media.md says what else a cluster
takes, and how it samples the frames of a video.
"""

import argparse
import base64
import io
import wave
from typing import Any

import av
import httpx
import numpy as np
from PIL import Image, ImageDraw

FPS = 8
SAMPLE_RATE = 16_000


def moving_circle(seconds: int = 3, size: int = 96, radius: int = 16) -> bytes:
    """Returns an MP4 file: a blue circle moves from the left edge of a white ground to the right edge."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=FPS)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = size, size, "yuv420p", 4_000_000
        for x in np.linspace(radius, size - radius, seconds * FPS):
            picture = Image.new("RGB", (size, size), "white")
            ImageDraw.Draw(picture).circle((x, size / 2), radius, fill=(35, 65, 215))
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode())
    return file.getvalue()


def two_beeps() -> bytes:
    """Returns a WAV file: two beeps of 0.15 seconds, with silence around them."""
    moments = np.arange(int(0.15 * SAMPLE_RATE)) / SAMPLE_RATE
    beep = np.sin(2 * np.pi * 800 * moments) * np.minimum(1, 60 * np.minimum(moments, moments[::-1]))
    pause = np.zeros(int(0.2 * SAMPLE_RATE))
    samples = np.concatenate([pause, beep, pause, beep, pause, pause])
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(SAMPLE_RATE)
        sound.writeframes((samples * 12_000).astype("<i2").tobytes())
    return file.getvalue()


def ask(client: httpx.Client, medium: dict[str, Any], question: str) -> str:
    """Returns the answer to a question about one medium."""
    content = [medium, {"type": "text", "text": question}]
    body = {"model": "weft-demo", "temperature": 0, "messages": [{"role": "user", "content": content}]}
    response = client.post("/v1/chat/completions", json=body).raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Asks a Weft cluster about a video and a sound.")
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="is the URL of the cluster")
    client = httpx.Client(base_url=parser.parse_args().url, timeout=120)

    video = "data:video/mp4;base64," + base64.b64encode(moving_circle()).decode()
    medium = {"type": "video_url", "video_url": {"url": video}}
    print(f"video: {ask(client, medium, 'Which way does the shape move?')}")

    sound = base64.b64encode(two_beeps()).decode()
    medium = {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}}
    print(f"sound: {ask(client, medium, 'How many beeps do you hear?')}")


if __name__ == "__main__":
    main()

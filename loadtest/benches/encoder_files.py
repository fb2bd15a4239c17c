"""Makes the inputs of the encoder bench: videos and pictures that differ, and the demo model with a limit of frames
that covers a whole video.
"""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import numpy as np
from PIL import Image

from deploy.demo.build import demo_checkpoint

NUM_FRAMES = 120


def picture(seed: int) -> bytes:
    """Makes a PNG of noise, 96 x 96."""
    pixels = np.random.default_rng(seed).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def film() -> bytes:
    """Makes an MP4 of 120 frames of 256 x 256, at 30 frames per second."""
    import av

    frames = np.random.default_rng(0).integers(0, 256, (4, 256, 256, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=30)
        stream.width = stream.height = 256
        stream.pix_fmt = "yuv420p"
        for number in range(NUM_FRAMES):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frames[number % 4], format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def another(film: bytes, number: int) -> bytes:
    """Returns the same video as a different file, which no cache has: a box of free space follows (ISO 14496-12,
    8.1.2)."""
    return film + struct.pack(">I4sQ", 16, b"free", number)


def model_of_long_films(directory: Path) -> Path:
    """Makes a copy of the demo checkpoint in `directory`, by links, that uses up to 120 frames of a video; the demo's
    own limit is 32."""
    for file in demo_checkpoint().iterdir():
        if file.name == "video_preprocessor_config.json":
            settings = json.loads(file.read_text()) | {"max_frames": NUM_FRAMES}
            (directory / file.name).write_text(json.dumps(settings))
        else:
            (directory / file.name).symlink_to(file)
    return directory

"""Writes files that decode to exactly their input: lossless H.264 and linear PCM, in Matroska."""

from __future__ import annotations

import io
import wave
from fractions import Fraction

import av
import numpy as np
import numpy.typing as npt

RATE = 16_000


def quantised(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Returns the samples rounded to 16 bits."""
    return (_pcm(samples) / np.float32(2**15)).astype(np.float32)


def wav(samples: npt.NDArray[np.float32]) -> bytes:
    """Returns a WAV file: mono, 16 kHz, 16 bits."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(_pcm(samples).tobytes())
    return buffer.getvalue()


def mkv(frames: npt.NDArray[np.uint8], fps: float | Fraction, samples: npt.NDArray[np.float32] | None = None) -> bytes:
    """Returns a Matroska file. `frames` has shape `(num_frames, height, width, 3)`; `samples` are its sound track, at
    16 kHz."""
    buffer = io.BytesIO()
    rate = Fraction(fps).limit_denominator(1001)
    with av.open(buffer, "w", format="matroska") as container:
        stream = container.add_stream("libx264rgb", rate=rate, options={"qp": "0", "bf": "0"})
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "rgb24"
        stream.thread_count = 1
        sound = container.add_stream("pcm_s16le", rate=RATE, layout="mono") if samples is not None else None
        for index, pixels in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            picture.pts, picture.time_base = index, 1 / rate
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
        if sound is not None and samples is not None:
            piece = av.AudioFrame.from_ndarray(_pcm(samples)[None], format="s16", layout="mono")
            piece.sample_rate, piece.pts, piece.time_base = RATE, 0, Fraction(1, RATE)
            container.mux(sound.encode(piece))
            container.mux(sound.encode(None))
    return buffer.getvalue()


def _pcm(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
    return np.clip(np.round(samples * 2**15), -(2**15), 2**15 - 1).astype("<i2")

"""Makes sound files for tests: tones and noise, in every container and codec that Weft takes."""

from __future__ import annotations

import io
import json
import wave
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]

FORMATS: dict[str, tuple[str, str, dict[str, str]]] = {
    "wav": ("wav", "pcm_s16le", {}),
    "wav-u8": ("wav", "pcm_u8", {}),
    "wav-24": ("wav", "pcm_s24le", {}),
    "wav-float": ("wav", "pcm_f32le", {}),
    "flac": ("flac", "flac", {}),
    "mp3": ("mp3", "libmp3lame", {"b": "96k"}),
    "mp3-vbr": ("mp3", "libmp3lame", {"q": "4"}),
    "ogg-opus": ("ogg", "libopus", {"b": "64k"}),
    "m4a": ("ipod", "aac", {"b": "96k"}),
    "webm": ("webm", "libopus", {"b": "64k"}),
}
"""Maps a name to its (muxer, codec, options)."""
MEL = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16}


def tone(seconds: float, rate: int, hz: float = 440.0, level: float = 0.5, num_channels: int = 1) -> Samples:
    """Returns a tone of shape `(num_channels, num_samples)`, which is the same in all channels."""
    times = np.arange(round(seconds * rate)) / rate
    return np.tile((level * np.sin(2 * np.pi * hz * times)).astype(np.float32), (num_channels, 1))


def noise(num_samples: int, seed: int = 0, level: float = 0.1) -> Samples:
    """Returns some tones that begin and end, over noise. It has shape `(num_samples,)`."""
    rng = np.random.default_rng(seed)
    times = np.arange(num_samples) / 16000
    found = rng.standard_normal(num_samples)
    for hz in rng.uniform(100, 4000, 4):
        found += 3 * np.sin(2 * np.pi * hz * times) * (np.sin(times * rng.uniform(0.5, 5)) > 0)
    return (level * found).astype(np.float32)


def encoded(samples: Samples, rate: int, name: str = "wav") -> bytes:
    """Returns a file of samples of shape `(num_channels, num_samples)`."""
    muxer, codec, options = FORMATS[name]
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[len(samples)]
    out = io.BytesIO()
    with av.open(out, "w", format=muxer) as container:
        stream = container.add_stream(codec, rate=rate, options=dict(options))
        stream.layout = layout
        resampler = av.AudioResampler(format=stream.codec_context.format, layout=layout, rate=rate)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=layout)
        frame.sample_rate, frame.time_base, frame.pts = rate, Fraction(1, rate), 0
        fifo = av.AudioFifo()
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            part.pts = None
            fifo.write(part)
        size = stream.codec_context.frame_size or 1024
        at = 0
        while (part := fifo.read(size, partial=True)) is not None:
            part.pts, part.time_base, part.sample_rate = at, Fraction(1, rate), rate
            at += part.samples
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return out.getvalue()


def wav(samples: Samples, rate: int) -> bytes:
    """Returns a WAV file of one channel and 16 bits. It may have no samples."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return out.getvalue()


def write_preprocessor(directory: Path, **changes: Any) -> Path:
    """Writes preprocessor_config.json into a checkpoint directory and returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "preprocessor_config.json").write_text(json.dumps(MEL | changes))
    return directory

"""Writes the sound of an answer in the formats that clients may ask for. The samples are int16, little-endian, of one
channel. PyAV (FFmpeg) encodes what is compressed, because it is what reads sounds here already."""

from __future__ import annotations

import io
import struct

import av
import numpy as np

PCM, WAV = "pcm16", "wav"
FORMAT_TO_MEDIA_TYPE = {
    WAV: "audio/wav",
    PCM: "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}
"""Maps each format to the type of its file. Opus comes in an Ogg file, and AAC in an ADTS stream."""
_FORMAT_TO_CODEC = {
    "flac": ("flac", "flac"),
    "mp3": ("mp3", "libmp3lame"),
    "opus": ("ogg", "libopus"),
    "aac": ("adts", "aac"),
}
"""Maps each compressed format to FFmpeg's container and codec."""
_UNKNOWN_SIZE = 0xFFFF_FFFF


def encoded_audio(samples: bytes, sample_rate: int, form: str) -> bytes:
    """Returns the samples as a file of the given format, which is a key of `FORMAT_TO_MEDIA_TYPE`."""
    if form == PCM:
        return samples
    if form == WAV:
        return wav_header(sample_rate, len(samples)) + samples
    container_name, codec_name = _FORMAT_TO_CODEC[form]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container_name) as container:
        stream = container.add_stream(codec_name, rate=sample_rate, layout="mono")
        assert isinstance(stream, av.AudioStream)
        frame = av.AudioFrame.from_ndarray(np.frombuffer(samples, "<i2")[None, :], format="s16", layout="mono")
        frame.sample_rate = sample_rate
        for packet in (*(stream.encode(frame) if samples else ()), *stream.encode(None)):
            container.mux(packet)
    return buffer.getvalue()


def wav_header(sample_rate: int, num_bytes: int | None = None) -> bytes:
    """Returns the header of a WAV file of int16 samples. Without `num_bytes` it is that of a stream whose length is not
    known yet, as players accept it."""
    data_bytes = _UNKNOWN_SIZE if num_bytes is None else num_bytes
    riff_bytes = _UNKNOWN_SIZE if num_bytes is None else 36 + num_bytes
    form = struct.pack("<HHIIHH", 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    return (
        b"RIFF"
        + struct.pack("<I", riff_bytes)
        + b"WAVEfmt "
        + struct.pack("<I", 16)
        + form
        + b"data"
        + struct.pack("<I", data_bytes)
    )

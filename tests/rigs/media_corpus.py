"""Generates video and sound files in the containers and codecs that clients send.

Every frame is a flat background with a bright square that moves from frame to frame, so that frames differ even after
lossy coding. Files are made once per process. This module knows nothing of Weft.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]


class Clip(NamedTuple):
    """A `Clip` says how to make a video file."""

    container: str = "mp4"
    codec: str = "libx264"
    width: int = 48
    height: int = 32
    num_frames: int = 12
    fps: int = 10
    sound_codec: str = ""
    rotation: int = 0
    """A player must turn the video counterclockwise by this many degrees."""
    times: tuple[int, ...] = ()
    """Holds the times of the frames in 1/1000 s, for a variable rate."""
    options: tuple[tuple[str, str], ...] = ()
    """Holds the options of the codec."""
    pixel_format: str = "yuv420p"
    muxer_options: tuple[tuple[str, str], ...] = ()


CLIPS: Mapping[str, Clip] = {
    "mp4-h264": Clip(),
    "mp4-h264-aac": Clip(sound_codec="aac"),
    "mp4-h264-no-b-frames": Clip(options=(("bf", "0"),)),
    "mp4-fragmented": Clip(muxer_options=(("movflags", "frag_keyframe+empty_moov"),)),
    "mp4-mpeg4": Clip(codec="mpeg4", num_frames=7),
    "mp4-rotated-90": Clip(rotation=90),
    "mp4-rotated-180": Clip(rotation=180),
    "mp4-rotated-270": Clip(rotation=-90, codec="mpeg4"),
    "mp4-variable-rate": Clip(times=(0, 40, 80, 500, 540, 1100, 1140, 1180, 2000, 2040)),
    "mov-h264-mp3": Clip("mov", sound_codec="libmp3lame"),
    "mov-mjpeg": Clip("mov", "mjpeg", pixel_format="yuvj420p"),
    "mov-pcm": Clip("mov", sound_codec="pcm_s16le"),
    "webm-vp8-opus": Clip("webm", "libvpx", sound_codec="libopus"),
    "webm-vp8-hidden-frames": Clip(
        "webm", "libvpx", num_frames=40, options=(("auto-alt-ref", "1"), ("lag-in-frames", "16"))
    ),
    "webm-vp9": Clip("webm", "libvpx-vp9", num_frames=30, fps=30),
    "webm-vp9-variable-rate": Clip("webm", "libvpx-vp9", times=(0, 33, 67, 900, 933, 2100)),
    "mkv-h264-flac": Clip("matroska", sound_codec="flac"),
    "mkv-mpeg4-ac3": Clip("matroska", "mpeg4", sound_codec="ac3"),
    "avi-mjpeg": Clip("avi", "mjpeg", pixel_format="yuvj420p"),
    "avi-mpeg4-mp3": Clip("avi", "mpeg4", sound_codec="libmp3lame"),
    "mpegts-h264-aac": Clip("mpegts", sound_codec="aac"),
    "mpegts-mpeg2": Clip("mpegts", "mpeg2video", fps=25),
    "mpeg-mpeg1": Clip("mpeg", "mpeg1video", fps=25),
    "mp4-odd-size": Clip(width=51, height=33, pixel_format="yuv444p"),
    "webm-odd-size": Clip("webm", "libvpx", width=37, height=51),
    "mp4-one-frame": Clip(num_frames=1),
    "webm-one-frame": Clip("webm", "libvpx", num_frames=1),
    "avi-one-frame": Clip("avi", "mjpeg", num_frames=1, pixel_format="yuvj420p"),
}


STORED = ("hevc.mp4", "av1.mp4")
"""Names the files in the folder `media`, each with 12 frames of 128x96 at 10 frames per second. They are stored because
their encoders write to the terminal, and one of them corrupts the heap of its process on small pictures (x265 4.1,
48x32)."""
_FOLDER = Path(__file__).parents[1] / "media"


def frame_pixels(index: int, width: int, height: int) -> Pixels:
    """Returns an RGB frame of shape `(height, width, 3)`: a square on a background. The index determines the place
    of the square and the brightness of the background."""
    pixels = np.full((height, width, 3), 20 + index * 37 % 120, np.uint8)
    left, top = index * 5 % (width - 8), index * 3 % (height - 8)
    pixels[top : top + 8, left : left + 8] = (250, 240, 30)
    return pixels


def tone(num_samples: int, sample_rate: int, hertz: float = 440.0) -> npt.NDArray[np.int16]:
    """Returns a mono tone."""
    wave = np.sin(2 * np.pi * hertz * np.arange(num_samples) / sample_rate)
    return (wave * 12000).astype(np.int16)


@cache
def video_file(name: str) -> bytes:
    """Returns a file of `CLIPS` or of `STORED`."""
    if name in STORED:
        return (_FOLDER / name).read_bytes()
    clip = CLIPS[name]
    return encode_video([frame_pixels(at, clip.width, clip.height) for at in range(clip.num_frames)], clip)


def encode_video(frames: Sequence[Pixels], clip: Clip) -> bytes:
    """Encodes `frames` as `clip` says. Raises the errors of PyAV."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=clip.container, options=dict(clip.muxer_options)) as container:
        stream = container.add_stream(clip.codec, rate=clip.fps, options=dict(clip.options))
        stream.width, stream.height = frames[0].shape[1], frames[0].shape[0]
        stream.pix_fmt = clip.pixel_format
        stream.thread_count = 1
        if clip.times:
            stream.codec_context.time_base = Fraction(1, 1000)
        if clip.rotation:
            stream.set_display_rotation(clip.rotation)
        sound = container.add_stream(clip.sound_codec, rate=48000) if clip.sound_codec else None
        num_frames = len(clip.times) or len(frames)
        for at in range(num_frames):
            picture = av.VideoFrame.from_ndarray(frames[at % len(frames)], format="rgb24")
            picture.pts = clip.times[at] if clip.times else at
            picture.time_base = Fraction(1, 1000 if clip.times else clip.fps)
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
        if sound is not None:
            _mux_sound(container, sound, tone(48000 * num_frames // clip.fps, 48000), 48000)
    return buffer.getvalue()


def motion_jpeg(pictures: Sequence[bytes]) -> bytes:
    """Returns an AVI of unchanged JPEG files. Its header says 64x48."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="avi") as file:
        stream = file.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        stream.codec_context.open()
        for at, data in enumerate(pictures):
            packet = av.Packet(data)
            packet.stream, packet.time_base, packet.pts, packet.dts = stream, Fraction(1, 10), at, at
            packet.is_keyframe = True
            file.mux(packet)
    return buffer.getvalue()


def _mux_sound(container: Any, stream: Any, samples: npt.NDArray[np.int16], sample_rate: int) -> None:
    """Encodes mono samples of shape `(num_samples,)` and writes them into the container."""
    chunk = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
    chunk.sample_rate = sample_rate
    stream.codec_context.open(strict=False)
    size = stream.codec_context.frame_size or 4096
    resampler = av.AudioResampler(stream.format, stream.layout, sample_rate, frame_size=size)
    for piece in [*resampler.resample(chunk), *resampler.resample(None), None]:
        # The FLAC encoder's last packet is empty and brings the final header, which only FLAC's own muxer takes.
        container.mux([packet for packet in stream.encode(piece) if packet.size or container.format.name == "flac"])


class Recording(NamedTuple):
    """A `Recording` says how to make a sound file."""

    container: str
    codec: str
    sample_rate: int = 16000
    options: tuple[tuple[str, str], ...] = ()
    sample_format: str = ""
    muxer_options: tuple[tuple[str, str], ...] = ()
    num_samples: int = 12345


RECORDINGS: Mapping[str, Recording] = {
    "wav-u8": Recording("wav", "pcm_u8"),
    "wav-16": Recording("wav", "pcm_s16le"),
    "wav-24": Recording("wav", "pcm_s24le", 44100),
    "wav-32": Recording("wav", "pcm_s32le"),
    "wav-float": Recording("wav", "pcm_f32le"),
    "mp3-constant": Recording("mp3", "libmp3lame", options=(("b", "64k"),)),
    "mp3-variable": Recording("mp3", "libmp3lame", 44100, options=(("q", "4"), ("flags", "qscale"))),
    "mp3-variable-no-header": Recording(
        "mp3", "libmp3lame", 44100, options=(("q", "4"), ("flags", "qscale")), muxer_options=(("write_xing", "0"),)
    ),
    "flac": Recording("flac", "flac"),
    "ogg-vorbis": Recording("ogg", "vorbis", 44100, options=(("strict", "-2"),)),
    "ogg-opus": Recording("ogg", "libopus", 48000),
    "ogg-flac": Recording("ogg", "flac"),
    "webm-opus": Recording("webm", "libopus", 48000),
    "m4a-aac": Recording("ipod", "aac", 44100),
    "m4a-alac": Recording("ipod", "alac", 44100),
    "adts-aac": Recording("adts", "aac", 44100),
}


@cache
def sound_file(name: str) -> bytes:
    """Returns a file of `RECORDINGS`."""
    made = RECORDINGS[name]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=made.container, options=dict(made.muxer_options)) as container:
        stream = container.add_stream(made.codec, rate=made.sample_rate, options=dict(made.options))
        _mux_sound(container, stream, tone(made.num_samples, made.sample_rate), made.sample_rate)
    return buffer.getvalue()


def silent_opus(num_packets: int) -> bytes:
    """Returns an Ogg file in which each packet of two bytes is 120 ms of silence (RFC 6716, section 3.2.5: SILK, two
    frames of 60 ms and no bytes)."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="ogg") as container:
        stream = container.add_stream("libopus", rate=48000)
        stream.codec_context.open()
        for at in range(num_packets):
            packet = av.Packet(b"\x1b\x02")
            packet.stream, packet.time_base, packet.pts, packet.dts = stream, Fraction(1, 48000), at * 5760, at * 5760
            packet.duration = 5760
            container.mux(packet)
    return buffer.getvalue()

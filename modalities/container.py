"""Opens untrusted video and audio containers with FFmpeg's demuxers (PyAV).

This module chooses the demuxer by the file's first bytes, from a short list. So playlists, concat scripts, image
sequences and the other formats that FFmpeg would recognise never reach its parsers, and no file that a container refers
to is opened. Errors of FFmpeg and PyAV become InvalidMedia. This module knows nothing of models, of a deployment's
limits, or of pixels.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

import av
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.error import FFmpegError
from av.video.stream import VideoStream

from fabric.errors import InvalidMedia
from modalities.family import AudioHeader
from modalities.mpeg_audio import first_frame, one_stream
from modalities.packets import PacketTally, lost_packets, num_samples, num_stored_packets, tally
from modalities.truncation import num_lost_bytes
from modalities.unknown_media import seeming

# FFmpeg's messages on stderr are switched off because a hostile file produces many of them; errors that matter are
# raised.
av.logging.set_level(None)

PICTURE_CODECS = {
    *("h264", "hevc", "libdav1d", "av1", "vp8", "vp9", "mpeg4", "mpeg2video", "mpeg1video", "mjpeg", "theora", "h263"),
    *("msmpeg4v3", "prores", "png"),
}
"""Lists the video decoders that are allowed, by FFmpeg's names."""
SOUND_CODECS = {
    *("aac", "mp3", "mp3float", "mp2", "mp2float", "opus", "libopus", "vorbis", "flac", "alac", "ac3", "eac3"),
    *("adpcm_ms", "adpcm_ima_wav"),
}
"""Lists the audio decoders that are allowed, by FFmpeg's names. Linear PCM of every form is allowed too."""
MAX_PIXELS = 2**28
"""Limits the pixels of one frame when FFmpeg itself inspects the streams. The deployment's limit is lower
(`MediaLimits`)."""

_BRANDS_OF_IMAGES = (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1")
_MOV_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"styp")
_TS_PACKET_BYTES = 188
# PyAV raises these errors for broken files: in addition to FFmpeg's own errors there are errors for numbers out of
# range and for pixels of an unknown format.
_ERRORS = (FFmpegError, OSError, ValueError, ArithmeticError, MemoryError)


class Format(NamedTuple):
    name: str
    """This is the name that headers use, e.g. `MP4`."""
    demuxer: str
    """This is FFmpeg's name of the demuxer."""


def sniff(data: bytes) -> Format | None:
    """Returns the container's format, which follows from the file's first bytes, or None if the format is not on the
    list. A declared type is never used."""
    head = data[:12]
    if head[4:8] in _MOV_BOXES:
        return None if head[4:8] == b"ftyp" and head[8:12] in _BRANDS_OF_IMAGES else Format("MP4", "mov")
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return Format("MATROSKA", "matroska")
    if head[:4] in (b"RIFF", b"RF64"):
        name = {b"AVI ": "AVI", b"WAVE": "WAV"}.get(head[8:12])
        return Format(name, name.lower()) if name else None
    if head.startswith(b"OggS"):
        return Format("OGG", "ogg")
    if head.startswith(b"\x00\x00\x01\xba"):
        return Format("MPEG", "mpeg")
    if head[:1] == b"G" and data[_TS_PACKET_BYTES : _TS_PACKET_BYTES + 1] in (b"G", b""):
        return Format("MPEGTS", "mpegts")
    return _sniff_elementary(data)


def _sniff_elementary(data: bytes) -> Format | None:
    """Returns the format of audio that has no container, with or without an ID3 tag in front of it. MPEG audio is also
    recognised if other bytes are in front of it."""
    at = 0
    if data[:3] == b"ID3" and len(data) > 10:  # The size of the tag has 28 bits in four bytes (ID3v2.4, section 3.1).
        at = 10 + sum((byte & 0x7F) << shift for byte, shift in zip(data[6:10], (21, 14, 7, 0), strict=True))
    head = data[at : at + 4]
    if head == b"fLaC":
        return Format("FLAC", "flac")
    if len(head) == 4 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        # The two bits of the layer are zero in ADTS (ISO 13818-7) and not zero in MPEG audio (ISO 11172-3).
        return Format("AAC", "aac") if head[1] & 0xF6 == 0xF0 else Format("MP3", "mp3")
    return Format("MP3", "mp3") if at or first_frame(data) >= 0 else None


@contextmanager
def open_container(data: bytes, param: str, is_uncut: bool = False) -> Iterator[InputContainer]:
    """Opens a file and yields its container, whose streams are known. If `is_uncut` is true, the container includes
    what an MP4 file's edit list cuts away. Raises InvalidMedia that names `param` if the file has another format or is
    truncated, and for every error of FFmpeg or PyAV within the block."""
    found = sniff(data)
    if found is None:
        raise InvalidMedia(f"{param}: not a video or sound of a supported format{seeming(data)}", param=param)
    if found.name == "MP3":
        data = one_stream(data)
    if num_lost := num_lost_bytes(found.name, data):
        raise InvalidMedia(
            f"{param}: the {found.name} file is truncated: {num_lost} bytes or more are missing", param=param
        )
    try:
        with av.open(
            io.BytesIO(data),
            "r",
            format=found.demuxer,
            options={"max_pixels": str(MAX_PIXELS), "threads": "1", **({"ignore_editlist": "1"} if is_uncut else {})},
            metadata_errors="replace",
            io_open=_refuse_reference,
        ) as container:
            yield container
    except _ERRORS as error:
        why = "takes more memory than it may" if isinstance(error, MemoryError) else "is broken or truncated"
        raise InvalidMedia(f"{param}: the {found.name} file {why}", param=param) from error


def format_name(container: InputContainer) -> str:
    """Returns the name of the format that headers use: `MP4`, `MATROSKA` (also for WebM), `AVI`, ..."""
    name: str = container.format.name.split(",")[0]
    return {"mov": "MP4"}.get(name, name.upper())


def picture_stream(container: InputContainer) -> VideoStream | None:
    """Returns the first video stream that can be decoded, or None. Cover art does not count as video."""
    for stream in container.streams.video:
        if not stream.disposition & av.stream.Disposition.attached_pic and _codec(stream) in PICTURE_CODECS:
            return stream
    return None


def sound_stream(container: InputContainer) -> AudioStream | None:
    """Returns the first audio stream that can be decoded, or None."""
    for stream in container.streams.audio:
        codec = _codec(stream)
        if (codec in SOUND_CODECS or codec.startswith("pcm_")) and stream.rate and stream.channels:
            return stream
    return None


def check_whole(data: bytes, name: str, counted: PacketTally, param: str) -> None:
    """Raises InvalidMedia if the file of format `name` holds less than it declares. May set `counted.num_packets` to
    the count without the edit list."""
    lost = lost_packets(name, counted)
    if lost and name == "MP4":
        # The demuxer skips most of what an edit list cuts away, but the file declares it nevertheless. So the packets
        # are counted again without the edit list.
        with open_container(data, param, is_uncut=True) as container:
            counted.num_packets = num_stored_packets(container, counted.stream.index)
        lost = lost_packets(name, counted)
    if lost:
        raise InvalidMedia(f"{param}: the {name} file is truncated: {lost}", param=param)


def sound_header(data: bytes, container: InputContainer, param: str) -> AudioHeader:
    """Returns the header of an audio file or of a video's sound track. Demuxes the file to its end. Raises InvalidMedia
    if there is no sound, or if the file holds less than it declares."""
    stream = sound_stream(container)
    if stream is None:
        raise InvalidMedia(f"{param}: no sound that can be decoded", param=param)
    counted = tally(container, [stream])[stream.index]
    check_whole(data, format_name(container), counted, param)
    found = num_samples(counted, stream)
    if found < 1:
        raise InvalidMedia(f"{param}: the sound has no samples", param=param)
    return AudioHeader(format_name(container), stream.rate, stream.channels, found)


def _codec(stream: VideoStream | AudioStream) -> str:
    """Returns the name of the decoder, or an empty string if there is none."""
    context = stream.codec_context
    return context.name if context is not None else ""


def _refuse_reference(url: str, flags: int, options: dict[str, str]) -> NoReturn:
    raise PermissionError("a file may not refer to others")

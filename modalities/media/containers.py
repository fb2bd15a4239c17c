"""Opens untrusted video and audio containers with FFmpeg's demuxers (PyAV), and counts what they hold without decoding
it.

The module chooses the demuxer by the file's first bytes, from a short list. So playlists, concat scripts, image
sequences and the other formats that FFmpeg would recognise never reach its parsers, and no file that a container refers
to is opened. Errors of FFmpeg and PyAV become InvalidMedia.

Frames, samples and seconds are counted packet by packet, because headers may be wrong (variable frame rates, WebM, MP3
of variable bit rate). A number that the container declares only serves for comparison: a file that has less than it
declares is truncated. FFmpeg plays the rest of such a file and reports nothing, so this module finds the truncation
itself, from the bytes before the file is opened and from the packets afterwards.

The module knows nothing of models, of a deployment's limits, or of pixels.
"""

from __future__ import annotations

import io
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple, NoReturn

import av
import numpy as np
import numpy.typing as npt
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.error import FFmpegError
from av.packet import Packet
from av.stream import Stream
from av.video.stream import VideoStream

from fabric.contracts import InvalidMedia
from modalities.family import AudioHeader
from modalities.media.mpeg_audio import first_frame, one_stream
from modalities.media.plugin import AUDIO_S, FRAMES, seeming

# ------------------------------------------------------------ opening a file

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
"""Lists the boxes with which a file may begin."""
_SUPPORTED = "MP4, MOV, 3GP, Matroska, WebM, AVI, MPEG-TS, MPEG-PS, WAV, MP3, FLAC, Ogg, AAC"
"""Lists the formats that `sniff` finds, as messages name them."""
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
        raise InvalidMedia(f"{param}: {not_a_container(data)}", param=param)
    if found.name == "MP3":
        data = one_stream(data)
    if num_lost := num_lost_bytes(found.name, data):
        raise InvalidMedia(
            f"{param}: the {found.name} file is truncated: at least {num_lost} bytes are missing", param=param
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
        why = "needs more memory than the limit" if isinstance(error, MemoryError) else "is broken or truncated"
        raise InvalidMedia(f"{param}: the {found.name} file {why}", param=param) from error


def not_a_container(head: bytes) -> str:
    """Returns what is wrong with a file that `sniff` does not recognise."""
    return f"the file is not a video or a sound of a supported format ({_SUPPORTED}){seeming(head)}"


def _refuse_reference(url: str, flags: int, options: dict[str, str]) -> NoReturn:
    raise PermissionError("a media file must not refer to other files")


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


def _codec(stream: VideoStream | AudioStream) -> str:
    """Returns the name of the decoder, or an empty string if there is none."""
    context = stream.codec_context
    return context.name if context is not None else ""


def sound_header(data: bytes, container: InputContainer, param: str) -> AudioHeader:
    """Returns the header of an audio file or of a video's sound track. Demuxes the file to its end. Raises InvalidMedia
    if there is no sound, or if the file holds less than it declares."""
    stream = sound_stream(container)
    if stream is None:
        raise InvalidMedia(f"{param}: the file contains no sound that can be decoded", param=param)
    counted = tally(container, [stream])[stream.index]
    check_whole(data, format_name(container), counted, param)
    found = num_samples(counted, stream)
    if found < 1:
        raise InvalidMedia(f"{param}: the sound has no samples", param=param)
    return AudioHeader(format_name(container), stream.rate, stream.channels, found)


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


# ------------------------------------------------------------ counting packets

_MOST_DURATION = 2**31
"""Limits the duration of a packet; longer ones count as 0. FFmpeg's Ogg demuxer returns differences of unsigned numbers
at a stream's end."""


@dataclass(slots=True)
class PacketTally:
    """Holds the counts of one stream. Times are in its time base."""

    stream: Stream
    declared_packets: int
    """Holds the number of packets that the header declares; 0 if it declares none."""
    declared_duration: int
    num_packets: int = 0
    num_shown: int = 0
    """Counts the packets from which a decoder makes a frame: those that are neither hidden nor cut away by an edit
    list."""
    start: int | None = None
    """Holds the earliest presentation time of the shown packets."""
    last: int = 0
    """Holds the latest presentation time of the shown packets."""
    last_duration: int = 0
    duration: int = 0
    """Holds the sum of the durations of the shown packets."""
    num_skipped_samples: int = 0
    """Counts the samples that the decoder cuts away at the start (an encoder's delay)."""
    num_padded_samples: int = 0
    """Counts the samples that the decoder cuts away at the end."""
    presented: array[int] = field(default_factory=partial(array, "q"))
    """Holds the presentation times of the shown pictures, in the order of the file. Packets without a time are left
    out."""
    decoded: array[int] = field(default_factory=partial(array, "q"))
    """Holds the decoding times of the same packets. Packets without a time are left out."""

    @property
    def span(self) -> int:
        """Returns the time from the start of the first shown packet to the end of the last."""
        return 0 if self.start is None else self.last - self.start + self.last_duration


def tally(container: InputContainer, streams: Sequence[Stream]) -> dict[int, PacketTally]:
    """Counts the rest of the file in one pass, and returns a dict that maps the index of each stream to its counts.
    Raises the errors that PyAV raises."""
    tallies = {stream.index: PacketTally(stream, stream.frames, stream.duration or 0) for stream in streams}
    for packet in stream_packets(container, *streams):
        counted = tallies[packet.stream_index]
        counted.num_packets += 1
        if is_shown(packet):
            _count(counted, packet)
    return tallies


def _count(counted: PacketTally, packet: Packet[Stream]) -> None:
    counted.num_shown += 1
    duration = packet.duration or 0
    if not 0 <= duration < _MOST_DURATION:
        duration = 0
    counted.duration += duration
    if counted.stream.type == "video":
        if packet.pts is not None:
            counted.presented.append(packet.pts)
        if packet.dts is not None:
            counted.decoded.append(packet.dts)
    at = packet.pts if packet.pts is not None else packet.dts
    if at is not None:
        if counted.start is None or at < counted.start:
            counted.start = at
        if counted.num_shown == 1 or at >= counted.last:
            counted.last, counted.last_duration = at, duration
    # The data are two u32, for the start and for the end (AV_PKT_DATA_SKIP_SAMPLES).
    if packet.has_sidedata("skip_samples"):
        at_start, at_end = struct.unpack_from("<II", bytes(packet.get_sidedata("skip_samples")))
        counted.num_skipped_samples += at_start
        counted.num_padded_samples += min(at_end, duration)


def num_stored_packets(container: InputContainer, index: int) -> int:
    """Returns the number of packets of stream `index` in the rest of the file."""
    return sum(packet.size > 0 for packet in container.demux(container.streams[index]))


def stream_packets(container: InputContainer, *streams: Stream) -> Iterator[Packet[Any]]:
    """Yields the packets to be decoded in the rest of the file. Raises the errors that PyAV raises.

    An MPEG transport stream may be cut out of a longer one. Its pictures before the first key frame, in the file or in
    presentation time, refer to pictures that were cut away. They are left out, as decoders do."""
    is_cut = container.format.name == "mpegts"
    entries: dict[int, int] = {}
    for packet in container.demux(*streams):
        if packet.size == 0:  # An empty packet marks the end of a stream.
            continue
        if is_cut and packet.stream.type == "video":
            time = packet.pts if packet.pts is not None else packet.dts or 0
            if packet.is_keyframe:
                entries.setdefault(packet.stream_index, time)
            if time < entries.get(packet.stream_index, time + 1):
                continue
        yield packet


def is_shown(packet: Packet[Any]) -> bool:
    """Returns whether a decoder makes a frame from the packet, which must not be empty."""
    is_hidden = _HIDDEN.get(packet.stream.codec_context.name)
    return not (packet.is_discard or (is_hidden is not None and is_hidden(memoryview(packet))))


def is_hidden_vp8(data: memoryview) -> bool:
    """Returns whether the frame tag's `show_frame` is 0 (RFC 6386, section 9.1)."""
    return not data[0] >> 4 & 1


def is_hidden_vp9(data: memoryview) -> bool:
    """Returns whether a packet that is one frame shows nothing: the header's `show_existing_frame` and `show_frame` are
    both 0. A superframe holds exactly one frame that is shown, so it is not hidden (VP9 specification, section 6.2 and
    annex B)."""
    if data[-1] & 0xE0 == 0xC0:
        return False
    bits = f"{data[0]:08b}{data[1] if len(data) > 1 else 0:08b}"
    at = 5 if bits[2:4] == "11" else 4
    return bits[at] == "0" and bits[at + 2] == "0"


_HIDDEN = {"vp8": is_hidden_vp8, "libvpx": is_hidden_vp8, "vp9": is_hidden_vp9, "libvpx-vp9": is_hidden_vp9}


def seconds_shown(counted: PacketTally, stream: VideoStream) -> float:
    """Returns how many seconds the frames are shown. The result is exact at a constant rate, however coarse the
    container's clock is. Returns 0.0 if the file has no times."""
    if not counted.num_shown or stream.time_base is None:
        return 0.0
    span = counted.span * stream.time_base
    if not counted.last_duration and counted.num_shown > 1:
        span = span * counted.num_shown / (counted.num_shown - 1)
    rate = stream.average_rate or stream.guessed_rate
    if rate:
        constant = counted.num_shown / Fraction(rate)
        if not span or abs(span - constant) * rate <= Fraction(1, 2):
            return float(constant)
    return float(span)


def irregular_times_s(counted: PacketTally, stream: VideoStream, seconds: float) -> npt.NDArray[np.float64] | None:
    """Returns the time at which each picture appears if the rate varies: `(num_shown,)`, ascending from 0.0.

    Returns None if every picture is within half a frame (and a tick of the container's clock) of its place at the mean
    rate. Also returns None if the packets do not say when their pictures appear. AVI has no presentation times, so its
    decoding times are used: apart from their order, they have the same distances as its pictures."""
    known = next((times for times in (counted.presented, counted.decoded) if len(times) == counted.num_shown), None)
    if not known or stream.time_base is None or seconds <= 0:
        return None
    ticks = np.sort(np.array(known, np.int64))
    times_s: npt.NDArray[np.float64] = (ticks - ticks[0]) * float(stream.time_base)
    frame_s = seconds / len(times_s)
    places_s = np.arange(len(times_s)) * frame_s
    if np.abs(times_s - places_s).max() <= frame_s / 2 + float(stream.time_base):
        return None
    return times_s


def num_samples(counted: PacketTally, stream: AudioStream) -> int:
    """Returns the number of samples per channel that a decoder produces."""
    if stream.time_base is None or stream.rate <= 0:
        return 0
    if (Fraction(1, stream.rate) / stream.time_base).denominator == 1:
        found = counted.duration * stream.time_base * stream.rate
    else:
        # Each duration is rounded to the container's clock, so the sum drifts and the span does not.
        found = counted.span * stream.time_base * stream.rate
        whole = counted.num_shown * (stream.codec_context.frame_size or 0)
        if whole and abs(whole - found) <= found / 20:
            found = Fraction(whole)
    # The demuxers have already subtracted the padding from the last packet's duration for Opus, and for no other codec.
    num_padded = 0 if stream.codec_context.name in ("opus", "libopus") else counted.num_padded_samples
    return max(0, round(found) - counted.num_skipped_samples - num_padded)


def lost_packets(name: str, counted: PacketTally) -> str:
    """Returns in words how much less there is than the container `name` declares. Returns an empty string if nothing is
    missing beyond the tolerance, or if the container does not declare a number."""
    # Containers count each sample of PCM, but a packet holds hundreds of them.
    is_pcm = counted.stream.codec_context.name.startswith("pcm_")
    # AVI counts a frame that was left out like any other, and FFmpeg skips it, so only its time is missing.
    is_timed = name == "AVI" and counted.stream.type == "video"
    num_found = counted.last + counted.last_duration if is_timed else counted.num_packets
    if name in ("MP4", "AVI") and not is_pcm and num_found < counted.declared_packets - FRAMES:
        return f"it contains only {num_found} of {counted.declared_packets} packets"
    if (name == "FLAC" or (name == "MP4" and is_pcm)) and counted.stream.time_base:
        lost_s = float((counted.declared_duration - counted.duration) * counted.stream.time_base)
        if lost_s > AUDIO_S:
            return f"{lost_s:.3f} s are missing"
    return ""


# ------------------------------------------------------------ the end that a container declares

_SLACK_BYTES = 1
"""Allows for a pad byte that writers forget."""
_SLACK_MP3_BYTES = 128
"""Allows for a tag at the end that was counted and removed later."""
_NO_SIZE = 0x7FFF_F000
"""A RIFF size of this or more means that the writer did not know the size, because it wrote to a pipe. SoX and
espeak-ng write the smallest one, FFmpeg the largest that fits."""
_TOP_LEVEL_BOXES = (b"ftyp", b"moov", b"mdat", b"moof", b"free", b"skip", b"wide", b"styp", b"sidx", b"uuid")
"""Lists the boxes that a file may have at its top level."""


def num_lost_bytes(name: str, data: bytes) -> int:
    """Returns the number of bytes that the container `name` (as in headers) declares beyond the end of the file; 0 if
    the file is whole or declares no length. An Ogg file without its last page counts as one byte short.

    The answer follows from the bytes alone. Streams that declare no length (MPEG-TS, ADTS, a recording that was never
    closed) can't be distinguished from shorter ones and are accepted as such."""
    if name in ("WAV", "AVI"):
        declared = struct.unpack_from("<I", data, 4)[0] if len(data) >= 8 else 0
        end = 8 + declared if declared < _NO_SIZE else 0
    elif name == "MP4":
        end = _end_of_boxes(data)
    elif name == "MATROSKA":
        end = _end_of_segment(data)
    elif name == "MP3":
        end = _end_of_frames(data)
    elif name == "OGG":
        return 0 if _has_last_page(data) else 1
    else:
        end = 0
    lost = end - len(data)
    return lost if lost > (_SLACK_MP3_BYTES if name == "MP3" else _SLACK_BYTES) else 0


def _end_of_boxes(data: bytes) -> int:
    """Returns the position behind the boxes of the top level (ISO 14496-12, section 4.2). The first unknown box ends
    the search."""
    at = 0
    while at + 8 <= len(data) and data[at + 4 : at + 8] in _TOP_LEVEL_BOXES:
        (size,) = struct.unpack_from(">I", data, at)
        if size == 1 and at + 16 <= len(data):
            (size,) = struct.unpack_from(">Q", data, at + 8)
        if size < 8:  # A size of 0 means up to the end of the file.
            return at
        at += size
    return at


def _end_of_segment(data: bytes) -> int:
    """Returns the position behind the EBML header and the segment, whose size may be unknown (RFC 8794, section 6.2);
    then the position is 0."""
    at = 4
    header_bytes, width = _vint(data, at)
    at += width + max(header_bytes, 0)
    if header_bytes < 0 or data[at : at + 4] != b"\x18\x53\x80\x67":
        return 0
    size, width = _vint(data, at + 4)
    return at + 4 + width + size if size >= 0 else 0


def _vint(data: bytes, at: int) -> tuple[int, int]:
    """Returns an EBML number and its width in bytes; the number is -1 if it is unknown or broken."""
    if at >= len(data) or data[at] == 0:
        return -1, 1
    width = 9 - data[at].bit_length()
    value = int.from_bytes(data[at : at + width], "big") & ((1 << 7 * width) - 1)
    return (value, width) if value != (1 << 7 * width) - 1 else (-1, width)


def _end_of_frames(data: bytes) -> int:
    """Returns the position behind the frames of an MP3 file. The Xing header in the first frame counts the bytes from
    that frame on. Returns 0 if there is no such count."""
    head = data[: 1 << 18]
    at = max(head.find(b"Xing"), head.find(b"Info"))
    if at < 0 or at + 16 > len(data):
        return 0
    flags, first, second = struct.unpack_from(">III", data, at + 4)
    start = next((back for back in range(at - 36, at - 12) if head[max(back, 0) : back + 1] == b"\xff"), -1)
    if start < 0 or not flags & 2:
        return 0
    return start + int(second if flags & 1 else first)


def _has_last_page(data: bytes) -> bool:
    """Returns whether the last page has the flag of a stream's end and is whole (RFC 3533, section 6)."""
    at = data.rfind(b"OggS")
    if at < 0 or at + 27 > len(data) or not data[at + 5] & 4:
        return False
    num_segments = data[at + 26]
    return at + 27 + num_segments + sum(data[at + 27 : at + 27 + num_segments]) <= len(data)

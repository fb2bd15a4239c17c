"""Counts what a container holds, packet by packet and without decoding: frames, samples, seconds.

Headers may be wrong (variable frame rates, WebM, MP3 of variable bit rate), so the counts come from the packets. A
declared number only serves for comparison: a file that has less than it declares is truncated. This module knows
nothing of models or limits.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.packet import Packet
from av.stream import Stream
from av.video.stream import VideoStream

from modalities.tolerance import AUDIO_S, FRAMES

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


def num_stored_packets(container: InputContainer, index: int) -> int:
    """Returns the number of packets of stream `index` in the rest of the file."""
    return sum(packet.size > 0 for packet in container.demux(container.streams[index]))


def is_shown(packet: Packet[Any]) -> bool:
    """Returns whether a decoder makes a frame from the packet, which must not be empty."""
    is_hidden = _HIDDEN.get(packet.stream.codec_context.name)
    return not (packet.is_discard or (is_hidden is not None and is_hidden(memoryview(packet))))


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
        return f"{num_found} of {counted.declared_packets} packets are there"
    if (name == "FLAC" or (name == "MP4" and is_pcm)) and counted.stream.time_base:
        lost_s = float((counted.declared_duration - counted.duration) * counted.stream.time_base)
        if lost_s > AUDIO_S:
            return f"{lost_s:.3f} s are missing"
    return ""


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

"""Implements the video modality: it parses `video_url` parts, reads headers, and decodes frames.

`VideoPlugin` reads the header. `decode_frames` runs in the encoders' decode processes and yields the frames that the
plan names. For a long video it first plans which groups of pictures hold a wanted frame, and decodes only those.
`settled_frames` finds the frames at which a video changes; this also decodes the video, so it runs only in the decode
processes.

This module knows nothing of models: `modalities.media.frame_sampling` chooses the frames, and the family chooses sizes
and patches. The sound track is described here and decoded in `modalities.media.audio`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from fabric.contracts import InvalidMedia
from modalities.family import AudioHeader, MediaHeader, MediaOptions, VideoHeader
from modalities.media.containers import (
    MAX_PIXELS,
    check_whole,
    format_name,
    irregular_times_s,
    is_shown,
    not_a_container,
    num_samples,
    open_container,
    picture_stream,
    seconds_shown,
    sniff,
    sound_stream,
    stream_packets,
    tally,
)
from modalities.media.first_bytes import declared_video
from modalities.media.frame_sampling import choose_keyframes, probed_frames
from modalities.media.plugin import (
    FRAMES,
    FirstVerdict,
    MediaLimits,
    declares_more,
    decode_data_url,
    decoding_piecewise,
    part_url,
)

Pixels = npt.NDArray[np.uint8]

_LONG = 100
"""From this number of frames on, it may pay to read the packets a second time, in order to skip groups of pictures that
hold no wanted frame."""
_DEFAULT_FPS = 25
"""This is the rate of a file that has no times; it is FFmpeg's own default."""
_MIN_SAVING = 0.5
"""Limits the plan to files where at least this share of the packets is left out; a smaller saving does not pay for the
second read of the file."""


_WITHOUT_PICTURES = ("WAV", "MP3", "FLAC", "AAC")
"""Lists the formats, as `sniff` names them, that have no pictures but those of their covers."""
_NO_PICTURES = "the file contains no video that can be decoded"


class VideoPlugin:
    """Parses and probes videos in `video_url` parts."""

    modality = "video"
    part_types = ("video_url",)
    needs_process = True

    def parse(self, part: Mapping[str, object], param: str, limits: MediaLimits) -> bytes:
        """Returns the bytes of the file in the part's data URL. Raises InvalidRequest if the part has another form, and
        InvalidMedia if the payload is broken or too large."""
        return decode_data_url(part_url(part, "video_url", param), param, limits.max_bytes_per_item)

    def max_file_bytes(self, limits: MediaLimits) -> int:
        return limits.max_bytes_per_item

    def judge(self, head: bytes, limits: MediaLimits) -> FirstVerdict:
        """Finds a flaw in what is no video, and in one that declares frames that are too large or to be too long."""
        found = sniff(head)
        if found is None:
            return FirstVerdict(not_a_container(head), True)
        if found.name in _WITHOUT_PICTURES:
            return FirstVerdict(_NO_PICTURES, True)
        width, height, seconds, is_final = declared_video(head)
        flaw = "" if width is None or height is None else _too_many_pixels(width, height, limits)
        if not flaw and declares_more(seconds, limits.max_video_seconds):
            flaw = _too_long(seconds or 0.0, limits)
        return FirstVerdict(flaw, is_final)

    def probe(self, data: bytes, param: str) -> VideoHeader:
        """Returns the header of the video. Reads the whole file packet by packet, and decodes its first frame because
        only this frame says how the video is rotated. Raises InvalidMedia if the file is broken or has no frames."""
        with open_container(data, param) as container:
            stream = _picture_stream(container, param)
            first = next(_frames(container, stream, MAX_PIXELS), None)
            if first is None:
                raise InvalidMedia(f"{param}: the video has no frames", param=param)
            width, height = _upright_size(first)
        with open_container(data, param) as container:
            return _count(data, container, width, height, param)

    def validate(self, header: MediaHeader, limits: MediaLimits, param: str) -> None:
        """Raises InvalidMedia if the frames' size, their number or the length exceeds the limits. The audio plugin
        checks the sound track's length."""
        assert isinstance(header, VideoHeader)
        if flaw := _too_many_pixels(header.width, header.height, limits):
            raise InvalidMedia(f"{param}: {flaw}", param=param)
        if header.seconds > limits.max_video_seconds:
            raise InvalidMedia(f"{param}: {_too_long(header.seconds, limits)}", param=param)
        if header.num_frames > limits.max_video_frames:
            raise InvalidMedia(
                f"{param}: the video has {header.num_frames} frames, which is more than the limit of "
                f"{limits.max_video_frames}",
                param=param,
            )


def _too_many_pixels(width: int, height: int, limits: MediaLimits) -> str:
    """Returns what is wrong with the size of frames, or an empty string."""
    if width * height <= limits.max_video_pixels:
        return ""
    most = limits.max_video_pixels
    return f"each frame has {width}x{height} pixels, which is more than the limit of {most} pixels"


def _too_long(seconds: float, limits: MediaLimits) -> str:
    return f"the video lasts {seconds:.1f} s, which is more than the limit of {limits.max_video_seconds:g} s"


def _count(data: bytes, container: InputContainer, width: int, height: int, param: str) -> VideoHeader:
    stream, sound = _picture_stream(container, param), sound_stream(container)
    tallies = tally(container, [stream] if sound is None else [stream, sound])
    name = format_name(container)
    for counted in tallies.values():
        check_whole(data, name, counted, param)
    seen = tallies[stream.index]
    if not seen.num_shown:
        raise InvalidMedia(f"{param}: the video has no frames", param=param)
    seconds = seconds_shown(seen, stream)
    heard = None
    if sound is not None and (found := num_samples(tallies[sound.index], sound)):
        heard = AudioHeader(name, sound.rate, sound.channels, found)
    times_s = irregular_times_s(seen, stream, seconds)
    return VideoHeader(
        name, width, height, seen.num_shown, seconds if seconds > 0 else seen.num_shown / _DEFAULT_FPS, heard, times_s
    )


# ------------------------------------------------------------ the frames


@decoding_piecewise
def decode_frames(data: bytes, indices: Sequence[int], header: VideoHeader, param: str) -> Iterator[Pixels]:
    """Yields the frames at `indices` (ascending, repeats allowed) one at a time, upright and of the header's size: RGB
    uint8 `(height, width, 3)`. The file is decoded forward and no further than needed, and no frames are kept.

    If up to `plugin.FRAMES` frames are missing at the end, the last frame replaces them. Raises InvalidMedia if the
    file is broken, if a frame is damaged or of another size, or if more frames are missing."""
    rest = list(indices)
    assert rest == sorted(rest)
    assert not rest or 0 <= rest[0] <= rest[-1] < header.num_frames
    rest.reverse()
    plan = _groups_to_decode(data, indices, header, param)
    if plan is not None:
        yield from _picked(data, rest, header, plan, param)
    if rest:
        yield from _picked(data, rest, header, None, param)


def _picked(data: bytes, rest: list[int], header: VideoHeader, plan: GroupPlan | None, param: str) -> Iterator[Pixels]:
    """Yields the frames of the indices at the end of `rest`, and removes these indices. With a plan it ends as soon as
    the decoder's frames are not those that the packets declare; without a plan, it yields them all or raises
    InvalidMedia."""
    last: VideoFrame | None = None
    num_decoded = 0
    with open_container(data, param) as container:
        stream = _picture_stream(container, param)
        # FFmpeg measures the frame with its padding. This limit alone stops a frame of 65535x65535 in a file of 16x16.
        most_pixels = 4 * (header.width + 128) * (header.height + 128)
        for frame in _frames(container, stream, most_pixels, plan):
            number = num_decoded if plan is None else plan.number_of(frame.pts)
            if number is None or number > rest[-1]:
                return
            _check(frame, number, header, param)
            pixels = _upright(frame) if number == rest[-1] else None
            while pixels is not None and rest and rest[-1] == number:
                rest.pop()
                yield pixels
            if not rest:
                return
            last = frame
            num_decoded += 1
        if plan is not None:
            return
        if last is None or num_decoded < header.num_frames - FRAMES:
            message = f"{param}: the video ends after {num_decoded} of {header.num_frames} frames"
            raise InvalidMedia(message, param=param)
        while rest:
            rest.pop()
            yield _upright(last)


def _check(frame: VideoFrame, number: int, header: VideoHeader, param: str) -> None:
    if _upright_size(frame) != (header.width, header.height):
        width, height = _upright_size(frame)
        raise InvalidMedia(
            f"{param}: frame {number} has {width}x{height} pixels, but the header says {header.width}x{header.height}",
            param=param,
        )
    if frame.is_corrupt:
        raise InvalidMedia(f"{param}: frame {number} is damaged", param=param)


def _picture_stream(container: InputContainer, param: str) -> VideoStream:
    stream = picture_stream(container)
    if stream is None:
        raise InvalidMedia(f"{param}: {_NO_PICTURES}", param=param)
    return stream


def _frames(
    container: InputContainer, stream: VideoStream, max_pixels: int, plan: GroupPlan | None = None
) -> Iterator[VideoFrame]:
    """Yields the frames in presentation order; with a plan, only those of the groups that are needed. Uses one thread,
    because the processes of a pool already share the cores."""
    context = stream.codec_context
    context.thread_count = 1
    context.options = {"max_pixels": str(max_pixels)}
    group = -1
    is_skipping = False
    for packet in stream_packets(container, stream):
        if packet.is_keyframe or group < 0:
            group += 1
            if plan is not None and not plan.is_needed[group] and not is_skipping:
                yield from context.decode(None)
                context.flush_buffers()
            is_skipping = plan is not None and not plan.is_needed[group]
        if not is_skipping:
            yield from packet.decode()
    if not is_skipping:
        yield from context.decode(None)


def _quarter_turns(frame: VideoFrame) -> int:
    """Returns how often the frame is to be rotated to the left by 90 degrees."""
    return round(frame.rotation / 90) % 4


def _upright_size(frame: VideoFrame) -> tuple[int, int]:
    """Returns the width and the height after rotation."""
    return (frame.height, frame.width) if _quarter_turns(frame) % 2 else (frame.width, frame.height)


def _upright(frame: VideoFrame) -> Pixels:
    pixels = frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False)
    return np.ascontiguousarray(np.rot90(pixels, _quarter_turns(frame)))


# ------------------------------------------------------------ groups of pictures


def _groups_to_decode(data: bytes, indices: Sequence[int], header: VideoHeader, param: str) -> GroupPlan | None:
    """Returns a plan of the groups to decode for a long video in a container that knows when each frame is shown.
    Returns None for other files, or if a plan would save little."""
    if header.num_frames < _LONG or header.format not in ("MP4", "MATROSKA"):
        return None
    with open_container(data, param) as container:
        stream = _picture_stream(container, param)
        return plan_groups(stream_packets(container, stream), indices, header.num_frames)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Says which groups of pictures of a video are decoded, and which frame is shown at which time.

    A group begins at a key frame and can be decoded by itself, except for the pictures that are shown before their key
    frame, which refer to the group before. The file is still read forward from its first packet."""

    is_needed: tuple[bool, ...]
    """Says for each group, in the order of the file, whether it is decoded."""
    times: npt.NDArray[np.int64]
    """Holds the times of all frames that are shown, in ascending order and in the stream's time base."""

    def number_of(self, time: int | None) -> int | None:
        """Returns the number of the frame that is shown at `time`, counted from the first; None if there is no such
        frame."""
        if time is None:
            return None
        at = int(np.searchsorted(self.times, time))
        return at if at < len(self.times) and self.times[at] == time else None


def plan_groups(packets: Iterable[Packet[Any]], indices: Sequence[int], num_frames: int) -> GroupPlan | None:
    """Returns which groups have to be decoded for the frames `indices`. `packets` are a stream's packets in the order
    of the file. Returns None if this saves little, or if the packets' times do not distinguish `num_frames` frames."""
    times: list[int] = []
    groups: list[int] = []
    key_times: list[int] = []
    sizes: list[int] = []
    for packet in packets:
        if packet.pts is None:
            return None
        if packet.is_keyframe or not key_times:
            key_times.append(packet.pts)
            sizes.append(0)
        sizes[-1] += 1
        if is_shown(packet):
            times.append(packet.pts)
            groups.append(len(key_times) - 1)
    order = np.argsort(np.array(times, np.int64), kind="stable")
    ascending = np.array(times, np.int64)[order]
    if len(times) != num_frames or not np.all(np.diff(ascending) > 0):
        return None
    needed = set()
    for index in set(indices):
        group = groups[order[index]]
        needed.add(group)
        if times[order[index]] < key_times[group]:
            needed.add(max(group - 1, 0))
    if sum(sizes[group] for group in needed) > (1 - _MIN_SAVING) * sum(sizes):
        return None
    return GroupPlan(tuple(group in needed for group in range(len(sizes))), ascending)


# ------------------------------------------------------------ key frames

_SIDE = 64


def settled_frames(
    data: bytes, header: VideoHeader, planned: Sequence[int], options: MediaOptions, param: str
) -> tuple[int, ...]:
    """Returns the planned frames, or for `keyframe` the same number of frames at which the video changes. Raises
    InvalidMedia if the file is broken.

    The rule is that of the article on multimodal routing in Dynamo (docs/references.md): about 200 frames, in grey at
    64x64, are each compared to the one before. The plan has already fixed the number of frames to choose."""
    if options.sampling != "keyframe":
        return tuple(planned)
    import cv2  # Only decode processes need it, and it takes 15 MiB in every process that imports it.

    probes = probed_frames(header)
    differences: list[float] = []
    before: np.ndarray | None = None
    for pixels in decode_frames(data, probes, header, param):
        small = cv2.resize(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY), (_SIDE, _SIDE)).astype(np.float64)
        differences.append(0.0 if before is None else float(np.mean(np.abs(small - before))))
        before = small
    return choose_keyframes(header, probes, differences, len(planned))

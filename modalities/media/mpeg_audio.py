"""Finds frames and tags in MPEG audio without a container (MP3 files), and what players skip between them. This module
is pure: it knows nothing of FFmpeg's objects and decodes nothing.

FFmpeg's demuxer takes a file from its first frame to its end. Two other kinds of files play everywhere too: those with
junk in front of the first frame, and those that are several files put together, with their own tags and headers in the
middle. This module converts them to the one form that FFmpeg takes. Data that are damaged in other ways stay as they
are, and the decoder refuses them.

A frame is four bytes of header and data, and its length follows from the header (ISO 11172-3, section 2.4.2.3; ISO
13818-3). The tags are ID3v2.4 (section 3.1), ID3v1 and APEv2.
"""

from __future__ import annotations

import re

MAX_JUNK_BYTES = 1 << 16
"""Limits the junk in front of the first frame; FFmpeg's own demuxer searches as far."""
_MAX_FRAME_BYTES = 2881
"""Limits the length of a frame that is cut off: the longest has Layer III at 320 kbit/s and 16 kHz, and a byte of
padding."""
_NUM_CHAINED = 4
"""Counts the frames that must follow one another where sound begins: one header is no proof, since it has only 11 fixed
bits and some forbidden values."""
_MARKS = (b"ID3", b"TAG", b"APETAGEX")
_ID3V1_BYTES = 128
_PADDING = re.compile(rb"\0*")
_SAMPLE_RATES = (44_100, 48_000, 32_000)
_V1_L1 = (0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448)
_V1_L2 = (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384)
_V1_L3 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_V2_L1 = (0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256)
_V2_L23 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_LAYER_TO_KBITS = {True: {1: _V1_L1, 2: _V1_L2, 3: _V1_L3}, False: {1: _V2_L1, 2: _V2_L23, 3: _V2_L23}}


def first_frame(data: bytes) -> int:
    """Returns the position where the first of several frames begins, behind tags and at most `MAX_JUNK_BYTES` of other
    data; -1 if there is none."""
    at = _behind_tags(data, 0)
    return _find_frames(data, at, at + MAX_JUNK_BYTES)


def one_stream(data: bytes) -> bytes:
    """Returns the file from its first frame on if junk is in front of it. If it is several files put together, returns
    the frames of all of them, without the frames that hold the frame counts of single files. Otherwise returns `data`
    itself."""
    begin = first_frame(data)
    if begin < 0:
        return data
    parts = [(begin, _end_of_frames(data, begin))]
    while (begin := _next_part(data, parts[-1][1])) >= 0:
        parts.append((begin, _end_of_frames(data, begin)))
    first, end = parts[0][0], parts[-1][1]
    if len(parts) == 1:
        return data if first == _tag_bytes(data, 0) else data[first:]
    return b"".join([data[_behind_counts(data, begin) : stop] for begin, stop in parts] + [data[end:]])


def _frame_bytes(data: bytes, at: int) -> int:
    """Returns the length of the frame whose header is at `at`; 0 if there is no frame, or one of a free bit rate."""
    if at + 4 > len(data) or data[at] != 0xFF or data[at + 1] & 0xE0 != 0xE0:
        return 0
    version, layer = data[at + 1] >> 3 & 3, 4 - (data[at + 1] >> 1 & 3)
    rate, sample_rate = data[at + 2] >> 4, data[at + 2] >> 2 & 3
    if version == 1 or layer == 4 or rate in (0, 15) or sample_rate == 3:
        return 0
    is_first = version == 3
    hertz = _SAMPLE_RATES[sample_rate] >> (0 if is_first else 1 if version == 2 else 2)
    bits, padding = 1000 * _LAYER_TO_KBITS[is_first][layer][rate], data[at + 2] >> 1 & 1
    if layer == 1:
        return (12 * bits // hertz + padding) * 4
    return (144 if is_first or layer == 2 else 72) * bits // hertz + padding


def _kind(data: bytes, at: int) -> tuple[int, int]:
    """Returns the bits of the version, the layer and the sample rate, which all frames of a stream have in common."""
    return data[at + 1] & 0xFE, data[at + 2] & 0x0C


def _end_of_frames(data: bytes, at: int) -> int:
    """Returns the position behind the last of the frames that follow one another from `at` on. A frame that the end of
    the file cuts off is included; a frame that a tag cuts off is not."""
    last = at
    while num_bytes := _frame_bytes(data, at):
        last, at = at, at + num_bytes
    if at < len(data) and not _tag_bytes(data, at) and any(data.find(mark, last, at) >= 0 for mark in _MARKS):
        return last
    return min(at, len(data))


def _find_frames(data: bytes, at: int, stop: int) -> int:
    """Returns the first position in `[at, stop)` where several frames begin, or -1."""
    while (at := data.find(b"\xff", at, stop)) >= 0:
        end = at
        for _ in range(_NUM_CHAINED):
            num_bytes = _frame_bytes(data, end)
            if not num_bytes or _kind(data, end) != _kind(data, at):
                break
            end += num_bytes
            if end >= len(data):
                return at if end - at > num_bytes else -1
        else:
            return at
        at += 1
    return -1


def _next_part(data: bytes, end: int) -> int:
    """Returns the position of the first frame of the next file, which is behind tags or has its own frame count; -1 if
    no file follows at `end`. The last frame before it may be cut off."""
    begin = _behind_tags(data, end)
    if begin == end:
        marks = [data.find(mark, end, end + _MAX_FRAME_BYTES) for mark in _MARKS]
        begin = min((mark for mark in marks if mark >= 0), default=end)
        begin = _behind_tags(data, begin)
    found = _find_frames(data, begin, begin + _MAX_FRAME_BYTES)
    return found if found >= 0 and (begin > end or _behind_counts(data, found) > found) else -1


def _behind_counts(data: bytes, at: int) -> int:
    """Returns the position behind the frame at `at` if it holds the number of frames (Xing, Info, VBRI) instead of
    sound, and `at` otherwise."""
    num_bytes = _frame_bytes(data, at)
    head = data[at : at + min(num_bytes, 64)]
    return at + num_bytes if any(mark in head for mark in (b"Xing", b"Info", b"VBRI")) else at


def _behind_tags(data: bytes, at: int) -> int:
    """Returns the position behind all tags at `at` and the zeros after them."""
    while num_bytes := _tag_bytes(data, at):
        padding = _PADDING.match(data, at + num_bytes)
        at = padding.end() if padding is not None else len(data)
    return min(at, len(data))


def _tag_bytes(data: bytes, at: int) -> int:
    """Returns the length of the tag at `at`, or 0 if there is none."""
    head = data[at : at + 32]
    if head[:3] == b"ID3" and len(head) >= 10:  # The size has 28 bits in four bytes; a footer is as long as the header.
        size = sum((byte & 0x7F) << shift for byte, shift in zip(head[6:10], (21, 14, 7, 0), strict=True))
        return 10 + size + (10 if head[5] & 0x10 else 0)
    if head[:3] == b"TAG":
        return _ID3V1_BYTES
    if head[:8] == b"APETAGEX" and len(head) == 32:  # The size covers all but a header, and this may be the header.
        is_header = head[23] & 0x20
        return int.from_bytes(head[12:16], "little") + 32 if is_header else 32
    return 0

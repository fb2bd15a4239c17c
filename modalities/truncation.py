"""Finds out whether a video or audio file ends before the end that its own container declares. It uses bytes alone;
this module is pure and knows nothing of decoders.

FFmpeg plays the rest of such a file and reports nothing. Streams that declare no length (MPEG-TS, ADTS, a recording
that was never closed) can't be distinguished from shorter ones and are accepted as such.
"""

from __future__ import annotations

import struct

_SLACK_BYTES = 1
"""Allows for a pad byte that writers forget."""
_SLACK_MP3_BYTES = 128
"""Allows for a tag at the end that was counted and removed later."""
_NO_SIZE = 0x7FFFFF00
"""A RIFF size of this or more means that the writer did not know the size (it wrote to a pipe)."""
_MOV_BOXES = (b"ftyp", b"moov", b"mdat", b"moof", b"free", b"skip", b"wide", b"styp", b"sidx", b"uuid")


def num_lost_bytes(name: str, data: bytes) -> int:
    """Returns the number of bytes that the container `name` (as in headers) declares beyond the end of the file; 0 if
    the file is whole or declares no length. An Ogg file without its last page counts as one byte short."""
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
    while at + 8 <= len(data) and data[at + 4 : at + 8] in _MOV_BOXES:
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

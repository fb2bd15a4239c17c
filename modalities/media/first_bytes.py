"""Reads what the first bytes of a file declare about its size and length, while the rest of the file is still on its
way.

A declaration can be wrong, so it only serves to refuse a file early: a file that declares more than is allowed is not
worth the rest of its download. A file that declares less is read in full later (`picture_header`, or the probers of the
plugins), and nothing here is believed then. Formats that declare nothing near their beginning give no answer.

The module is pure. Each function takes a bounded number of steps, whatever the bytes are. It knows no limits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

MAX_STEPS = 1000
"""Limits the boxes, chunks or segments of one file that are stepped over."""
ENOUGH_BYTES = 2**20
"""No file is looked at beyond these first bytes."""


class Declared(NamedTuple):
    """A `Declared` is what the first bytes of a file say; None stands for what they do not say."""

    width: int | None = None
    height: int | None = None
    seconds: float | None = None
    is_final: bool = False
    """Tells whether more bytes would say no more."""


FINAL = Declared(is_final=True)
UNKNOWN_YET = Declared()


class _Short(Exception):
    """A `_Short` error says that the bytes end before what they declare."""


def _unpack(form: str, head: bytes, at: int) -> tuple[int, ...]:
    if at < 0 or at + struct.calcsize(form) > len(head):
        raise _Short
    return struct.unpack_from(form, head, at)


# ------------------------------------------------------------ pictures

_TIFF_STARTS = (b"II*\0", b"MM\0*", b"II\0*", b"MM*\0", b"II+\0", b"MM\0+")
_AVIF_BRANDS = (b"avif", b"avis", b"mif1", b"msf1")
LEAST_BYTES = 16
"""A format of pictures is recognised by this many bytes."""


def is_picture(head: bytes) -> bool:
    """Returns whether a file may be a picture of a format that Pillow is asked to open. `head` has `LEAST_BYTES` bytes,
    or is the whole file."""
    return (
        head.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM", *_TIFF_STARTS))
        or (head.startswith(b"RIFF") and head[8:12] == b"WEBP")
        or (head[4:8] == b"ftyp" and head[8:12] in _AVIF_BRANDS)
    )


def declared_picture(head: bytes) -> Declared:
    """Returns the pixels that a picture declares, without its rotation."""
    try:
        if head.startswith(b"\x89PNG"):
            size = _unpack(">II", head, 16) if head[12:16] == b"IHDR" else None
        elif head.startswith(b"\xff\xd8\xff"):
            size = _jpeg_size(head)
        elif head.startswith(b"GIF8"):
            size = _unpack("<HH", head, 6)
        elif head.startswith(b"BM"):
            size = _unpack("<HH" if _unpack("<I", head, 14) == (12,) else "<ii", head, 18)
        elif head[8:12] == b"WEBP":
            size = _webp_size(head)
        else:
            size = None
    except _Short:
        return UNKNOWN_YET
    return FINAL if size is None else Declared(abs(size[0]), abs(size[1]), is_final=True)


def _jpeg_size(head: bytes) -> tuple[int, ...] | None:
    """Steps over the segments to the first frame (ITU-T T.81, annex B)."""
    at = 2
    for _ in range(MAX_STEPS):
        fill, marker = _unpack(">BB", head, at)
        if fill != 0xFF:
            return None
        if marker == 0xFF:  # Any number of fill bytes may stand before a marker.
            at += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = _unpack(">HH", head, at + 5)
            return width, height
        (length,) = _unpack(">H", head, at + 2)
        at += 2 + length
    return None


def _webp_size(head: bytes) -> tuple[int, ...] | None:
    """Reads the size of the canvas, or of the one frame (RFC 9649)."""
    if len(head) < 30:
        raise _Short
    name = head[12:16]
    if name == b"VP8X":
        return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
    if name == b"VP8 ":
        width, height = _unpack("<HH", head, 26)
        return width & 0x3FFF, height & 0x3FFF
    if name == b"VP8L":
        (bits,) = _unpack("<I", head, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return None


# ------------------------------------------------------------ sounds

_NO_RIFF_SIZE = 0x7FFFFF00
"""A chunk of this size or more means that the writer did not know the size."""
_AUDIO_BRANDS = (b"M4A ", b"M4B ")


def declared_sound(head: bytes) -> Declared:
    """Returns the length that a WAV, FLAC or M4A file declares. A video declares the length of its longest track, which
    need not be its sound."""
    try:
        if head.startswith(b"RIFF") and head[8:12] == b"WAVE":
            return _wav(head)
        if head.startswith(b"fLaC"):
            (packed,) = _unpack(">Q", head, 18)  # It packs 20 bits of rate, 8 bits of form and 36 bits of samples.
            rate, num_samples = packed >> 44, packed & (1 << 36) - 1
            return Declared(seconds=num_samples / rate, is_final=True) if rate and num_samples else FINAL
        if head[4:8] == b"ftyp" and head[8:12] in _AUDIO_BRANDS:
            return _mp4(head)
    except _Short:
        return UNKNOWN_YET
    return FINAL


def _wav(head: bytes) -> Declared:
    at, rate = 12, 0
    for _ in range(MAX_STEPS):
        name, (size,) = head[at : at + 4], _unpack("<I", head, at + 4)
        if name == b"fmt ":
            (rate,) = _unpack("<I", head, at + 16)
        elif name == b"data":
            is_known = rate > 0 and size < _NO_RIFF_SIZE
            return Declared(seconds=size / rate if is_known else None, is_final=True)
        at += 8 + size + size % 2
    return FINAL


# ------------------------------------------------------------ videos


def declared_video(head: bytes) -> Declared:
    """Returns the size of the pictures and the length that an MP4, Matroska, WebM or AVI file declares, if it does so
    before its packets."""
    try:
        if head.startswith(b"\x1a\x45\xdf\xa3"):
            return _matroska(head)
        if head.startswith(b"RIFF") and head[8:12] == b"AVI ":
            return _avi(head)
        if head[4:8] in (b"ftyp", b"moov", b"free", b"skip", b"wide"):
            return _mp4(head)
    except _Short:
        return UNKNOWN_YET
    return FINAL


def _avi(head: bytes) -> Declared:
    """Reads the main header, which is the first chunk of the first list."""
    if len(head) < 72:
        raise _Short
    if head[24:28] != b"avih":
        return FINAL
    period_us, *_, num_frames = _unpack("<IIIII", head, 32)
    width, height = _unpack("<II", head, 64)
    return Declared(width, height, period_us * num_frames / 1e6 or None, is_final=True)


class _Box(NamedTuple):
    name: bytes
    begin: int
    """This is the position of the box's content."""
    end: int
    """This is the position behind the box, which may be behind the bytes that are there."""


def _boxes(head: bytes, begin: int, end: int) -> Iterator[_Box]:
    """Yields the boxes between two positions (ISO 14496-12, section 4.2). Raises `_Short` if the bytes end first."""
    at = begin
    for _ in range(MAX_STEPS):
        if at >= end:
            return
        (size,) = _unpack(">I", head, at)
        name, header = head[at + 4 : at + 8], 8
        if size == 1:
            (size,) = _unpack(">Q", head, at + 8)
            header = 16
        if len(name) < 4:
            raise _Short
        if size < header:
            return
        yield _Box(name, at + header, min(end, at + size))
        at += size


def _inside(head: bytes, box: _Box, *path: bytes) -> _Box | None:
    """Returns the first box below `box` along a path of names."""
    for name in path:
        found = next((each for each in _boxes(head, box.begin, box.end) if each.name == name), None)
        if found is None:
            return None
        box = found
    return box


def _mp4(head: bytes) -> Declared:
    """Reads the box `moov`. A file may have it behind its packets, and then declares nothing here."""
    for box in _boxes(head, 0, 2**63):
        if box.name == b"moov":
            break
        if box.name == b"mdat":
            return FINAL
    else:
        return FINAL
    seconds: float | None = None
    try:
        for each in _boxes(head, box.begin, box.end):
            if each.name == b"mvhd":
                seconds = _box_seconds(head, each)
            elif each.name == b"trak" and (found := _pictures(head, each)) is not None:
                # The whole lasts as long as its longest track, and an edit list may cut away a part of a track.
                lasts = [known for known in (seconds, found.seconds) if known is not None]
                return found._replace(seconds=min(lasts, default=None))
    except _Short:
        return Declared(seconds=seconds)
    return Declared(seconds=seconds, is_final=True)


def _box_seconds(head: bytes, box: _Box) -> float | None:
    """Returns the length in a box `mvhd` or `mdhd`, whose beginnings are alike; None if it is unknown."""
    (version,) = _unpack(">B", head, box.begin)
    scale, ticks = _unpack(">IQ", head, box.begin + 20) if version == 1 else _unpack(">II", head, box.begin + 12)
    is_unknown = ticks in (2**32 - 1, 2**64 - 1)
    return ticks / scale if scale and ticks and not is_unknown else None


def _pictures(head: bytes, track: _Box) -> Declared | None:
    """Returns what a track of pictures declares, or None for a track of another kind."""
    media = _inside(head, track, b"mdia")
    handler = None if media is None else _inside(head, media, b"hdlr")
    if media is None or handler is None or head[handler.begin + 8 : handler.begin + 12] != b"vide":
        return None
    times, table = _inside(head, media, b"mdhd"), _inside(head, media, b"minf", b"stbl", b"stsd")
    if table is None:
        return None
    width, height = _unpack(">HH", head, table.begin + 40)
    return Declared(width, height, None if times is None else _box_seconds(head, times), is_final=True)


_SEGMENT, _INFO, _TRACKS, _TRACK, _VIDEO = 0x18538067, 0x1549A966, 0x1654AE6B, 0xAE, 0xE0
_SCALE, _DURATION, _WIDTH, _HEIGHT, _CLUSTER = 0x2AD7B1, 0x4489, 0xB0, 0xBA, 0x1F43B675
_PARENTS = (_SEGMENT, _INFO, _TRACKS, _TRACK, _VIDEO)


def _matroska(head: bytes) -> Declared:
    """Reads the elements before the first cluster (RFC 8794, RFC 9559). Parents are entered, so their elements follow
    each other in one loop."""
    found: dict[int, bytes] = {}
    at = 0
    try:
        for _ in range(MAX_STEPS):
            name, at = _number(head, at, keeps_marker=True)
            size, at = _number(head, at, keeps_marker=False)
            if name == _CLUSTER:
                return _matroska_declared(found, is_final=True)
            if name in _PARENTS:
                continue
            if name in (_SCALE, _DURATION, _WIDTH, _HEIGHT) and 1 <= size <= 8:
                if at + size > len(head):
                    raise _Short
                found.setdefault(name, head[at : at + size])
            at += size
    except _Short:
        return _matroska_declared(found, is_final=False)
    return _matroska_declared(found, is_final=True)


def _matroska_declared(found: dict[int, bytes], is_final: bool) -> Declared:
    scale = int.from_bytes(found.get(_SCALE, (10**6).to_bytes(4, "big")), "big")
    duration = found.get(_DURATION, b"")
    form = {4: ">f", 8: ">d"}.get(len(duration))
    seconds = struct.unpack(form, duration)[0] * scale / 1e9 if form is not None else None
    width, height = (int.from_bytes(found[name], "big") if name in found else None for name in (_WIDTH, _HEIGHT))
    return Declared(width, height, seconds, is_final)


def _number(head: bytes, at: int, keeps_marker: bool) -> tuple[int, int]:
    """Returns a number of variable length and the position behind it. Raises `_Short`."""
    if at >= len(head):
        raise _Short
    width = 9 - head[at].bit_length()
    if width > 8 or at + width > len(head):
        raise _Short
    value = int.from_bytes(head[at : at + width], "big")
    return (value if keeps_marker else value & (1 << 7 * width) - 1), at + width

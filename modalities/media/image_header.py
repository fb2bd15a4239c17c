"""Reads the size and the colour mode of a picture from its first bytes, in a bounded number of steps and without a
library's parser.

This module does not guess. A file is called plain if its first bytes leave no doubt; ordinary files of cameras,
browsers and screenshots are plain. For any other file `picture_header` returns None, and Pillow reads the file in a
helper process whose time and memory are limited. So an answer always equals Pillow's, for every file that Pillow opens.
This module is pure: it decodes nothing and its public function raises nothing. It knows nothing of models or limits of
a deployment.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from modalities.family import ImageHeader

MAX_STEPS = 4096
"""Limits the number of reads in one file. A PNG file of 32 MiB has this many chunks if each holds 8 KiB, the size that
libpng writes."""
MAX_READ_BYTES = 2**20
"""Limits the sum of the bytes of these reads; checksums and EXIF data need whole chunks."""
MAX_TAGS = 256
"""Limits the entries of an EXIF directory that are read; cameras write about a dozen."""

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_PLAIN_CHUNKS = {b"PLTE", b"tRNS", b"gAMA", b"cHRM", b"sRGB", b"pHYs", b"iCCP", b"bKGD", b"tIME", b"sBIT", b"cICP"}
_PNG_LEAST_BYTES = {b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"pHYs": 9}
_DEPTH_AND_COLOUR_TO_MODE = {
    (1, 0): "1",
    **{(depth, 0): "L" for depth in (2, 4, 8)},
    (16, 0): "I;16",
    (8, 2): "RGB",
    (16, 2): "RGB",
    **{(depth, 3): "P" for depth in (1, 2, 4, 8)},
    (8, 4): "LA",
    (16, 4): "RGBA",  # Pillow has no mode of two values of 16 bits.
    (8, 6): "RGBA",
    (16, 6): "RGBA",
}
_JPEG_FRAMES = (0xC0, 0xC1, 0xC2)
"""Lists the markers of baseline, extended and progressive frames; the other kinds are rare, and libjpeg decodes few of
them."""
_JPEG_TABLES = {0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE}
_LAYERS_TO_MODE = {1: "L", 3: "RGB", 4: "CMYK"}
_ORIENTATION_TAG = 0x0112
_TAG_TYPE_TO_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
"""Maps the types of TIFF 6.0, section 2, and those that were added later, to their bytes per value."""
_XMP_ORIENTATION = b"rientation"
"""Marks XMP data with an orientation. If EXIF data give no orientation, Pillow rotates a picture by its XMP data, so
such files are left to Pillow."""


class _Unplain(Exception):
    """An `_Unplain` error says that the file is not plain, so that Pillow reads or refuses it."""


class _Reader:
    """Gives out bytes of a file. Raises `_Unplain` if the file does not have them, and if the reads exceed `MAX_STEPS`
    or `MAX_READ_BYTES`. Every loop below reads, so these limits bound every loop."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._steps_left = MAX_STEPS
        self._bytes_left = MAX_READ_BYTES

    def take(self, at: int, count: int) -> bytes:
        self._steps_left -= 1
        self._bytes_left -= count
        if self._steps_left < 0 or self._bytes_left < 0 or at + count > len(self.data):
            raise _Unplain
        return self.data[at : at + count]


def picture_header(data: bytes) -> ImageHeader | None:
    """Returns the header of a picture, or None if the file is not plainly a PNG, JPEG, GIF, WebP or BMP."""
    reader = _Reader(data)
    try:
        if data.startswith(_PNG_SIGNATURE):
            return _png(reader)
        if data.startswith(b"\xff\xd8\xff"):
            return _jpeg(reader)
        if data.startswith((b"GIF87a", b"GIF89a")):
            return _gif(reader)
        if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
            return _webp(reader)
        if data.startswith(b"BM"):
            return _bmp(reader)
    except _Unplain:
        pass
    return None


def _header(name: str, width: int, height: int, mode: str, orientation: int = 1) -> ImageHeader:
    if width < 1 or height < 1:
        raise _Unplain
    if orientation >= 5:
        width, height = height, width
    return ImageHeader(name, width, height, mode)


# ------------------------------------------------ These functions read PNG (W3C PNG specification, section 5).


def _png(reader: _Reader) -> ImageHeader:
    length, name = struct.unpack(">I4s", reader.take(8, 8))
    head = _png_chunk(reader, 8, length)
    width, height, depth, colour, _, no_filter, _ = struct.unpack(">IIBBBBB", head[:13].ljust(13, b"\xff"))
    mode = _DEPTH_AND_COLOUR_TO_MODE.get((depth, colour))
    if name != b"IHDR" or length != 13 or mode is None or no_filter:
        raise _Unplain
    at, exif, has_pixels = 8 + 12 + length, b"", False
    while not has_pixels or at + 8 <= len(reader.data):  # If the end is missing, the decoder finds out.
        length, name = struct.unpack(">I4s", reader.take(at, 8))
        if name == b"IEND" and has_pixels:
            break
        if has_pixels:
            if name == b"eXIf":  # A decoder finds this chunk late, behind the pixels.
                raise _Unplain
        elif name == b"IDAT":
            has_pixels = True
        else:
            exif = _png_before_pixels(name, _png_chunk(reader, at, length), exif, mode)
        at += 12 + length
    return _header("PNG", width, height, mode, _orientation(exif))


def _png_before_pixels(name: bytes, body: bytes, exif: bytes, mode: str) -> bytes:
    """Returns the EXIF data found so far, for a chunk in front of the pixels. Raises `_Unplain` for chunks that may
    change what the picture is, and for those that Pillow refuses."""
    if name == b"eXIf" and not exif and body:
        return body
    if name in (b"tEXt", b"iTXt"):
        is_packed = name == b"iTXt" and body[body.find(b"\0") + 1 :][:1] != b"\0"
        if is_packed or body.startswith((b"exif\0", b"Raw profile")) or _XMP_ORIENTATION in body or b"\0" not in body:
            raise _Unplain
    elif name not in _PNG_PLAIN_CHUNKS or len(body) < _PNG_LEAST_BYTES.get(name, 0):
        raise _Unplain
    if name == b"tRNS" and len(body) < {"RGB": 6, "1": 2, "L": 2, "I;16": 2}.get(mode, 0):
        raise _Unplain
    if name == b"iCCP" and body[body.find(b"\0") + 1 :][:1] != b"\0":
        raise _Unplain
    return exif


def _png_chunk(reader: _Reader, at: int, length: int) -> bytes:
    """Returns the chunk's bytes. Raises `_Unplain` if they do not match the checksum."""
    body = reader.take(at + 4, 4 + length)
    (checksum,) = struct.unpack(">I", reader.take(at + 8 + length, 4))
    if zlib.crc32(body) != checksum:
        raise _Unplain
    return body[4:]


# ------------------------------------------------ These functions read JPEG (ITU-T T.81, annex B).


class _Frame(NamedTuple):
    width: int
    height: int
    mode: str


def _jpeg(reader: _Reader) -> ImageHeader:
    frame: _Frame | None = None
    exif, is_turned_by_xmp, at = b"", False, 2
    while True:
        fill, marker = reader.take(at, 2)
        if fill != 0xFF:
            raise _Unplain
        if marker == 0xDA and frame is not None:
            return _header("JPEG", *frame, _orientation(exif, is_turned_by_xmp))
        (length,) = struct.unpack(">H", reader.take(at + 2, 2))
        if length < 2 or at + 2 + length > len(reader.data):
            raise _Unplain
        if marker in _JPEG_FRAMES and frame is None:
            frame = _jpeg_frame(reader.take(at + 4, length - 2))
        elif marker == 0xE1:
            body = reader.take(at + 4, length - 2)
            if not body.startswith(b"Exif\0\0"):
                is_turned_by_xmp |= _XMP_ORIENTATION in body
            elif exif:
                raise _Unplain
            else:
                exif = body[6:] or b"\0"
        elif marker == 0xDB:
            _check_quantisation(reader.take(at + 4, length - 2))
        elif marker not in _JPEG_TABLES:
            raise _Unplain
        at += 2 + length


def _jpeg_frame(body: bytes) -> _Frame:
    if len(body) < 6:
        raise _Unplain
    depth, height, width, num_layers = struct.unpack(">BHHB", body[:6])
    mode = _LAYERS_TO_MODE.get(num_layers)
    if depth != 8 or mode is None or len(body) != 6 + 3 * num_layers:
        raise _Unplain
    return _Frame(width, height, mode)


def _check_quantisation(body: bytes) -> None:
    """Raises `_Unplain` if a table is not whole, because Pillow refuses such files."""
    at = 0
    while at < len(body):
        at += 1 + 64 * (1 if body[at] < 16 else 2)
    if at != len(body):
        raise _Unplain


# ------------------------------------------------ These functions read EXIF (TIFF 6.0, section 2).


def _orientation(exif: bytes, is_turned_by_xmp: bool = False) -> int:
    """Returns the orientation: 1 is upright, and 5 to 8 exchange width and height. Raises `_Unplain` if the orientation
    depends on XMP data."""
    told = _exif_orientation(exif) if exif else None
    if told is None and is_turned_by_xmp:
        raise _Unplain
    return told if told is not None and 1 <= told <= 8 else 1


def _exif_orientation(exif: bytes) -> int | None:
    """Returns the orientation in the EXIF data, or None if they have none. Raises `_Unplain` if the directory has a
    flaw, because readers interpret flaws differently."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None or len(exif) < 8:
        raise _Unplain
    (at,) = struct.unpack(order + "I", exif[4:8])
    if at < 8 or at + 2 > len(exif):
        raise _Unplain
    (num_tags,) = struct.unpack_from(order + "H", exif, at)
    if num_tags > MAX_TAGS or at + 2 + 12 * num_tags > len(exif):
        raise _Unplain
    found: list[int] = []
    for index in range(num_tags):
        entry = at + 2 + 12 * index
        tag, kind, count = struct.unpack_from(order + "HHI", exif, entry)
        num_bytes = _TAG_TYPE_TO_BYTES.get(kind, 2**32) * count
        if num_bytes > 4:
            (value_at,) = struct.unpack_from(order + "I", exif, entry + 8)
            if value_at + num_bytes > len(exif):
                raise _Unplain
        if tag == _ORIENTATION_TAG:
            if (kind, count) != (3, 1):
                raise _Unplain
            found += struct.unpack_from(order + "H", exif, entry + 8)
    if len(found) > 1:
        raise _Unplain
    return found[0] if found else None


# ------------------------------------------------ These functions read GIF (CompuServe GIF89a).


def _gif(reader: _Reader) -> ImageHeader:
    width, height, flags = struct.unpack("<HHB", reader.take(6, 5))
    at, has_colours = 13, False
    if flags & 0x80:
        has_colours = _is_coloured(reader.take(at, 3 << (flags & 7) + 1))
        at += 3 << (flags & 7) + 1
    while True:
        kind = reader.take(at, 1)
        if kind == b",":
            left, top, wide, high, flags = struct.unpack("<HHHHB", reader.take(at + 1, 9))
            if left + wide > width or top + high > height:  # Pillow then uses the larger size.
                raise _Unplain
            if flags & 0x80:
                has_colours = _is_coloured(reader.take(at + 10, 3 << (flags & 7) + 1))
                at += 3 << (flags & 7) + 1
            reader.take(at + 10, 1)
            return _header("GIF", width, height, "P" if has_colours else "L")
        if kind == b"!":
            at = _behind_gif_extension(reader, at + 1)
        else:
            raise _Unplain


def _behind_gif_extension(reader: _Reader, at: int) -> int:
    """Returns the position behind an extension whose label is at `at`. The extension is a graphic control extension, a
    comment, or an application's. Raises `_Unplain` for other extensions."""
    label = reader.take(at, 1)[0]
    size = reader.take(at + 1, 1)[0]
    if label not in (0xF9, 0xFE, 0xFF) or (label == 0xF9 and size != 4):
        raise _Unplain
    at += 1
    while size := reader.take(at, 1)[0]:
        at += 1 + size
    return at + 1


def _is_coloured(palette: bytes) -> bool:
    """Returns whether the palette differs from the ordered grey levels, for which Pillow keeps no palette."""
    return any(palette[at : at + 3] != bytes((at // 3,)) * 3 for at in range(0, len(palette), 3))


# ------------------------------------------------ These functions read WebP (RFC 9649) and BMP.


def _webp(reader: _Reader) -> ImageHeader:
    """Reads files of one frame without a `VP8X` chunk. Raises `_Unplain` for files with such a chunk, because they may
    be rotated or have another size."""
    num_bytes, _, name, length = struct.unpack("<I4s4sI", reader.take(4, 16))
    if num_bytes + 8 > len(reader.data) or length + 12 > num_bytes:
        raise _Unplain
    if name == b"VP8 ":
        tag, start, width, height = struct.unpack("<3s3sHH", reader.take(20, 10))
        if tag[0] & 1 or start != b"\x9d\x01\x2a":
            raise _Unplain
        return _header("WEBP", width & 0x3FFF, height & 0x3FFF, "RGB")
    if name == b"VP8L":
        start, bits = struct.unpack("<BI", reader.take(20, 5))
        if start != 0x2F or bits >> 29:
            raise _Unplain
        mode = "RGBA" if bits >> 28 & 1 else "RGB"
        return _header("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, mode)
    raise _Unplain


def _bmp(reader: _Reader) -> ImageHeader:
    """Reads files with 24 bits per pixel and the bottom row first, without compression and without a palette. Raises
    `_Unplain` for others."""
    size, width, height, planes, depth, packing = struct.unpack("<IiiHHI", reader.take(14, 20))
    (num_colours,) = struct.unpack("<I", reader.take(46, 4))
    if (size, planes, depth, packing, num_colours) != (40, 1, 24, 0, 0):
        raise _Unplain
    return _header("BMP", width, height, "RGB")

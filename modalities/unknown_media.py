"""Guesses for the error message what a refused file is: clients mix up fields, and forward error pages.

It uses the file's first bytes alone, and decides nothing. This module knows nothing of plugins.
"""

from __future__ import annotations

_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"GIF8", "a GIF image"),
    (8, b"WEBP", "a WEBP image"),
    (0, b"BM", "a BMP image"),
    (0, b"II*\x00", "a TIFF image"),
    (0, b"MM\x00*", "a TIFF image"),
    (4, b"ftypavif", "an AVIF image"),
    (4, b"ftypavis", "an AVIF image"),
    (4, b"ftypheic", "a HEIC image"),
    (4, b"ftypheix", "a HEIC image"),
    (4, b"ftypmif1", "a HEIF image"),
    (0, b"\x00\x00\x01\x00", "an icon"),
    (8, b"WAVE", "a WAV file"),
    (8, b"AVI ", "an AVI file"),
    (4, b"ftyp", "an MP4 file"),
    (0, b"\x1a\x45\xdf\xa3", "a Matroska or WebM file"),
    (0, b"OggS", "an Ogg file"),
    (0, b"fLaC", "a FLAC file"),
    (0, b"ID3", "an MP3 file"),
    (0, b"%PDF", "a PDF document"),
    (0, b"PK\x03\x04", "a ZIP archive, or a document that is one"),
    (0, b"\x1f\x8b", "a gzip archive"),
)
"""Lists tuples of an offset, the bytes at this offset, and a name, as the formats' specifications define them."""
_MARKUP = ((b"<svg", "an SVG drawing"), (b"<!doctype html", "an HTML page"), (b"<html", "an HTML page"))
_NUM_BYTES = 512


def seeming(data: bytes) -> str:
    """Returns text to append to a refusal, e.g. `; it seems to be a PNG image`. Returns an empty string if the file is
    unknown."""
    name = _name(data)
    return f"; it {name}" if name else ""


def _name(data: bytes) -> str:
    if not data:
        return "is empty"
    for offset, signature, name in _SIGNATURES:
        if data.startswith(signature, offset):
            return f"seems to be {name}"
    head = data[:_NUM_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for start, name in _MARKUP:
        if head.startswith(start) or (head.startswith(b"<?xml") and start in head):
            return f"seems to be {name}"
    is_text = not any(byte < 9 or 13 < byte < 32 for byte in data[:_NUM_BYTES]) and data[:_NUM_BYTES].isascii()
    return "seems to be text" if is_text else ""

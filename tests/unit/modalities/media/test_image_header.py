"""Tests the sizing of pictures by their first bytes: the answer equals Pillow's or there is none, and the work is
bounded."""

from __future__ import annotations

import io
import itertools
import struct
import warnings
import zlib

import numpy as np
import pytest
from modalities_files import encode, picture
from PIL import Image, PngImagePlugin

from fabric.contracts import InvalidMedia
from modalities.media import image_header as first_bytes
from modalities.media.image import open_image
from modalities.media.image_header import MAX_READ_BYTES, MAX_STEPS, picture_header

ORIENTATIONS = range(10)
"""Holds the orientations of EXIF and two values that are none."""


def exif(orientation: int, make: str = "") -> Image.Exif:
    made = Image.Exif()
    made[0x0112] = orientation
    if make:
        made[0x010F] = make
    return made


def xmp(orientation: int) -> bytes:
    return f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode()


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def with_chunk(png: bytes, name: bytes, body: bytes, is_late: bool = False) -> bytes:
    at = len(png) - 12 if is_late else 33
    return png[:at] + png_chunk(name, body) + png[at:]


PLAIN = {
    **{f"png-{mode}": encode(picture(9, 7, mode)) for mode in ("1", "L", "P", "RGB", "RGBA", "LA", "I;16")},
    "png-palette": encode(picture(31, 17, "P"), transparency=3),
    **{f"png-turned-{turn}": encode(picture(9, 7), exif=exif(turn, "made by")) for turn in ORIENTATIONS},
    "png-resolution": encode(picture(9, 7), dpi=(72, 72), icc_profile=b"profile" * 9),
    "png-text": with_chunk(encode(picture(9, 7)), b"tEXt", b"Software\0a program"),
    "png-large": encode(Image.fromarray(np.random.default_rng(1).integers(0, 256, (256, 512, 3), np.uint8))),
    **{f"jpeg-{mode}": encode(picture(33, 18, mode), "JPEG") for mode in ("L", "RGB", "CMYK")},
    "jpeg-progressive": encode(picture(33, 18), "JPEG", progressive=True),
    **{f"jpeg-turned-{turn}": encode(picture(33, 18), "JPEG", exif=exif(turn, "m")) for turn in ORIENTATIONS},
    "jpeg-told-twice": encode(picture(33, 18), "JPEG", exif=exif(3), xmp=xmp(6)),
    "jpeg-profile": encode(picture(33, 18), "JPEG", icc_profile=b"p" * 200_000, comment=b"hello", dpi=(300, 300)),
    "webp": encode(picture(33, 18), "WEBP"),
    "webp-lossless": encode(picture(33, 18), "WEBP", lossless=True),
    "webp-lossless-alpha": encode(picture(33, 18, "RGBA"), "WEBP", lossless=True),
    "gif": encode(picture(33, 18, "P"), "GIF"),
    "gif-grey": encode(picture(33, 18, "L"), "GIF"),
    "gif-comment": encode(picture(33, 18, "P"), "GIF", comment=b"c" * 999, transparency=1),
    "gif-moving": encode(picture(20, 10, "P"), "GIF", save_all=True, append_images=[picture(20, 10, "P")] * 2),
    "bmp": encode(picture(13, 8), "BMP"),
}
FOR_PILLOW = {
    "png-late-exif": with_chunk(encode(picture(9, 7)), b"eXIf", exif(6).tobytes()[6:], is_late=True),
    "png-xmp": with_chunk(encode(picture(9, 7)), b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(6)),
    "png-moving": encode(picture(9, 7), save_all=True, append_images=[picture(9, 7).rotate(90)]),
    "jpeg-turned-by-xmp": encode(picture(33, 18), "JPEG", xmp=xmp(6)),
    "webp-turned": encode(picture(33, 18), "WEBP", exif=exif(6)),
    "webp-alpha": encode(picture(33, 18, "RGBA"), "WEBP"),
    "bmp-palette": encode(picture(13, 8, "P"), "BMP"),
    "tiff": encode(picture(13, 8), "TIFF"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_files_are_sized_as_pillow_does(name: str) -> None:
    assert picture_header(PLAIN[name]) == open_image(PLAIN[name], "p").header


@pytest.mark.parametrize("name", FOR_PILLOW)
def test_what_is_not_plain_is_left_to_pillow(name: str) -> None:
    assert picture_header(FOR_PILLOW[name]) is None
    assert open_image(FOR_PILLOW[name], "p").header.width > 1


def test_no_spoiled_file_is_sized_otherwise_than_by_pillow() -> None:
    rng = np.random.default_rng(9)
    num_equal = num_refused = 0
    for _, data in itertools.product(range(60), [*PLAIN.values(), *FOR_PILLOW.values()]):
        spoiled = bytearray(data)
        for place in rng.integers(min(len(data), 300), size=int(rng.integers(1, 4))):
            spoiled[int(place)] = int(rng.integers(256)) if rng.random() < 0.5 else spoiled[int(place)] ^ 1
        del spoiled[int(rng.integers(len(data) // 2, 2 * len(data))) :]
        found = picture_header(bytes(spoiled))
        if found is None:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                header = open_image(bytes(spoiled), "p").header
        except InvalidMedia:
            num_refused += 1  # Decoding such a file is refused as well.
        else:
            assert found == header
            num_equal += 1
    assert num_equal > 500, "the test would show nothing"
    assert num_refused < num_equal / 20, "what is sized is nearly always a picture"


HOSTILE = {
    "jpeg-comments": b"\xff\xd8" + b"\xff\xfe\x00\x02" * 6_000_000,
    "jpeg-long-comments": b"\xff\xd8" + (b"\xff\xfe\xff\xff" + bytes(0xFFFD)) * 400,
    "jpeg-fill": b"\xff\xd8" + b"\xff" * 24_000_000,
    "png-texts": PLAIN["png-RGB"][:33] + png_chunk(b"tEXt", b"a\0b") * 1_500_000,
    "png-late": PLAIN["png-RGB"][:-12] + png_chunk(b"IDAT", b"") * 2_000_000,
    "png-one-chunk": PLAIN["png-RGB"][:33] + png_chunk(b"tEXt", b"a\0" + bytes(24_000_000)),
    "gif-comments": PLAIN["gif"][:61] + b"!\xfe\x00" * 8_000_000,
    "gif-blocks": PLAIN["gif"][:61] + b"!\xfe" + b"\x01a" * 12_000_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_cost_a_bounded_number_of_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_reads = num_bytes = 0
    take = first_bytes._Reader.take

    def counted(reader: first_bytes._Reader, at: int, count: int) -> bytes:
        nonlocal num_reads, num_bytes
        num_reads += 1
        found = take(reader, at, count)
        num_bytes += count
        return found

    monkeypatch.setattr(first_bytes._Reader, "take", counted)
    assert picture_header(HOSTILE[name]) is None
    assert num_reads <= MAX_STEPS + 1
    assert num_bytes <= MAX_READ_BYTES


def test_a_directory_of_many_tags_is_left_to_pillow() -> None:
    made = Image.Exif()
    for tag in range(0xC000, 0xC000 + first_bytes.MAX_TAGS + 1):
        made[tag] = 1
    assert picture_header(encode(picture(9, 7), "JPEG", exif=made)) is None


def test_a_phone_picture_with_a_second_one_behind_it_is_a_jpeg() -> None:
    buffer = io.BytesIO()
    picture(33, 18).save(buffer, "MPO", save_all=True, append_images=[picture(16, 9)])
    assert picture_header(buffer.getvalue()) == open_image(buffer.getvalue(), "p").header


def test_pngs_text_of_another_kind_does_not_turn_it() -> None:
    info = PngImagePlugin.PngInfo()
    info.add_itxt("Description", "a picture")
    data = encode(picture(9, 7), pnginfo=info)
    assert picture_header(data) == open_image(data, "p").header

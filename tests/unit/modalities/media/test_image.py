"""Tests the image plugin: parts, data: URLs, headers and limits."""

from __future__ import annotations

import base64
import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from modalities_files import data_url, encode, oriented, picture
from PIL import Image

from fabric.contracts import InvalidMedia, InvalidRequest
from modalities.media import ImagePlugin, MediaLimits, decode_image
from modalities.media.image import FORMATS

PLUGIN = ImagePlugin()
PARAM = "messages.0.content.1"
LIMITS = MediaLimits()


def part(url: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": url}


def png_header(width: int, height: int) -> bytes:
    """Returns the start of a PNG file: signature, IHDR and the beginning of its pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    ihdr = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", ihdr) + chunk(b"IDAT", zlib.compress(b"\0" * 10))


@pytest.mark.parametrize("is_object", [True, False])
def test_parse_takes_an_object_or_a_plain_url(is_object: bool) -> None:
    data = encode(picture(5, 4))
    url = data_url(data)
    assert PLUGIN.parse(part({"url": url, "detail": "high"} if is_object else url), PARAM, LIMITS) == data


@pytest.mark.parametrize("url", ["https://example.org/a.png", "http://10.0.0.1/", "file:///etc/passwd", "/etc/passwd"])
def test_only_data_urls_are_accepted(url: str) -> None:
    with pytest.raises(InvalidRequest, match="only data: URLs are accepted") as caught:
        PLUGIN.parse(part({"url": url}), PARAM, LIMITS)
    assert caught.value.param == PARAM


@pytest.mark.parametrize("value", [None, 7, "", {}, {"url": None}, {"url": ["data:"]}, []])
def test_parts_of_the_wrong_form_are_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="image_url") as caught:
        PLUGIN.parse(part(value), PARAM, LIMITS)
    assert caught.value.param == PARAM


@pytest.mark.parametrize("url", ["data:image/png,abc", "data:image/png;base64", "data:;base64=,AAAA"])
def test_data_urls_must_be_base64(url: str) -> None:
    with pytest.raises(InvalidRequest, match="base64"):
        PLUGIN.parse(part(url), PARAM, LIMITS)


@pytest.mark.parametrize("url", ["İ" * 2**20 + ":", "data:" + "İ" * 2**20, "data:" + "A" * 2**20 + ","])
def test_what_stands_in_front_of_a_payload_is_looked_at_but_for_a_few_characters(url: str) -> None:
    """The plugin makes no copy of the text ahead of a payload, because that text may be as long as a body, and changing
    its case takes time."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest):
            PLUGIN.parse(part(url), PARAM, LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 2**16
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("payload", ["AAA", "AA AA", "AAAA\n", "AA-_", "AA==AAAA", "AAAA====", "ÄÄÄÄ", "A"])
def test_base64_is_strict(payload: str) -> None:
    with pytest.raises(InvalidMedia, match="base64") as caught:
        PLUGIN.parse(part(f"data:image/png;base64,{payload}"), PARAM, LIMITS)
    assert caught.value.param == PARAM


@given(st.text(alphabet="AQg=/é ", max_size=24))
def test_base64_is_that_of_the_standard_library(payload: str) -> None:
    try:
        expected: bytes | None = base64.b64decode(payload, validate=True)
    except ValueError:
        expected = None
    try:
        data: bytes | None = PLUGIN.parse(part(f"data:image/png;base64,{payload}"), PARAM, LIMITS)
    except InvalidMedia:
        data = None
    assert data == (expected or None)


def test_an_empty_payload_is_refused() -> None:
    with pytest.raises(InvalidMedia, match="empty"):
        PLUGIN.parse(part("data:image/png;base64,"), PARAM, LIMITS)


@pytest.mark.parametrize("size", [9, 10, 11, 12])
def test_the_size_limit_is_exact(size: int) -> None:
    limits = MediaLimits(max_bytes_per_item=10)
    url = data_url(b"x" * size)
    if size <= 10:
        assert PLUGIN.parse(part(url), PARAM, limits) == b"x" * size
    else:
        with pytest.raises(InvalidMedia, match=f"{size} bytes, which is more than the limit of 10"):
            PLUGIN.parse(part(url), PARAM, limits)


def test_the_size_is_checked_before_decoding() -> None:
    # The error does not say "base64", because the plugin never reads the payload.
    with pytest.raises(InvalidMedia, match="limit"):
        PLUGIN.parse(part("data:image/png;base64," + "!" * 100), PARAM, MediaLimits(max_bytes_per_item=10))


@pytest.mark.parametrize("file_format", FORMATS)
def test_probe_of_every_format(file_format: str) -> None:
    header = PLUGIN.probe(encode(picture(31, 17), file_format), PARAM)
    assert (header.format, header.width, header.height) == (file_format, 31, 17)


def test_the_bytes_decide_not_the_declared_type() -> None:
    data = PLUGIN.parse(part(data_url(encode(picture(6, 3), "JPEG"), "text/plain")), PARAM, LIMITS)
    assert PLUGIN.probe(data, PARAM).format == "JPEG"


@pytest.mark.parametrize(
    "data",
    [b"hello, I am a text file called picture.png", b"", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"II*\0", b"BM" + b"\0" * 60],
)
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidMedia) as caught:
        PLUGIN.probe(data, PARAM)
    assert caught.value.param == PARAM
    assert caught.value.message.startswith(PARAM)


@pytest.mark.parametrize("file_format", ["PPM", "ICO", "TGA", "PDF", "EPS", "JPEG2000"])
def test_formats_that_are_not_on_the_list_are_refused(file_format: str) -> None:
    with pytest.raises(InvalidMedia, match="supported format"):
        PLUGIN.probe(encode(picture(16, 16), file_format), PARAM)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("file_format", "options"),
    [("JPEG", {}), ("PNG", {}), ("WEBP", {}), ("TIFF", {}), ("TIFF", {"compression": "tiff_deflate"})],
)
def test_width_and_height_are_those_after_rotation(orientation: int, file_format: str, options: dict[str, str]) -> None:
    data = oriented(picture(30, 20), orientation, file_format, **options)
    header = PLUGIN.probe(data, PARAM)
    assert (header.width, header.height) == ((20, 30) if orientation >= 5 else (30, 20))
    image, again = decode_image(data, PARAM)
    assert again == header
    assert image.size == (header.width, header.height)


def test_an_orientation_behind_the_pixels_of_a_png_is_found() -> None:
    data = oriented(picture(30, 20), 6, "PNG")
    at = data.index(b"eXIf") - 4
    (length,) = struct.unpack_from(">I", data, at)
    chunk = data[at : at + length + 12]
    end = data.index(b"IEND") - 4
    late = data[:at] + data[at + len(chunk) : end] + chunk + data[end:]
    header = PLUGIN.probe(late, PARAM)
    assert (header.width, header.height) == (20, 30)
    assert decode_image(late, PARAM)[0].size == (20, 30)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning")
def test_broken_exif_data_mean_upright() -> None:
    data = encode(picture(30, 20), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    header = PLUGIN.probe(data, PARAM)
    assert (header.width, header.height) == (30, 20)
    assert decode_image(data, PARAM)[0].size == (30, 20)


def test_a_bomb_is_measured_and_not_opened() -> None:
    """The file declares 60,000 x 60,000 pixels in 70 bytes: the plugin reads the header, the limit refuses it, and
    nothing is allocated."""
    header = PLUGIN.probe(png_header(60_000, 60_000), PARAM)
    with pytest.raises(InvalidMedia, match="60000x60000 pixels, which is more than the limit of 178956970") as caught:
        PLUGIN.validate(header, LIMITS, PARAM)
    assert caught.value.param == PARAM


def test_the_pixel_limit_is_exact() -> None:
    PLUGIN.validate(PLUGIN.probe(png_header(20, 5), PARAM), MediaLimits(max_image_pixels=100), PARAM)
    with pytest.raises(InvalidMedia, match="more than the limit of 100"):
        PLUGIN.validate(PLUGIN.probe(png_header(101, 1), PARAM), MediaLimits(max_image_pixels=100), PARAM)


def test_the_first_frame_counts() -> None:
    frames = [picture(12, 8, seed=seed) for seed in range(3)]
    for file_format in ("GIF", "TIFF", "WEBP"):
        data = encode(frames[0], file_format, save_all=True, append_images=frames[1:])
        image, header = decode_image(data, PARAM)
        assert (header.width, header.height) == image.size == (12, 8)


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_truncated_file_is_refused_when_it_is_decoded(file_format: str) -> None:
    data = encode(picture(64, 64), file_format)
    with pytest.raises(InvalidMedia) as caught:
        decode_image(data[: len(data) // 2], PARAM)
    assert caught.value.param == PARAM


ANIMATED = [name for name in ("GIF", "WEBP", "PNG", "TIFF", "AVIF") if name in FORMATS]


@pytest.mark.parametrize("file_format", ANIMATED)
def test_an_animation_is_its_first_frame(file_format: str) -> None:
    frames = [Image.new("RGB", (48, 32), colour) for colour in ((200, 40, 40), (40, 200, 40), (40, 40, 200))]
    data = encode(frames[0], file_format, save_all=True, append_images=frames[1:])
    with Image.open(io.BytesIO(data)) as opened:
        assert getattr(opened, "n_frames", 1) == 3
    image, header = decode_image(data, PARAM)
    assert (image.size, header.format) == ((48, 32), file_format)
    red, green, blue = image.convert("RGB").getpixel((24, 16))
    assert red > 150
    assert max(green, blue) < 90


@pytest.mark.skipif("AVIF" not in FORMATS, reason="Pillow was built without AVIF")
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_avif_picture_is_upright(orientation: int) -> None:
    """The picture is upright whether EXIF or the container's own boxes turn it; Pillow writes and reads these boxes as
    EXIF."""
    corner = Image.new("L", (40, 24), 250)
    corner.paste(20, (0, 0, 20, 12))
    (found, header), (expected, _) = (
        decode_image(oriented(corner.convert("RGB"), orientation, name, quality=95), PARAM) for name in ("AVIF", "PNG")
    )
    assert found.size == expected.size == (header.width, header.height)
    grey, wanted = (np.asarray(image.convert("L"), dtype=int) for image in (found, expected))
    assert np.abs(grey - wanted).max() < 30


def test_base64_text_of_any_padding_decodes() -> None:
    for size in range(1, 8):
        assert base64.b64decode(data_url(b"a" * size).split(",")[1]) == PLUGIN.parse(
            part(data_url(b"a" * size)), PARAM, LIMITS
        )

"""Tests what a refusal says about a file that is something else."""

import re

import pytest
from media_corpus import sound_file
from modalities_files import encode, picture

from fabric.contracts import InvalidMedia
from modalities.media.plugin import seeming
from modalities.registry import REGISTRY

PARAM = "messages.0.content.0"


def refusal(modality: str, data: bytes) -> str:
    with pytest.raises(InvalidMedia) as caught:
        REGISTRY.modality(modality).probe(data, PARAM)
    assert caught.value.message.startswith(PARAM)
    return caught.value.message


@pytest.mark.parametrize("modality", ["video", "audio"])
@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PDF"])
def test_a_picture_in_the_wrong_field_is_named(modality: str, file_format: str) -> None:
    message = refusal(modality, encode(picture(16, 16), file_format))
    assert file_format in message.rpartition("seems to be ")[2]


@pytest.mark.parametrize(("name", "expected"), [("wav-16", "a WAV file"), ("flac", "a FLAC file")])
def test_a_sound_in_place_of_a_picture_is_named(name: str, expected: str) -> None:
    assert refusal("image", sound_file(name)).endswith(f"; it seems to be {expected}")


@pytest.mark.parametrize("modality", ["image", "video", "audio"])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "is empty"),
        (b"\r\n<!DOCTYPE html><html><body>404</body></html>", "seems to be an HTML page"),
        (b'\xef\xbb\xbf<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "seems to be an SVG drawing"),
        (b'{"error": "not found"}', "seems to be text"),
    ],
)
def test_what_is_no_medium_at_all_is_named(modality: str, data: bytes, expected: str) -> None:
    assert refusal(modality, data).endswith(f"; it {expected}")


def test_of_what_is_not_known_nothing_is_said() -> None:
    assert seeming(bytes(range(256))) == ""
    assert seeming(b"\x00") == ""


@pytest.mark.parametrize("modality", ["image", "video", "audio"])
def test_a_refusal_shows_nothing_of_the_process(modality: str) -> None:
    """An error of Pillow shows the address of an object (`<_io.BytesIO object at 0x7f...>`), and one of FFmpeg the name
    of a file."""
    whole = encode(picture(64, 64)) if modality == "image" else sound_file("wav-16")
    for data in (b"", bytes(range(256)), whole[:24], whole[:24] + bytes(range(256)) * 8, b"#EXTM3U\n/etc/passwd\n"):
        message = refusal(modality, data)
        assert re.search(r"0x[0-9a-f]{4}|<[\w.]+ |/\w+/|\.py|Errno", message) is None, message

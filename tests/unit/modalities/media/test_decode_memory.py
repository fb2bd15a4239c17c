"""Tests the memory that decoding is predicted to take, from headers, against a table of values that were measured
once."""

from __future__ import annotations

import pytest

from modalities.family import AudioHeader, ImageHeader, VideoHeader
from modalities.media.plugin import BASE_BYTES, COST_BYTES, FILE_COPIES, decode_bytes

MIB = 2**20

MEASURED_BYTES_PER_PIXEL = {
    ("PNG", "RGB"): 4.1,
    ("PNG", "RGBA"): 8.4,
    ("PNG", "P"): 5.5,
    ("PNG", "L"): 5.0,
    ("PNG", "1"): 5.0,
    ("PNG", "I;16"): 6.1,
    ("JPEG", "RGB"): 10.1,  # This file is progressive, and its chroma is not subsampled.
    ("JPEG", "CMYK"): 8.2,
    ("WEBP", "RGB"): 16.4,
    ("WEBP", "RGBA"): 20.8,
    ("GIF", "P"): 5.6,
    ("BMP", "RGB"): 8.3,
    ("TIFF", "RGBA"): 8.9,
}
"""Holds the peak of decoding a picture of 9 Mpx and making it RGB, in bytes per pixel, without the memory in use
before."""


@pytest.mark.parametrize(("name", "mode"), MEASURED_BYTES_PER_PIXEL)
def test_pictures_take_no_more_than_is_said(name: str, mode: str) -> None:
    side = 3000
    per_pixel = (decode_bytes(ImageHeader(name, side, side, mode), 0, 0) - BASE_BYTES) / side**2
    # A scaled copy adds at most 4 bytes per pixel of the file.
    assert MEASURED_BYTES_PER_PIXEL[name, mode] + 4 <= per_pixel + 0.5
    assert per_pixel <= 3 * MEASURED_BYTES_PER_PIXEL[name, mode] + 4


@pytest.mark.parametrize(
    ("header", "num_file_bytes", "cost", "measured"),
    [
        (VideoHeader("MP4", 1920, 1080, 300, 10.0), 2 * MIB, 720, 48 * MIB),
        (VideoHeader("MP4", 3840, 2160, 120, 4.0), 4 * MIB, 288, 125 * MIB),
        (AudioHeader("WAV", 16000, 1, 4_800_000), 9 * MIB, 30_000, 154 * MIB),
        (AudioHeader("WAV", 48000, 2, 14_400_000), 55 * MIB, 30_000, 188 * MIB),
    ],
)
def test_videos_and_sounds_take_no_more_than_is_said(
    header: VideoHeader | AudioHeader, num_file_bytes: int, cost: int, measured: int
) -> None:
    assert decode_bytes(header, num_file_bytes, cost) >= 2 * measured


def test_the_file_and_the_patches_count() -> None:
    header = ImageHeader("PNG", 10, 10, "RGB")
    assert decode_bytes(header, 1000, 7) - decode_bytes(header, 0, 0) == 1000 * FILE_COPIES + 7 * COST_BYTES


def test_the_largest_picture_that_is_taken_fits_the_default_budget() -> None:
    side = 13_300
    assert decode_bytes(ImageHeader("PNG", side, side, "RGBA"), MIB, 16_384) < 3 * 2**30

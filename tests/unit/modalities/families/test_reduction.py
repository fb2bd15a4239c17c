"""Tests pictures shown at half their sides: each has a quarter of the patches that the model would otherwise see,
regardless of the file's size."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from modalities.families.internvl import GridOfTiles
from modalities.families.llava import CentreCrop
from modalities.families.llava_onevision import AnyResolution
from modalities.families.qwen_vl.patches import ImageOptions, image_grid
from modalities.family import ImageHeader, MediaOptions
from modalities.media import Normalisation
from modalities.pixel_options import PixelOptions

OPTIONS = ImageOptions(14, 2, 2, 56 * 56, 28 * 28 * 1280, 3, 1 / 255, None, None)
SMALLEST = 16
"""This is the number of patches of `min_pixels`."""


def patches(width: int, height: int, reduction: int, max_pixels: int = 0, min_pixels: int = 0) -> int:
    wishes = MediaOptions(reduction=reduction, max_pixels=max_pixels, min_pixels=min_pixels)
    _, rows, columns = image_grid(ImageHeader("PNG", width, height, "RGB"), OPTIONS, wishes)
    return rows * columns


@pytest.mark.parametrize(("width", "height"), [(448, 448), (900, 300), (8000, 6000), (20_000, 150)])
def test_a_quarter_of_the_patches_or_a_little_less(width: int, height: int) -> None:
    whole, half = patches(width, height, 0), patches(width, height, 1)
    assert 0.6 * whole / 4 < half <= whole / 4


@settings(deadline=None, max_examples=100)
@given(width=st.integers(1, 4000), height=st.integers(1, 4000), reduction=st.integers(0, 3))
def test_never_more_and_never_less_than_the_model_takes(width: int, height: int, reduction: int) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    whole, less = patches(width, height, 0), patches(width, height, reduction)
    assert less <= max(whole, SMALLEST)
    assert less >= min(whole, 4)


@settings(deadline=None, max_examples=100)
@given(width=st.integers(1, 4000), height=st.integers(1, 4000), max_pixels=st.integers(1, 10**6))
def test_a_picture_of_low_detail_has_no_more_pixels_than_asked_for(width: int, height: int, max_pixels: int) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    whole, low = patches(width, height, 0), patches(width, height, 0, max_pixels)
    longest = max(width, height) / min(width, height)
    most = max(max_pixels / 14**2, SMALLEST)
    assert low <= max(whole, SMALLEST)
    # A side is never below two patches, however flat the picture is; rounding up to the minimum gives a little more.
    assert low <= max(most, 4 * longest + 8, 2 * SMALLEST)
    assert patches(width, height, 0, 10**9) == whole
    assert patches(width, height, 1, max_pixels) <= max(low, SMALLEST)


@settings(deadline=None, max_examples=200)
@given(width=st.integers(1, 2000), height=st.integers(1, 2000), min_pixels=st.integers(1, 10**8))
@example(width=519, height=1841, min_pixels=992155)
def test_a_wish_for_pixels_enlarges_a_picture_to_what_the_model_takes_at_most(
    width: int, height: int, min_pixels: int
) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    found = patches(width, height, 0, min_pixels=min_pixels)
    most = OPTIONS.max_pixels // OPTIONS.patch_size**2
    assert 4 <= found <= most
    if min_pixels <= OPTIONS.max_pixels // 4 and max(width, height) <= 20 * min(width, height):
        assert found * OPTIONS.patch_size**2 >= min_pixels
    if min_pixels >= OPTIONS.min_pixels:
        assert found >= patches(width, height, 0)
    # A picture that could not be encoded at the size that was asked for is tried again at half of it.
    assert patches(width, height, 1, min_pixels=min_pixels) <= max(found, SMALLEST)


def test_a_wish_for_pixels_has_the_size_that_it_asks_for() -> None:
    assert patches(56, 56, 0) == SMALLEST
    assert patches(56, 56, 0, min_pixels=560 * 560) == 40 * 40
    assert patches(56, 56, 1, min_pixels=560 * 560) == 20 * 20
    assert patches(28, 28, 0, min_pixels=28 * 28) == 4  # This is less than the checkpoint's own least size.
    assert patches(560, 560, 0, max_pixels=28 * 28, min_pixels=28 * 28) == 4
    assert patches(560, 560, 0, min_pixels=28 * 28) == patches(560, 560, 0) == 40 * 40


def test_low_detail_of_a_large_picture() -> None:
    assert patches(1024, 1024, 0) == 70 * 70  # These are 1280 tokens and no more.
    assert patches(1024, 1024, 0, 512 * 512) == 36 * 36
    assert patches(448, 448, 0, 512 * 512) == patches(448, 448, 0)


def test_low_detail_in_tiles() -> None:
    pixels = PixelOptions(3, Normalisation(1 / 255, None, None))
    grid = GridOfTiles(pixels, 448, 256, 1, 12)
    assert grid.cut(1000, 1000).num_tiles == 10
    assert grid.limited(512 * 512).cut(1000, 1000).num_tiles == 1
    assert grid.limited(2 * 448 * 448).cut(2000, 1000).num_tiles == 3  # There are two tiles and the whole picture.
    assert grid.limited(10**9) == grid
    sizes = tuple((384 * rows, 384 * columns) for rows in (1, 2, 3) for columns in (1, 2, 3))
    any_size = AnyResolution(pixels, 384, 27, sizes, 9)
    assert any_size.cut(1152, 1152).num_tiles == 10
    assert any_size.limited(512 * 512).cut(1152, 1152).num_tiles == 2
    assert any_size.limited(1).cut(1152, 1152).num_tiles == 2  # There is the smallest canvas and the whole picture.
    one = CentreCrop(pixels, 336, 336, 576)
    assert one.limited(1) == one

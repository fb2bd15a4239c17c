"""A picture shown at half its sides: a quarter of what the model would have seen, however large the file is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modalities.family import ImageHeader
from modalities.qwen_vl.image_options import ImageOptions
from modalities.qwen_vl.preprocess import image_grid

OPTIONS = ImageOptions(14, 2, 2, 56 * 56, 28 * 28 * 1280, 3, 1 / 255, None, None)
SMALLEST = 16
"""Patches of `min_pixels`."""


def patches(width: int, height: int, reduction: int) -> int:
    _, rows, columns = image_grid(ImageHeader("PNG", width, height, "RGB"), OPTIONS, reduction)
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

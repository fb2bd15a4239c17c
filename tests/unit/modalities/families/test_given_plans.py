"""Tests the plans of pictures whose features clients send: their number of tokens is one that a picture has."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.contracts import InvalidMedia
from modalities.families.internvl import GridOfTiles
from modalities.families.llava import CentreCrop
from modalities.families.llava_onevision import AnyResolution
from modalities.families.qwen_vl.patches import ImageOptions, check_given_grid, image_grid
from modalities.families.tiled.tiled_family import TiledConfig, TiledFamily, Tiling
from modalities.family import FeaturesHeader, ImageHeader, ModelShape
from modalities.media import Normalisation
from modalities.pixel_options import PixelOptions

OPTIONS = ImageOptions(14, 2, 2, 56 * 56, 28 * 28 * 1280, 3, 1 / 255, None, None)
PIXELS = PixelOptions(3, Normalisation(None, None, None))
SHAPE = ModelShape(8, 1, 1, 1, 8, 100, 1000)
SIDE = 28
LLAVA = CentreCrop(PIXELS, SIDE, SIDE, 16)
INTERNVL = GridOfTiles(PIXELS, SIDE, 4, 1, 6)
ONEVISION = AnyResolution(PIXELS, SIDE, 4, ((SIDE, 2 * SIDE), (2 * SIDE, SIDE), (2 * SIDE, 2 * SIDE)), 9)


def family(tiling: Tiling) -> TiledFamily:
    def no_encoder(*arguments: object) -> None:
        raise AssertionError("no encoder is loaded")

    config = TiledConfig("m", SHAPE, 3, SIDE, 4)
    return TiledFamily("f", config, tiling, "<image>", no_encoder)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 3000), st.integers(1, 3000))
def test_the_grid_of_every_picture_is_taken(width: int, height: int) -> None:
    if max(width, height) > 100 * min(width, height):
        return
    grid = image_grid(ImageHeader("PNG", width, height, "RGB"), OPTIONS)
    header = FeaturesHeader(grid[1] * grid[2] // 4, grid)
    check_given_grid(header, OPTIONS)
    with pytest.raises(InvalidMedia, match="tokens, but the features have"):
        check_given_grid(dataclasses.replace(header, num_tokens=header.num_tokens + 1), OPTIONS)


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        (None, "needs the grid of the picture"),
        ((2, 4, 4), "must be 1 and two multiples of 2"),
        ((1, 3, 4), "must be 1 and two multiples of 2"),
        ((1, 4, 5), "must be 1 and two multiples of 2"),
        ((1, 1, 8), "must be 1 and two multiples of 2"),
        ((1, 2, 402), "neither of them more than 200 times the other"),
        ((1, 72, 72), "has 5184 patches, but the model takes at most 5120"),
        ((1, 2**31 - 2, 2**31 - 2), "but the model takes at most 5120"),
    ],
)
def test_a_grid_that_no_picture_has_is_refused(grid: tuple[int, int, int] | None, words: str) -> None:
    num_tokens = 4 if grid is None else max(1, grid[0] * grid[1] * grid[2] // 4)
    with pytest.raises(InvalidMedia, match=words):
        check_given_grid(FeaturesHeader(num_tokens, grid), OPTIONS)


@pytest.mark.parametrize("tiling", [LLAVA, INTERNVL, ONEVISION], ids=lambda tiling: type(tiling).__name__)
@settings(deadline=None, max_examples=50)
@given(width=st.integers(1, 300), height=st.integers(1, 300))
def test_the_tokens_of_every_picture_are_taken(tiling: Tiling, width: int, height: int) -> None:
    if max(width, height) > 100 * min(width, height):
        return
    model = family(tiling)
    pictured = model.plan(ImageHeader("PNG", width, height, "RGB"))
    given_plan = model.plan_features(FeaturesHeader(*pictured.unit_tokens, size=(width, height)))
    assert (given_plan.unit_tokens, given_plan.grid, given_plan.cost) == (pictured.unit_tokens, pictured.grid, 1)
    for wrong in (pictured.unit_tokens[0] + 1, pictured.unit_tokens[0] - 1):
        with pytest.raises(InvalidMedia, match="tokens"):
            model.plan_features(FeaturesHeader(wrong, size=(width, height)))
    least = model.least_features()
    assert model.plan_features(least).unit_tokens == (least.num_tokens,)


def test_more_tiles_than_a_picture_has_are_refused() -> None:
    model = family(INTERNVL)
    for num_tiles in (1, 3, 4, 5, 6, 7):
        assert model.plan_features(FeaturesHeader(4 * num_tiles)).grid[0] == num_tiles
    for num_tiles in (2, 8, 100):  # Of two tiles, the whole picture would be the third.
        with pytest.raises(InvalidMedia, match="4 tokens for each of 1 to 6 tiles"):
            model.plan_features(FeaturesHeader(4 * num_tiles))


def test_a_family_that_cuts_by_size_needs_the_size() -> None:
    with pytest.raises(InvalidMedia, match="needs the size of the picture"):
        family(ONEVISION).plan_features(FeaturesHeader(40))


def test_the_grid_is_a_part_of_what_features_are() -> None:
    model = family(ONEVISION)
    tokens = model.plan(ImageHeader("PNG", 28, 56, "RGB")).unit_tokens[0]
    plans = [model.plan_features(FeaturesHeader(tokens, size=size)) for size in ((28, 56), (29, 58))]
    assert plans[0].geometry != plans[1].geometry

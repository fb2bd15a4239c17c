"""Compares preprocessing with transformers' own PIL image processor: every bit is equal, for every size and mode."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from modalities_files import PREPROCESSOR, encode, oriented, picture, thinker_config, write_config
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from modalities.families.qwen3_omni import Qwen3OmniFamily
from modalities.family import MediaOptions
from modalities.media import plan_media
from modalities.registry import REGISTRY

pytestmark = pytest.mark.torch

MODES = {
    "RGB": ("PNG", "JPEG", "WEBP", "BMP", "TIFF"),
    "L": ("PNG", "JPEG", "GIF", "BMP", "TIFF"),
    "1": ("PNG", "BMP", "TIFF"),
    "P": ("PNG", "GIF", "BMP", "TIFF"),
    "LA": ("PNG", "TIFF"),
    "RGBA": ("PNG", "WEBP", "TIFF"),
    "CMYK": ("JPEG", "TIFF"),
    "I;16": ("PNG", "TIFF"),
}
CASES = [(mode, file_format) for mode, formats in MODES.items() for file_format in formats]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("thinker"), thinker_config())


def check(model_dir: Path, data: bytes, **sizes: int) -> None:
    """Checks that the family's plan and patches equal the reference's, which is given the same `sizes`."""
    family = Qwen3OmniFamily(model_dir)
    plugin = REGISTRY.modality("image")
    item = plan_media(family, data, plugin.probe(data, "p"), 0, "p", options=MediaOptions(**sizes)).item
    (unit,) = family.preprocess(data, item)
    reference = Qwen2VLImageProcessorPil.from_pretrained(model_dir, **sizes)
    want = reference(ImageOps.exif_transpose(Image.open(io.BytesIO(data))), return_tensors="np")
    assert unit.grid == item.grid == tuple(want["image_grid_thw"][0].tolist())
    assert item.num_tokens * 4 == len(want["pixel_values"])
    assert unit.pixels.dtype == np.float32
    np.testing.assert_array_equal(unit.pixels, want["pixel_values"])


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(CASES), st.integers(1, 400), st.integers(1, 400), st.integers(0, 9))
def test_patches_equal_the_reference(
    model_dir: Path, case: tuple[str, str], width: int, height: int, seed: int
) -> None:
    if max(width, height) > 200 * min(width, height):
        width = height
    check(model_dir, encode(picture(width, height, case[0], seed), case[1]))


@pytest.mark.parametrize(("mode", "file_format"), CASES)
def test_every_mode_in_every_format(model_dir: Path, mode: str, file_format: str) -> None:
    check(model_dir, encode(picture(70, 45, mode), file_format))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "TIFF"])
def test_turned_pictures(model_dir: Path, orientation: int, file_format: str) -> None:
    check(model_dir, oriented(picture(90, 50), orientation, file_format))


@pytest.mark.parametrize(
    "change",
    [
        {"min_pixels": 32 * 32, "max_pixels": 64 * 64},
        {"do_rescale": False},
        {"do_normalize": False},
        {"do_rescale": False, "do_normalize": False},
        {"resample": 2, "rescale_factor": 1 / 127.5},
        {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]},
    ],
)
def test_options_of_the_checkpoint(tmp_path: Path, change: dict[str, Any]) -> None:
    check(write_config(tmp_path, thinker_config(), PREPROCESSOR | change), encode(picture(150, 99)))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 40_000), st.integers(0, 25_000))
def test_sizes_of_a_request_are_those_of_the_reference(
    model_dir: Path, width: int, height: int, min_pixels: int, more: int
) -> None:
    """The reference takes `min_pixels` and `max_pixels` too. A range within the checkpoint's own largest size (65,536
    pixels) has the same effect there and here, as long as rounding up does not lead out of it."""
    if max(width, height) > 4 * min(width, height):
        width = height
    check(model_dir, encode(picture(width, height)), min_pixels=min_pixels, max_pixels=min_pixels + more)


def test_defaults_are_the_references(tmp_path: Path) -> None:
    options = {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 65536}, "feature_size": 16}
    check(write_config(tmp_path, thinker_config(), options), encode(picture(99, 150)))

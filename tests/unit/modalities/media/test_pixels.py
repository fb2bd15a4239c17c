"""Tests the colours of pictures: strips give the same result as the whole picture, and take little memory."""

from __future__ import annotations

import io

import numpy as np
import pytest
from modalities_files import encode, picture
from PIL import Image

from modalities.media import image as pixels
from modalities.media import to_rgb

WHITE = (255, 255, 255, 255)


def reference(image: Image.Image) -> Image.Image:
    """Applies transformers' rule to the whole picture at once."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image)
    return image.convert("RGB")


def reopened(image: Image.Image, file_format: str = "PNG", **options: object) -> Image.Image:
    return Image.open(io.BytesIO(encode(image, file_format, **options)))


PICTURES = {
    **{mode: picture(31, 17, mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16")},
    "palette": reopened(picture(31, 17, "P"), transparency=3),
    "palette of alphas": reopened(picture(31, 17, "P"), transparency=bytes(range(0, 256, 16))),
    "grey colour left out": reopened(picture(31, 17, "L"), transparency=7),
    "colour left out": reopened(picture(31, 17), transparency=(1, 2, 3)),
    "gif": reopened(picture(31, 17, "P"), "GIF", transparency=2),
    "webp": reopened(picture(31, 17, "RGBA"), "WEBP", lossless=True),
}


@pytest.mark.parametrize("num_pixels", [1, 70, 2**18])
@pytest.mark.parametrize("name", PICTURES)
def test_strips_give_what_the_whole_does(name: str, num_pixels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "_STRIP_PIXELS", num_pixels)
    found, expected = to_rgb(PICTURES[name]), reference(PICTURES[name])
    assert (found.mode, found.size) == ("RGB", expected.size)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_what_is_rgb_already_is_not_copied() -> None:
    image = picture(5, 4)
    assert to_rgb(image) is image

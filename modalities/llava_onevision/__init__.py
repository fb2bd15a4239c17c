"""LLaVA-OneVision: text, images and videos in, text out; a picture becomes the tiles of the resolution that suits it
best, with its padding taken out again and a newline behind each row of features. Of a video each frame is a tile, its
features scaled down to half.

Every picture of a prompt is cut alike, which is how transformers' processor treats a flat list of images.
Pure: `family`; numpy and Pillow: `tiling`; torch: `encoder`.
"""

from __future__ import annotations

from pathlib import Path

from modalities.family import Family

ARCHITECTURES = ("LlavaOnevisionForConditionalGeneration",)


def load(model_dir: Path) -> Family:
    """Raises ConfigError."""
    from modalities.llava_onevision.family import load_family

    return load_family(model_dir)

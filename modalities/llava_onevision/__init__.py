"""Implements LLaVA-OneVision: it takes text, images and videos and returns text.

A picture becomes the tiles of the resolution that suits it best. The features of padding are removed, and a newline
follows each row of features. Each frame of a video is one tile, whose features are scaled down to half. Every picture
of a prompt is cut in the same way, as transformers' processor does for a flat list of images.
`family` is pure, `tiling` needs numpy and Pillow, and `encoder` needs torch.
"""

from __future__ import annotations

from pathlib import Path

from modalities.family import Family

ARCHITECTURES = ("LlavaOnevisionForConditionalGeneration",)


def load(model_dir: Path) -> Family:
    """Returns the family of the checkpoint in `model_dir`. Raises ConfigError if Weft can't use its config files."""
    from modalities.llava_onevision.family import load_family

    return load_family(model_dir)

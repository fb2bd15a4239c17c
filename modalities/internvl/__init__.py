"""Implements InternVL (transformers' own form of the checkpoints): it takes text, images and videos and returns text.

A picture becomes a grid of tiles of nearly its aspect ratio, and one more tile with the whole picture scaled down. Each
frame of a video is one tile, and the prompt has the frame's number before it. `family` is pure, `tiling` needs numpy
and Pillow, and `encoder` needs torch.
"""

from __future__ import annotations

from pathlib import Path

from modalities.family import Family

ARCHITECTURES = ("InternVLForConditionalGeneration",)


def load(model_dir: Path) -> Family:
    """Returns the family of the checkpoint in `model_dir`. Raises ConfigError if Weft can't use its config files."""
    from modalities.internvl.family import load_family

    return load_family(model_dir)

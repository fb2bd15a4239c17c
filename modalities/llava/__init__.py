"""Implements LLaVA-1.5: it takes text and images and returns text. A picture is one tile, cut from its centre.

`family` is pure, `tiling` needs numpy and Pillow, and `encoder` needs torch.
"""

from __future__ import annotations

from pathlib import Path

from modalities.family import Family

ARCHITECTURES = ("LlavaForConditionalGeneration",)


def load(model_dir: Path) -> Family:
    """Returns the family of the checkpoint in `model_dir`. Raises ConfigError if Weft can't use its config files."""
    from modalities.llava.family import load_family

    return load_family(model_dir)

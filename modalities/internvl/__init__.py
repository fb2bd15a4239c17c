"""InternVL (transformers' own form of the checkpoints): text, images and videos in, text out; a picture becomes a grid
of tiles of nearly its aspect ratio, and the whole of it small. Of a video each frame is a tile, its number in front.

Pure: `family`; numpy and Pillow: `tiling`; torch: `encoder`.
"""

from __future__ import annotations

from pathlib import Path

from modalities.family import Family

ARCHITECTURES = ("InternVLForConditionalGeneration",)


def load(model_dir: Path) -> Family:
    """Raises ConfigError."""
    from modalities.internvl.family import load_family

    return load_family(model_dir)

"""LLaVA-1.5: text and images in, text out; a picture is one tile, cut from its middle.

Pure: `family`; numpy and Pillow: `tiling`; torch: `encoder`.
"""

from __future__ import annotations

from pathlib import Path

from modalities.family import Family

ARCHITECTURES = ("LlavaForConditionalGeneration",)


def load(model_dir: Path) -> Family:
    """Raises ConfigError."""
    from modalities.llava.family import load_family

    return load_family(model_dir)

"""Qwen2-Audio: text and sounds in, text out; a sound is heard in windows of 30 s.

Pure: `family`; its encoder stands with the other audio towers.
"""

from __future__ import annotations

from pathlib import Path

from modalities.family import Family

ARCHITECTURES = ("Qwen2AudioForConditionalGeneration",)


def load(model_dir: Path) -> Family:
    """Raises ConfigError."""
    from modalities.qwen2_audio.family import Qwen2AudioFamily

    return Qwen2AudioFamily(model_dir)

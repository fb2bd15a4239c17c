"""Qwen3-Omni (thinker): text, images, videos and sounds in, text out. Speech is not declared yet.

Pure: `config`, `family`; torch: `checkpoint`. What its siblings share stands in `modalities.qwen_vl`.
"""

from __future__ import annotations

from pathlib import Path

from modalities.family import Family

ARCHITECTURES = ("Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration")


def load(model_dir: Path) -> Family:
    """Raises ConfigError."""
    from modalities.qwen3_omni.family import Qwen3OmniFamily

    return Qwen3OmniFamily(model_dir)

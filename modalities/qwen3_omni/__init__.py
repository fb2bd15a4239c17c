"""Implements Qwen3-Omni's thinker: it takes text, images, videos and sounds and returns text.

Speech is not supported yet. `config` and `family` are pure, and `checkpoint` needs torch. `modalities.qwen_vl` holds
what the related families share.
"""

from __future__ import annotations

from pathlib import Path

from modalities.family import Family

ARCHITECTURES = ("Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration")


def load(model_dir: Path) -> Family:
    """Returns the family of the checkpoint in `model_dir`. Raises ConfigError if Weft can't use its config files."""
    from modalities.qwen3_omni.family import Qwen3OmniFamily

    return Qwen3OmniFamily(model_dir)

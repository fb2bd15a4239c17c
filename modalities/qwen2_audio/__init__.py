"""Implements Qwen2-Audio: it takes text and sounds and returns text. A sound is encoded in windows of 30 s.

`family` is pure. The encoder is in `modalities.audio_towers`, with the other audio towers.
"""

from __future__ import annotations

from pathlib import Path

from modalities.family import Family

ARCHITECTURES = ("Qwen2AudioForConditionalGeneration",)


def load(model_dir: Path) -> Family:
    """Returns the family of the checkpoint in `model_dir`. Raises ConfigError if Weft can't use its config files."""
    from modalities.qwen2_audio.family import Qwen2AudioFamily

    return Qwen2AudioFamily(model_dir)

"""Implements plain causal language models of transformers on Weft's attention: Llama, Qwen2 and Qwen3, alone or as the
text half of a model with media.

`config`, `positions` and `family` are pure; `checkpoint` and `language_model` import torch. The package knows nothing
of media.
"""

from __future__ import annotations

from pathlib import Path

from modalities.family import Family

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def load(model_dir: Path) -> Family:
    """Returns a family that takes text alone. Raises ConfigError."""
    from modalities.families.causal_lm.text_family import TextFamily

    return TextFamily(model_dir)

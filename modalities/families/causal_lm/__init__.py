"""Implements plain causal language models of transformers on Weft's attention: Llama, Qwen2 and Qwen3, alone or as the
text half of a model with media.

`text_family` is the family without media, and reads the config of a text model for other families too. `language_model`
loads and runs the text half; it also loads other parts of a checkpoint, such as encoders. `fused_layers` rebuilds
transformers' decoder layers with fewer operations, and `projection` computes their matrix products. Two C sources stand
next to the modules that compile them: `native_product.c` (`projection`) and `row_operations.c` with its float32 form
(`fused_layers`).

Other families take their text half from here, and the vision towers take norms, rotation and products. `text_family` is
pure, and the other modules import torch. The package knows nothing of media and requests.
"""

from __future__ import annotations

from pathlib import Path

from modalities.family import Family

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def load(model_dir: Path) -> Family:
    """Returns a family that takes text alone. Raises ConfigError."""
    from modalities.families.causal_lm.text_family import TextFamily

    return TextFamily(model_dir)

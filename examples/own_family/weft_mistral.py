"""Adds a model family to Weft from outside: Mistral, whose layers are those of Llama.

A family says what a checkpoint takes and how its parts are loaded (`modalities/family.py`). This one takes text alone,
so `modalities/families/causal_lm/` does most of the work; two things are left. `MistralFamily` reads the model's sizes
from config.json and refuses what Weft would compute wrongly, and `load_language_model` loads the weights as
transformers' own class, whose attention Weft replaces by its own. The family in `examples/own_modality/` has an encoder
too.

Install the package where the cluster runs, write a tiny random checkpoint, and start a cluster on it:

    .venv/bin/python -m pip install ./examples/own_family
    .venv/bin/python examples/own_family/write_model.py /tmp/tiny-mistral
    .venv/bin/weft serve --config examples/own_family/cluster.yaml --model /tmp/tiny-mistral
    .venv/bin/python examples/own_family/ask.py /tmp/tiny-mistral          # in another terminal

Every process of the cluster imports this module, and most of them have no torch, so only `load_language_model` may
import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from modalities.checkpoint_files import model_id, read_json
from modalities.families.causal_lm.text_family import TextFamily, refuse_unsupported, shape_of
from modalities.family import LanguageModel
from modalities.registry import Registry

ARCHITECTURE = "MistralForCausalLM"
# transformers gives a missing key these values. A sliding window is refused, so a checkpoint must say that it has none.
DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


class MistralFamily(TextFamily):
    """Represents one checkpoint directory. It is immutable and thread-safe."""

    def __init__(self, model_dir: Path) -> None:
        """Reads config.json only. Raises ConfigError for a model that Weft can't run."""
        raw, config = read_json(model_dir / "config.json")
        text = DEFAULTS | config
        refuse_unsupported(text)
        self.shape = shape_of(text, num_levels=1)
        self.name = "mistral"
        self.model_id = model_id(model_dir, raw)
        self.max_items: Mapping[str, int] = {}

    def load_language_model(self, model_dir: Path, device: str, dtype: str, attention_name: str) -> LanguageModel:
        """Loads the weights. Raises ConfigError if one is missing or left over."""
        from transformers import MistralForCausalLM

        from modalities.families.causal_lm.language_model import PartNames, TextModel, load_part, read_pretrained_config

        config = read_pretrained_config(model_dir)
        # The checkpoint's names are those of the class, and the checkpoint has no other part.
        names = PartNames(own={}, others=())
        return TextModel(load_part(MistralForCausalLM, model_dir, config, names, (device, dtype), attention_name))


def register(registry: Registry) -> None:
    """Hands Weft the family. pyproject.toml names this function as an entry point."""
    registry.register_family((ARCHITECTURE,), MistralFamily)

"""Parts of a checkpoint as transformers modules: a causal language model, or whatever else stands beside one.

A part is loaded with a mapping from the checkpoint's names to its own; without one transformers would leave the
weights random and say so in a log line only. So whatever is missing refuses the start, and so does whatever is left
over: a weight that nothing uses means that the model is not what it was taken for. A family names the weights of its
other parts; nothing else may stay unused but buffers that old checkpoints hold.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from fabric.errors import ConfigError
from modalities.checkpoint_tensors import open_tensors
from modalities.part_names import names_of_others
from modalities.quantisation import read_quantisation
from modalities.sharding import load_pretrained

_MODEL_TYPE_TO_CLASS: Mapping[str, type[PreTrainedModel]] = {
    "llama": LlamaForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}
# The text half of a larger model: the names before and since transformers 4.52.
_TEXT_NAMES = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
}
_OLD_BUFFERS = (r"(^|\.)rotary(_pos)?_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Computed today; once a part of checkpoints."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_pretrained_config(model_dir: Path) -> PreTrainedConfig:
    """Raises ConfigError."""
    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"can't read the config of {model_dir}: {error}") from error


def load_text_half(model_dir: Path, device: str, dtype: str, attention_name: str) -> PreTrainedModel:
    """A language model with its head, out of its own checkpoint or one that has it as `text_config`; its attention is
    the function registered as `attention_name`. Raises ConfigError."""
    config = read_pretrained_config(model_dir)
    text = getattr(config, "text_config", None)
    if text is None:
        text = config
    else:
        text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    if text.model_type not in _MODEL_TYPE_TO_CLASS:
        raise ConfigError(f"text model {text.model_type!r} is not supported")
    kind = _MODEL_TYPE_TO_CLASS[text.model_type]
    names = PartNames(_TEXT_NAMES, names_of_others("text"))
    return load_part(kind, model_dir, text, names, (device, dtype), attention_name)


@dataclass(frozen=True, slots=True)
class PartNames:
    """The names of a part's weights in its checkpoints."""

    own: Mapping[str, str]
    """Patterns of the checkpoints' names -> the part's."""
    others: Sequence[str]
    """Patterns of the names of other parts."""


def load_part(
    kind: type[PreTrainedModel],
    model_dir: Path,
    config: PreTrainedConfig,
    names: PartNames,
    place: tuple[str, str],
    attention_name: str,
) -> Any:
    """A `kind` with weights, on a device, in evaluation mode; those that are stored as float8 are dequantised.
    `place` is (device, dtype). Raises ConfigError for weights that are missing, left over, or of a form that can't be
    loaded."""
    device, dtype = place
    if dtype not in _DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; known: {', '.join(_DTYPES)}")
    # transformers keeps the class's name in its own tables of names, so the part is called like its original.
    unused = (*(kind._keys_to_ignore_on_load_unexpected or ()), *_OLD_BUFFERS)
    part_kind = type(kind.__name__, (kind,), {"_keys_to_ignore_on_load_unexpected": unused})
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):  # what Weft makes of it is no quantised model to transformers
        del config.quantization_config
    with open_tensors(model_dir, names.others, read_quantisation(model_dir)) as tensors:
        try:
            part, info = load_pretrained(
                part_kind,
                tensors,
                config=config,
                key_mapping=dict(names.own),
                dtype=_DTYPES[dtype],
                attn_implementation=attention_name,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"can't load {kind.__name__} from {model_dir}: {error}") from error
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(f"{model_dir} lacks {len(missing)} weights of {kind.__name__}, e.g. {missing[0]}")
    if left := sorted(info["unexpected_keys"]):
        first = ", ".join(left[:3])
        raise ConfigError(f"{model_dir} has {len(left)} weights that {kind.__name__} has no place for, e.g. {first}")
    return part.to(device).eval()

"""Loads and runs the text half of a model of any family on Weft's attention: it maps embeddings to hidden states, and
these to logits.

`TextModel` runs a part of a checkpoint that transformers has loaded. It knows nothing of sequences: it gets packed
tokens, and metadata for the attention function that it passes on unread. `load_causal_lm` loads a plain causal language
model, and `load_text_model` a text half that a family itself loads. `load_part` is below both, and loads any part of a
checkpoint as a transformers module, such as an encoder.

The loading functions know nothing of how a part computes, and the module knows nothing of requests and media.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fabric.contracts import ConfigError
from modalities.checkpoint_files import names_of_others, read_stored_quantisation
from modalities.checkpoint_tensors import load_pretrained, open_tensors
from modalities.families.causal_lm.fused_layers import (
    AddedLevels,
    LastRows,
    can_end_early,
    fused,
    is_fused,
    is_packed,
    pad_step,
    run_layers,
    run_unfused,
)
from modalities.torch_dtypes import torch_dtype


class TextModel:
    """Implements `modalities.family.LanguageModel`. A family's differences are data of a step: the number of axes of
    its positions (three for M-RoPE), and its DeepStack levels. Only one forward pass may run at a time: the class is
    not thread-safe."""

    def __init__(self, part: Any) -> None:
        """Takes a part of transformers that has `model` and `lm_head`."""
        self._part = part
        self.dtype: torch.dtype = part.dtype
        self.device: torch.device = part.device
        self._is_padded = is_packed(part)
        self._run = run_layers if is_fused(part) else run_unfused

    def layer(self, index: int) -> torch.nn.Module:
        """Returns a decoder layer, whose output is the residual stream `(1, num_tokens, hidden)`."""
        found: torch.nn.Module = self._part.model.layers[index]
        return found

    @torch.no_grad()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Maps int64 token ids `(num_tokens,)` to embeddings `(num_tokens, hidden)`."""
        embeddings: torch.Tensor = self._part.model.embed_tokens(token_ids)
        return embeddings

    @torch.no_grad()
    def forward(
        self,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        attention: Any,
        feature_rows: torch.Tensor | None,
        feature_levels: torch.Tensor | None,
        wanted_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps embeddings `(num_tokens, hidden)` and positions `(num_axes, num_tokens)` to the last hidden states
        `(num_tokens, hidden)`, normed. Returns only `wanted_rows` if given. `feature_levels[i]` is added after layer i
        at `feature_rows` (DeepStack)."""
        num_tokens = len(embeddings)
        if self._is_padded:
            embeddings, positions = pad_step(embeddings, positions)
        is_early = can_end_early(self._part)
        added = None
        if feature_rows is not None and feature_levels is not None and len(feature_rows) and len(feature_levels):
            added = AddedLevels(feature_rows, feature_levels)
            # The last layer can end early only if it gets no features.
            is_early = is_early and len(feature_levels) < len(self._part.model.layers)
        rows = LastRows(wanted_rows, len(embeddings), is_padded=self._is_padded, can_end_early=is_early)
        hidden = self._run(self._part.model, embeddings, positions, attention, rows.finished, added)
        return rows.of(hidden, num_tokens)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden states `(n, hidden)` to float32 logits `(n, vocab)`."""
        logits: torch.Tensor = self._part.lm_head(hidden)
        return logits.float()


def load_causal_lm(model_dir: Path, device: str, dtype: str, attention_name: str) -> TextModel:
    """Loads a plain causal language model, alone or as the text half of a larger checkpoint. Raises ConfigError as
    `load_text_model` does."""
    return load_text_model(partial(load_text_half, model_dir, device, dtype), attention_name)


def load_text_model(load: Callable[[str], PreTrainedModel], attention_name: str) -> TextModel:
    """Loads a text half with fused layers. `load` takes the name of the attention and returns the part. Raises
    ConfigError if a weight is missing, or if `attention_name` is not a registered attention function without a mask
    function: with one, transformers would build masks over the packed tokens of a step."""
    if attention_name not in ALL_ATTENTION_FUNCTIONS:
        raise ConfigError(f"the attention function {attention_name!r} is not registered with transformers")
    if attention_name in ALL_MASK_ATTENTION_FUNCTIONS:
        raise ConfigError(f"the attention function {attention_name!r} must not have a mask function, but it has one")
    return TextModel(fused(load(attention_name)))


# ------------------------------------------------------------ loading parts of a checkpoint

_MODEL_TYPE_TO_CLASS: Mapping[str, type[PreTrainedModel]] = {
    "llama": LlamaForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}
# These names belong to the text half of a larger model, before and since transformers 4.52.
_TEXT_NAMES = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
}
_OLD_BUFFERS = (r"(^|\.)rotary(_pos)?_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Matches buffers that are computed today and that older checkpoints contain."""


def load_text_half(model_dir: Path, device: str, dtype: str, attention_name: str) -> PreTrainedModel:
    """Loads a language model with its head, from its own checkpoint or from one that has it as `text_config`; its
    attention is the function registered as `attention_name`. Raises ConfigError."""
    config = read_pretrained_config(model_dir)
    text = getattr(config, "text_config", None)
    if text is None:
        text = config
    else:
        text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    if text.model_type not in _MODEL_TYPE_TO_CLASS:
        known = ", ".join(_MODEL_TYPE_TO_CLASS)
        raise ConfigError(f"the text model {text.model_type!r} is not supported; Weft supports {known}")
    kind = _MODEL_TYPE_TO_CLASS[text.model_type]
    names = PartNames(_TEXT_NAMES, names_of_others("text"))
    return load_part(kind, model_dir, text, names, (device, dtype), attention_name)


@dataclass(frozen=True, slots=True)
class PartNames:
    """Holds the names of a part's weights in its checkpoints."""

    own: Mapping[str, str]
    """Maps patterns of the checkpoints' names to the part's names."""
    others: Sequence[str]
    """Holds patterns of the names of other parts."""


def load_part(
    kind: type[PreTrainedModel],
    model_dir: Path,
    config: PreTrainedConfig,
    names: PartNames,
    place: tuple[str, str],
    attention_name: str,
) -> Any:
    """Loads a `kind` with its weights, on a device and in evaluation mode; weights that are stored as float8 are
    dequantised. `place` is (device, dtype). Raises ConfigError for weights that are missing, left over, or of a form
    that can't be loaded.

    `names` maps the checkpoint's names to the part's own. Without such a mapping, transformers would leave the weights
    random and report that only in a log line. So Weft refuses to start if a weight is missing, and also if one is left
    over: a weight that nothing uses means that the model is not the one it was taken for. A family names the weights of
    its other parts; no other weights may stay unused, except buffers that old checkpoints hold."""
    device, dtype = place
    weight_dtype = torch_dtype(dtype)
    # transformers looks the class's name up in its own tables, so the part has the same name as its original.
    unused = (*(kind._keys_to_ignore_on_load_unexpected or ()), *_OLD_BUFFERS)
    part_kind = type(kind.__name__, (kind,), {"_keys_to_ignore_on_load_unexpected": unused})
    config = copy.deepcopy(config)
    # Weft dequantises the weights, so transformers must not treat the model as quantised.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with open_tensors(model_dir, names.others, read_stored_quantisation(model_dir)) as tensors:
        try:
            part, info = load_pretrained(
                part_kind,
                tensors,
                device,
                config=config,
                key_mapping=dict(names.own),
                dtype=weight_dtype,
                attn_implementation=attention_name,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"can't load {kind.__name__} from {model_dir}: {error}") from error
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(f"{model_dir} lacks {len(missing)} weights of {kind.__name__}, for example {missing[0]}")
    if left := sorted(info["unexpected_keys"]):
        first = ", ".join(left[:3])
        raise ConfigError(f"{model_dir} has {len(left)} weights that {kind.__name__} does not use, for example {first}")
    return part.to(device).eval()


def read_pretrained_config(model_dir: Path) -> PreTrainedConfig:
    """Reads the checkpoint's config with transformers. Raises ConfigError."""
    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"can't read the config of {model_dir}: {error}") from error

"""Parts of a Qwen3-Omni checkpoint as transformers modules. The one place that knows the checkpoint's weight names.

A part is loaded with a mapping from the checkpoint's names to its own; without one transformers would leave the
weights random and say so in a log line only. So whatever is missing refuses the start.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeThinkerConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoePreTrainedModel,
    Qwen3OmniMoeTextConfig,
    Qwen3OmniMoeThinkerTextModel,
    Qwen3OmniMoeVisionEncoder,
    Qwen3OmniMoeVisionEncoderConfig,
)

from fabric.errors import ConfigError
from modalities.qwen3_omni.config import Qwen3OmniConfig

Part = TypeVar("Part", bound=Qwen3OmniMoePreTrainedModel)

_VISION_NAMES = {r"^(thinker\.)?(model\.)?visual\.": ""}
_TEXT_NAMES = {
    r"^thinker\.lm_head\.": "lm_head.",
    r"^(thinker\.)?model\.language_model\.": "model.",
    r"^thinker\.model\.": "model.",
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Sorts tokens by expert and sums each token's experts in a fixed order. `eager` adds with atomics on CUDA, so its sums
# depend on the batch; `batched_mm` copies the weights once per token.
_EXPERTS = "grouped_mm"


class VisionTower(Qwen3OmniMoeVisionEncoder):
    """The vision encoder as a part; the rest of the checkpoint is passed over in silence."""

    _keys_to_ignore_on_load_unexpected = (r".",)


class TextHalf(Qwen3OmniMoePreTrainedModel):
    """The thinker's text model and its head, without the encoders."""

    config: Qwen3OmniMoeTextConfig
    input_modalities = ("text",)
    _keys_to_ignore_on_load_unexpected = (r".",)
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (transformers' attribute)

    def __init__(self, config: Qwen3OmniMoeTextConfig) -> None:
        super().__init__(config)
        self.model = Qwen3OmniMoeThinkerTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


def load_vision_tower(model_dir: Path, config: Qwen3OmniConfig, device: str, dtype: str) -> VisionTower:
    """On `device`, in evaluation mode. Raises ConfigError."""
    vision_config: Qwen3OmniMoeVisionEncoderConfig = _thinker_config(model_dir, config).vision_config
    return _load(VisionTower, model_dir, vision_config, _VISION_NAMES, device, dtype, "sdpa")


def load_text_half(model_dir: Path, config: Qwen3OmniConfig, device: str, dtype: str, attention_name: str) -> TextHalf:
    """Its attention is the function registered as `attention_name`. Raises ConfigError."""
    thinker = _thinker_config(model_dir, config)
    text_config: Qwen3OmniMoeTextConfig = thinker.text_config
    text_config.tie_word_embeddings = bool(thinker.tie_word_embeddings)
    text_config.output_router_logits = False
    part = _load(TextHalf, model_dir, text_config, _TEXT_NAMES, device, dtype, attention_name)
    part.model.set_experts_implementation(_EXPERTS)
    return part


def _thinker_config(model_dir: Path, config: Qwen3OmniConfig) -> Qwen3OmniMoeThinkerConfig:
    if config.is_thinker_only:
        return Qwen3OmniMoeThinkerConfig.from_pretrained(model_dir)
    return Qwen3OmniMoeConfig.from_pretrained(model_dir).thinker_config


def _load(
    kind: type[Part],
    model_dir: Path,
    config: Qwen3OmniMoeTextConfig | Qwen3OmniMoeVisionEncoderConfig,
    key_mapping: dict[str, str],
    device: str,
    dtype: str,
    attention_name: str,
) -> Part:
    if dtype not in _DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; known: {', '.join(_DTYPES)}")
    try:
        part, info = kind.from_pretrained(
            model_dir,
            config=config,
            key_mapping=key_mapping,
            dtype=_DTYPES[dtype],
            output_loading_info=True,
            local_files_only=True,
            attn_implementation=attention_name,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"can't load {kind.__name__} from {model_dir}: {error}") from error
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(f"{model_dir} lacks {len(missing)} weights of {kind.__name__}, e.g. {missing[0]}")
    return part.to(device).eval()

"""Loads parts of a Qwen vision checkpoint as transformers modules. Only this module knows the checkpoints' weight
names. It knows nothing of how a part computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fabric.errors import ConfigError
from modalities.causal_lm.checkpoint import PartNames, load_part
from modalities.family import EncoderModel
from modalities.part_names import names_of_others
from modalities.qwen_vl.config import QwenVLConfig

_VISION_NAMES = {r"^(thinker\.)?(model\.)?visual\.": ""}
_TEXT_NAMES = {
    r"^thinker\.lm_head\.": "lm_head.",
    r"^(thinker\.)?model\.language_model\.": "model.",
    r"^thinker\.model\.": "model.",
}
# This implementation sorts tokens by expert and sums each token's experts in a fixed order. `eager` adds with atomics
# on CUDA, so its sums depend on the batch; `batched_mm` copies the weights once per token.
_EXPERTS = "grouped_mm"


LoadSound = Callable[[Path, PreTrainedConfig, QwenVLConfig, tuple[str, str]], EncoderModel]
"""Loads the encoder of sounds; its parameters are the model directory, `audio_config`, the family's config, and
(device, dtype)."""


@dataclass(frozen=True)
class Checkpoint:
    """Holds a family's transformers classes."""

    config: type[PreTrainedConfig]
    """Names the config class of the model with vision and text."""
    tower: type[PreTrainedModel]
    text_model: type[PreTrainedModel]
    whole_config: type[PreTrainedConfig] | None = None
    """Names the config class of a checkpoint that holds the model as its thinker (the part of an omni model that reads
    media and writes text); None for a family that has no such checkpoints."""
    has_experts: bool = False
    load_sound: LoadSound | None = None
    """Loads the encoder of sounds; None for a family that takes no sound."""

    def load_vision_tower(self, model_dir: Path, config: QwenVLConfig, device: str, dtype: str) -> PreTrainedModel:
        """Loads the vision tower on `device`, in evaluation mode. Raises ConfigError."""
        kind = type("VisionTower", (self.tower,), {})
        vision_config = self._model_config(model_dir, config).vision_config
        names = PartNames(_VISION_NAMES, names_of_others("vision"))
        return load_part(kind, model_dir, vision_config, names, (device, dtype), "sdpa")

    def load_sound_tower(self, model_dir: Path, config: QwenVLConfig, place: tuple[str, str]) -> EncoderModel:
        """Loads the encoder of sounds; `place` is (device, dtype). Raises ConfigError, also for a family that does not
        take sound."""
        if self.load_sound is None:
            raise ConfigError(f"{model_dir} has no audio tower")
        audio_config = self._model_config(model_dir, config).audio_config
        return self.load_sound(model_dir, audio_config, config, place)

    def load_text_half(
        self, model_dir: Path, config: QwenVLConfig, device: str, dtype: str, attention_name: str
    ) -> PreTrainedModel:
        """Loads the text half, with `model` and `lm_head`; its attention is the function registered as
        `attention_name`. Raises ConfigError."""
        model_config = self._model_config(model_dir, config)
        text_config = model_config.text_config
        text_config.tie_word_embeddings = bool(model_config.tie_word_embeddings)
        if self.has_experts:
            text_config.output_router_logits = False
        kind = text_half_of(self.text_model)
        names = PartNames(_TEXT_NAMES, names_of_others("text"))
        part = load_part(kind, model_dir, text_config, names, (device, dtype), attention_name)
        if self.has_experts:
            part.model.set_experts_implementation(_EXPERTS)
        return part

    def _model_config(self, model_dir: Path, config: QwenVLConfig) -> PreTrainedConfig:
        try:
            if config.is_thinker_only or self.whole_config is None:
                return self.config.from_pretrained(model_dir, local_files_only=True)
            return self.whole_config.from_pretrained(model_dir, local_files_only=True).thinker_config
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"can't read the config of {model_dir}: {error}") from error


def text_half_of(text_model: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Returns a class that holds a text model and its head, without the encoders."""
    # The base class is the family's PreTrainedModel, which knows the initial weights and the supported attention.
    (family,) = text_model.__bases__

    class TextHalf(family):  # type: ignore[misc, valid-type]
        config_class = text_model.config_class
        input_modalities = ("text",)
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (transformers' attribute)

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.model = text_model(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

    return TextHalf
